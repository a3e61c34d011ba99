"""Reads recipe_version 2, the format of sparkrun, as the version 1 that it stands for.

Source: RECIPES.md of github.com/spark-arena/sparkrun, sections "Field Reference", "Config Chain",
"Command Templates" and "Runtime Resolution", and its runtimes/_vllm_common.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm12x.core.text import first_of
from sm12x.recipes import options, shell
from sm12x.recipes.model import RECIPE_VERSION

_VERSION = "2"
# Runtimes of sparkrun that are `vllm serve`; the others are other engines.
_RUNTIMES = ("vllm", "vllm-distributed", "vllm-ray", "eugr-vllm")
# Keys of version 1 that mean the same there.
_SAME = ("model", "model_revision", "env", "mods", "build_args", "sm12x", "container")
# Keys that only inform people, or that are handled below.
_READ = (
    *("recipe_version", "name", "runtime", "runtime_version", "command", "defaults", "metadata"),
    *("description", "mode", "min_nodes", "max_nodes", "solo_only", "cluster_only", "benchmark"),
)
# Options of vLLM whose setting has another name; of the rest it is the option's with `_` for `-`.
_OPTIONS = {
    "tensor_parallel": "tensor-parallel-size",
    "pipeline_parallel": "pipeline-parallel-size",
    "data_parallel": "data-parallel-size",
}
# What vLLM does unless it is told not to.
_ON_BY_DEFAULT = (
    *("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"),
    *("enable_flashinfer_autotune", "scheduler_reserve_full_isl"),
)
# Characters that settings within settings may add up to.
_MOST_TEXT = 1 << 18
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Translation:
    """``top`` has the keys of version 1; ``not_applied`` names what of the file has no effect here.

    ``faults`` are (key, text) of what keeps the recipe from running on vLLM.
    """

    top: dict[str, Any]
    not_applied: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()


def is_theirs(top: Mapping[str, Any]) -> bool:
    """Whether a file is of version 2: sparkrun takes one without a version for that."""
    if "recipe_version" in top:
        return str(top["recipe_version"]) == _VERSION
    return "runtime" in top or "include" in top


def translate(top: Mapping[str, Any], key: str) -> Translation:
    """Translate a recipe of sparkrun into version 1. ``key`` names it where the file does not.

    A template is filled as sparkrun fills it: ``{model}`` is the model, braces of JSON stand alone
    unless the template doubles them, a name that is no setting stays as it is, and a setting may
    refer to another. Without a command every setting is an option of `vllm serve`.
    """
    if "include" in top:
        reason = (
            f"include: the rest of this recipe is in {top['include']!r}, which is not read here"
        )
        return Translation(top={}, faults=(("include", f"{reason}: put its keys into this file"),))
    faults: list[tuple[str, str]] = []
    runtime = str(top.get("runtime") or "vllm")
    if runtime not in _RUNTIMES:
        faults.append(
            (
                "runtime",
                f"runtime is {runtime!r}, not vLLM: one of {', '.join(_RUNTIMES)} runs here",
            )
        )
    metadata = top.get("metadata") if isinstance(top.get("metadata"), dict) else {}
    defaults = top.get("defaults") or {}
    if not isinstance(defaults, dict):
        return Translation(top={}, faults=(("defaults", "defaults is not a mapping of settings"),))
    settings: dict[str, Any] = {"model": top["model"]} if "model" in top else {}
    for name, value in defaults.items():
        if value is not None:
            settings[name] = json.dumps(value) if isinstance(value, dict | list) else value
    command = top.get("command")
    if command is None:
        command = _generated(settings)
    nested = _nested(settings)
    if isinstance(command, str):
        try:
            command = _template(_resolved(_named(command, settings), nested), settings)
        except RecursionError:
            faults.append(
                (
                    "defaults",
                    f"defaults refer to each other, or without end: {first_of([*nested], 9)}",
                )
            )
    recipe = {
        # sparkrun has an image for each runtime; here it is the bundle's.
        "container": "vllm-sm12x",
        **{name: top[name] for name in _SAME if name in top},
        "recipe_version": RECIPE_VERSION,
        "name": str(top.get("name") or key),
        "description": str(top.get("description") or (metadata or {}).get("description") or ""),
        "command": command,
        "defaults": {name: value for name, value in settings.items() if name not in nested},
        **_machines(top),
    }
    ignored = tuple(name for name in top if name not in (*_SAME, *_READ))
    return Translation(top=recipe, not_applied=ignored, faults=tuple(faults))


def _machines(top: Mapping[str, Any]) -> dict[str, bool]:
    """``solo_only`` and ``cluster_only``, by these keys or by the numbers of machines."""
    least, most = top.get("min_nodes"), top.get("max_nodes")
    cluster = bool(top.get("cluster_only")) or top.get("mode") == "cluster"
    solo = bool(top.get("solo_only")) or top.get("mode") == "solo"
    return {
        "cluster_only": cluster or (isinstance(least, int) and least > 1),
        "solo_only": solo or most == 1,
    }


def _generated(settings: Mapping[str, Any]) -> str:
    """`vllm serve` with every setting as an option; a false one is `--no-...` or left out."""
    words = ["vllm serve {model}"] if "model" in settings else ["vllm serve"]
    for name, value in settings.items():
        option = f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
        if value is True:
            words.append(option)
        elif value is False and name in _ON_BY_DEFAULT:
            words.append(option.replace("--", "--no-", 1))
        elif name != "model" and value is not False:
            words.append(f"{option} {_quoted(name, value)}")
    return " ".join(words)


def _quoted(name: str, value: object) -> str:
    """The placeholder of a setting as one word of a shell."""
    quotes = "'" if isinstance(value, str) and re.search(r"[\s\"{}$]", value) else ""
    return f"{quotes}{{{name}}}{quotes}"


def _named(command: str, settings: Mapping[str, Any]) -> str:
    """A template with --served-model-name, which sparkrun adds where only the settings have it."""
    name = settings.get("served_model_name")
    try:
        script = shell.read(command)
        server = script.server()
    except (ValueError, shell.UnreadError):
        return command
    if not name or not server or "served-model-name" in options.parse(server.serve or ()):
        return command
    return script.joined(server, ("--served-model-name", _quoted("served_model_name", name)))


def _nested(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings whose value refers to another setting."""
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, str)
        and any(field in settings for field in _PLACEHOLDER.findall(value))
    }


def _resolved(text: str, nested: Mapping[str, str]) -> str:
    """``text`` with these settings put in.

    Raises RecursionError if they refer to each other, or ten of each make it too long to be read.
    """
    room = _MOST_TEXT

    def put(text: str, depth: int) -> str:
        def value(match: re.Match[str]) -> str:
            nonlocal room
            if match[1] not in nested:
                return match[0]
            room -= 1 + len(nested[match[1]])
            if room < 0 or depth == len(nested):
                raise RecursionError
            return put(nested[match[1]], depth + 1)

        return _PLACEHOLDER.sub(value, text)

    return put(text, 0)


def _template(text: str, settings: Mapping[str, Any]) -> str:
    """The `str.format` template of a command: all braces doubled but those of the settings.

    As in version 1 a doubled brace is one, where the text has any; people mix them with plain ones.
    """
    as_written = ("{{", "}}") if "{{" in text else ()

    def piece(match: re.Match[str]) -> str:
        if match[1] in settings or match[0] in as_written:
            return match[0]
        return match[0].replace("{", "{{").replace("}", "}}")

    return re.sub(r"\{(\w+)\}|\{\{|\}\}|[{}]", piece, text)
