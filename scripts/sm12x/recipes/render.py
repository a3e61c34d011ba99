"""Turns a recipe and its settings into the command line and the environment of one server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import perhaps
from sm12x.recipes import options
from sm12x.recipes.load import template_fields
from sm12x.recipes.model import Recipe

# A setting may come from the environment as SM12X_<KEY>; these are ours for other purposes.
_ENV_PREFIX = "SM12X_"
_RESERVED = (
    "SM12X_ROOT",
    "SM12X_CACHE",
    "SM12X_IMAGE_ROOT",
    "SM12X_IMAGE_CACHE",
    "SM12X_HEALTH_URL",
)
# Characters of a command line; Linux takes a word of 128 KiB and 2 MiB of words.
_LONGEST = 1 << 21
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
# Syntax that needs a shell. A command without any is run directly, so that it gets signals.
_SHELL = re.compile(r"[;&|<>()$`*?~]|\n\s*\S")
# First words that are no programs: a shell's own commands, and its `NAME=value`.
_BUILTINS = frozenset(
    (
        *(".", ":", "{", "!", "alias", "builtin", "cd", "command", "declare", "eval", "exec"),
        *("export", "hash", "local", "readonly", "set", "shopt", "source", "time", "trap", "type"),
        *("ulimit", "umask", "unset", "wait", "if", "for", "while", "until", "case"),
    )
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """``argv`` to run with ``env`` set on top of the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def serve(self) -> tuple[str, ...] | None:
        """The arguments of `vllm serve`, or None when the command is another one.

        A shell's command counts when it ends by becoming `vllm serve`: `prepare && exec vllm ...`.
        """
        words = self.argv
        if words[:2] == ("bash", "-c"):
            last = re.split(r"&&|;|\n", _hide_quoted(words[2]))[-1]
            try:
                # As many characters from the end: hiding keeps the length.
                words = tuple(shlex.split(words[2][-len(last) :])) if last else ()
            except ValueError:
                return None
            while words and (words[0] == "exec" or _ASSIGNMENT.match(words[0])):
                words = words[1:]
        return words[2:] if words[:2] == ("vllm", "serve") else None


def settings_from(environ: Mapping[str, str], recipe: Recipe) -> tuple[dict[str, str], list[str]]:
    """The settings given as SM12X_<KEY>, and a remark on each such variable that is none."""
    found, remarks = {}, []
    names = {f"{_ENV_PREFIX}{key.upper()}": key for key in recipe.defaults}
    for variable, value in environ.items():
        if variable in names:
            found[names[variable]] = value
        elif variable.startswith(_ENV_PREFIX) and variable not in _RESERVED:
            remarks.append(f"{variable} is not a setting of {recipe.key}{perhaps(variable, names)}")
    return found, remarks


def render(
    recipe: Recipe,
    *,
    settings: Mapping[str, str],
    extra: Sequence[str] = (),
    environ: Mapping[str, str],
    solo: bool,
) -> Rendered:
    """Fill in a recipe's command as eugr's runner does.

    Args:
        settings: values that go before the recipe's defaults; a name of its `env` sets that.
        extra: arguments put at the end, where vLLM lets the last one win.
        environ: what `$NAME` in the recipe's env is looked up in.
        solo: one machine with one GPU: tensor_parallel is 1 unless it is among the settings, and
            `--distributed-executor-backend X` is dropped.

    Raises:
        UsageError: a setting that the recipe does not have.
        BadFileError: the command cannot be filled in.
    """
    require_settings(recipe, settings)
    values: dict[str, object] = {**recipe.defaults}
    if solo and "tensor_parallel" in values:
        values["tensor_parallel"] = 1
    values |= settings
    try:
        text = recipe.command.format(**values)
    except (LookupError, ValueError, AttributeError, TypeError, MemoryError) as error:
        raise _unfit(recipe, f"{type(error).__name__}: {error}") from None
    if len(text) > _LONGEST:
        # A width such as {port:>99999999}; the system takes no such word.
        raise _unfit(recipe, f"it has {len(text)} characters, more than {_LONGEST}")
    env: dict[str, str] = {}
    for name, value in recipe.env.items():
        env[name] = settings[name] if name in settings else _expand(value, {**environ, **env})
    pinned = _revision(recipe, text)
    return Rendered(argv=_argv(recipe, text, (*pinned, *extra), solo=solo), env=env)


def require_settings(recipe: Recipe, settings: Iterable[str]) -> None:
    """Raise UsageError for a name that is no setting of the recipe, and none of its `env`."""
    try:
        asked = set(template_fields(recipe.command))
    except ValueError as error:
        raise _unfit(recipe, str(error)) from None
    for key in settings:
        if key not in recipe.defaults and key not in asked and key not in recipe.env:
            known = [*recipe.defaults, *recipe.env]
            raise UsageError(
                f"{recipe.key} has no setting {key!r}{perhaps(key, known)}",
                next_step=f"its settings are {', '.join(known) or 'none'}; "
                "give vLLM's own arguments after --",
            )


def _revision(recipe: Recipe, command: str) -> tuple[str, ...]:
    """The arguments that apply a pinned revision, where the command names none itself."""
    if not recipe.model_revision or "revision" in options.parse(command.split()):
        return ()
    return ("--revision", recipe.model_revision) if "vllm serve" in command else ()


def _argv(recipe: Recipe, text: str, extra: tuple[str, ...], *, solo: bool) -> tuple[str, ...]:
    """Split as a shell would: continued lines joined, a last backslash trimmed."""
    text = text.strip().removesuffix("\\").rstrip()
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    if solo:
        joined = re.sub(r"\s--distributed-executor-backend(?:=|\s+)\S+", "", joined)
    if _SHELL.search(_unquoted(joined)):
        return ("bash", "-c", " ".join((joined, *map(shlex.quote, extra))))
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise _unfit(recipe, str(error)) from None
    if words[:1] == ["exec"] and len(words) > 1 and not words[1].startswith("-"):
        # What is run directly is the process already.
        words = words[1:]
    if not words:
        raise _unfit(recipe, "it is empty, without `vllm serve`")
    if words[0] in _BUILTINS or _ASSIGNMENT.match(words[0]):
        return ("bash", "-c", " ".join((joined, *map(shlex.quote, extra))))
    return (*words, *extra)


def _hide_quoted(text: str) -> str:
    """``text`` with what stands in quotes replaced by as many `_`."""
    return re.sub(r"'[^']*'|\"[^\"]*\"", lambda match: "_" * len(match[0]), text)


def _unquoted(text: str) -> str:
    """``text`` without what stands in single quotes, and in double quotes all but `$` and "`"."""
    text = re.sub(r"'[^']*'", "", text)
    return re.sub(r'"[^"]*"', lambda match: "$" if re.search(r"[$`]", match[0]) else "", text)


def _expand(value: str, environ: Mapping[str, str]) -> str:
    """Put in `$NAME` and `${NAME}`; one that is not set is empty, as in a shell."""
    return _VARIABLE.sub(lambda match: environ.get(match[1] or match[2], ""), value)


def _unfit(recipe: Recipe, why: str) -> BadFileError:
    return BadFileError(
        f"{recipe.path}: the command cannot be filled in: {why}",
        next_step="correct the command: each {name} needs a default, braces of JSON are doubled",
    )
