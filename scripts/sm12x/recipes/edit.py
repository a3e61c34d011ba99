"""Edits recipe files in place (pins, imports); all other bytes stay."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from sm12x.core import files, yamltext
from sm12x.core.errors import BadFileError, UsageError
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import filled

_REVISION = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def pin(path: Path, *, revision: str = "", digest: str = "") -> Recipe:
    """Write a model revision, a container digest, or both into a recipe, and read it back.

    Every other byte of the file stays: comments, quotes and order.

    Raises:
        UsageError: a revision that is no commit, a digest that is none, or neither given.
        BadFileError: the file is no recipe, or its command cannot take the revision.
    """
    if not revision and not digest:
        raise UsageError(
            "there is nothing to pin",
            next_step="give --model-revision COMMIT, --container-digest sha256:..., or both",
        )
    if revision and not _REVISION.fullmatch(revision):
        raise UsageError(
            f"{revision!r} is not a commit: a branch or tag may move",
            next_step="give the 40 hex digits that the model's repository shows under History",
        )
    if digest and not _DIGEST.fullmatch(digest):
        raise UsageError(
            f"{digest!r} is not a digest",
            next_step="give sha256: and 64 hex digits, as `docker images --digests` shows it",
        )
    recipe = load.load(path)
    if revision:
        # Raises where it cannot be put into the command.
        filled(replace(recipe, model_revision=revision))
    before = text = path.read_text(encoding="utf-8")
    values = {}
    if digest:
        values["container"] = f"{recipe.container.partition('@')[0]}@{digest}"
        text = yamltext.put(text, "container", values["container"])
    if revision:
        values["model_revision"] = revision
        text = yamltext.put(text, "model_revision", revision, after=("model", "container"))
    if yamltext.parse(text).data != {**yamltext.parse(before).data, **values}:
        raise BadFileError(
            f"{path}: {' and '.join(values)} cannot be changed in place: an alias is in the way",
            next_step="write the value there yourself, or give the key a value of its own",
        )
    files.write_output(path, text)
    return load.load(path)


# The block that `recipe import` appends. The user fills in the values that are not known.
_BLOCK = """
# Facts that the format has no other key for. Guessed from the recipe: check each line.
sm12x:
  # One or more of rtx-pro-6000, rtx-5090, gb10, any.
  hardware: [{hardware}]
  # GPUs of one machine.
  gpus: {gpus}
  machines: {machines}
  # level: 1 keeps the weights in host memory, 2 discards them; never needs a reason.
  sleep:
{sleep}
  # GiB on each GPU, each with basis (measured, reported or estimated) and source, such as
  #   weights: {{gib: 17, basis: reported, source: who and where}}
  # and kv, outside, sleep_residue. `sm12x plan` counts what is missing as unknown.
  memory: {{}}
  status:
    # verified needs date and evidence, reported a source.
    state: untested
    source: imported from {name}
"""
_AWAKE = """    level: never
    reason: not tried"""


def imported(path: Path) -> str:
    """The text of another's recipe with a block of ours to fill in.

    Raises:
        UsageError: it has a block already.
        BadFileError: it is no recipe.
    """
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is no file: it is read more than once", next_step="save it as a file first"
        )
    recipe = load.load(path)
    if recipe.sm12x:
        raise UsageError(
            f"{path} has an sm12x block already",
            next_step=f"sm12x recipe lint {shlex.quote(str(path))}",
        )
    given = options.parse(filled(recipe).serve or ())
    sizes = [
        options.number(given, f"{name}-parallel-size") or 1
        for name in ("tensor", "pipeline", "data")
    ]
    gpus = sizes[0] * sizes[1] * sizes[2]
    text = path.read_text(encoding="utf-8")
    return (
        text.rstrip("\n")
        + "\n"
        + _BLOCK.format(
            # The format comes from machines with one GPU each.
            hardware="gb10",
            gpus=1,
            machines=gpus,
            sleep="    level: 1" if "enable-sleep-mode" in given else _AWAKE,
            name=path.name,
        )
    )
