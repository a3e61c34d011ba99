"""Turns a recipe and its settings into the command line and the environment of one server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import perhaps
from sm12x.recipes import options, shell
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
    options.POOL_KEY,
)
# Characters of a command line; Linux takes a word of 128 KiB and 2 MiB of words.
_LONGEST = 1 << 21
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
# First words that are no programs: a shell's own commands, and its `NAME=value`.
_BUILTINS = frozenset(
    (
        *(".", ":", "{", "!", "alias", "builtin", "cd", "command", "declare", "eval", "exec"),
        *("export", "hash", "local", "readonly", "set", "shopt", "source", "time", "trap", "type"),
        *("ulimit", "umask", "unset", "wait", "if", "for", "while", "until", "case"),
    )
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
# A recipe that sets these chooses who may use the server.
_KEYS = (options.KEY, options.SLEEP_KEY)
# What may move no longer: a branch or a tag of a model's repository may.
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What a single machine does without; the words may stand on two lines.
_BACKEND = re.compile(r"\s--distributed-executor-backend(?:=|(?:\s|\\\n)+)\S+")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """``argv`` to run with ``env`` set on top of the environment.

    ``serve`` has the arguments of vLLM's server, None where ``unchecked`` says why they are not
    known. ``unpinned`` says why the recipe's model_revision is not among them, "" if it is.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    serve: tuple[str, ...] | None
    unchecked: str = ""
    unpinned: str = ""

    @property
    def vllm_env(self) -> dict[str, str]:
        """Return the variables that vLLM itself reads."""
        return {name: value for name, value in self.env.items() if name.startswith("VLLM_")}


def settings_from(environ: Mapping[str, str], recipe: Recipe) -> tuple[dict[str, str], list[str]]:
    """Return the settings given as SM12X_<KEY>, and a remark on each unknown SM12X_ variable."""
    settings, remarks = {}, []
    names = {f"{_ENV_PREFIX}{key.upper()}": key for key in recipe.defaults}
    for variable, value in environ.items():
        if variable in names:
            settings[names[variable]] = value
        elif variable.startswith(_ENV_PREFIX) and variable not in _RESERVED:
            remarks.append(f"{variable} is not a setting of {recipe.key}{perhaps(variable, names)}")
    return settings, remarks


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
    if solo:
        text = _BACKEND.sub("", text)
    return _command(recipe, text, extra, env)


def filled(recipe: Recipe) -> Rendered:
    """The command with the defaults, as it would run. Raises BadFileError as ``render`` does."""
    solo = recipe.sm12x is None and not recipe.cluster_only
    return render(recipe, settings={}, environ={}, solo=solo)


def unpinned_code(words: Sequence[str] | None) -> str:
    """The repository whose Python files a server would run at whatever commit it has then.

    "" where the server runs none, has a commit, or serves a folder, whose files are there already.
    A draft model is a repository of its own.
    """
    given = options.parse(words or ())
    if not options.trusts_code(given):
        return ""
    draft = {name.partition(".")[2]: value for name, value in given.items() if "." in name}
    try:
        draft |= json.loads(given.get("speculative-config") or "{}")
    except (ValueError, TypeError):
        return "a draft model that cannot be read"
    served = (options.model(words or ()), options.find(given, "revision") or "")
    drafted = (str(draft.get("model") or ""), str(draft.get("revision") or ""))
    for model, revision in (served, drafted if drafted[0] else served):
        # A folder's files are what they are.
        if not model.startswith(("/", "./", "../", "~")) and not _COMMIT.fullmatch(revision):
            return model or "the model"
    return ""


def require_harmless(recipe: Recipe, words: Sequence[str] | None) -> None:
    """Raise UsageError for a server that would run a repository's code at no certain commit, or ask
    for a key that whoever has the file knows.
    """
    for name in _KEYS:
        if "$" not in (value := recipe.env.get(name, "$")) or not value:
            raise UsageError(
                f"{recipe.key} sets {name} itself, in place of yours, to a key that is in its file",
                next_step=f"take it out of the recipe's env, and give your own: -e {name}",
            )
    if repository := unpinned_code(words):
        setting = "revision" in recipe.defaults
        raise UsageError(
            f"{recipe.key} runs Python files of {repository}, and no commit of it is named",
            next_step="read the files and give their commit (40 hex digits, under History there): "
            + ("revision=COMMIT" if setting else "-- --revision COMMIT --code-revision COMMIT")
            + f", or `sm12x recipe pin {shlex.quote(str(recipe.path))} --model-revision COMMIT`",
        )


def arguments(recipe: Recipe) -> tuple[str, ...]:
    """The arguments of the recipe's server with the defaults; none where they are not known.

    Raises BadFileError as ``render`` does.
    """
    return render(recipe, settings={}, environ={}, solo=False).serve or ()


def require_settings(recipe: Recipe, settings: Iterable[str]) -> None:
    """Raise UsageError for a name that is neither a setting of the recipe nor in its `env`."""
    try:
        fields = set(template_fields(recipe.command))
    except ValueError as error:
        raise _unfit(recipe, str(error)) from None
    for key in settings:
        if key not in recipe.defaults and key not in fields and key not in recipe.env:
            names = [*recipe.defaults, *recipe.env]
            raise UsageError(
                f"{recipe.key} has no setting {key!r}{perhaps(key, names)}",
                next_step=f"its settings are {', '.join(names) or 'none'}; "
                "give vLLM's own arguments after --",
            )


def _command(recipe: Recipe, text: str, extra: Sequence[str], env: Mapping[str, str]) -> Rendered:
    """Put a pinned revision and ``extra`` behind the words of the server, wherever it stands."""
    try:
        script = shell.read(text)
    except ValueError as error:
        raise _unfit(recipe, str(error)) from None
    if not script.commands and not script.unread:
        raise _unfit(recipe, "it is empty, without `vllm serve`")
    revision = recipe.model_revision
    unchecked = unpinned = ""
    server = place = None
    more = tuple(extra)
    try:
        server = place = script.server()
        if not server:
            unchecked = unpinned = "it is not `vllm serve`"
            place = script.last() if more else None
        elif revision and not (given := options.parse(server.serve or ())).get("revision"):
            # Files of another repository, which `auto_map` may name, have no such commit: refused.
            code = ("--code-revision", revision) if options.trusts_code(given) else ()
            more = ("--revision", revision, *code, *more)
    except shell.UnreadError as error:
        unchecked = unpinned = str(error)
        pin = (f"model_revision {revision}",) if revision and "vllm" in text else ()
        if what := " and ".join((*pin, *((shlex.join(more),) if more else ()))):
            raise BadFileError(
                f"{recipe.path}:{recipe.lines.get('command', 1)}: {what} cannot be put into the "
                f"command: {error}",
                next_step="write it into the command yourself, "
                + ("and take model_revision out" if pin else "behind the server's other arguments"),
            ) from None
    argv: tuple[str, ...] = ("bash", "-c", script.joined(place, tuple(map(shlex.quote, more))))
    if script.plain and not _needs_shell(words := script.commands[0].words):
        # What is run directly is the process already.
        argv = (*words[words[0] == "exec" :], *more)
    return Rendered(
        argv=argv,
        env=env,
        serve=(*(server.serve or ()), *more) if server else None,
        unchecked=unchecked,
        unpinned=unpinned if revision else "",
    )


def _needs_shell(words: Sequence[str]) -> bool:
    if words[0] == "exec" and len(words) > 1 and not words[1].startswith("-"):
        words = words[1:]
    return words[0] in _BUILTINS or bool(_ASSIGNMENT.match(words[0]))


def _expand(value: str, environ: Mapping[str, str]) -> str:
    """Put in `$NAME` and `${NAME}`; one that is not set is empty, as in a shell."""
    return _VARIABLE.sub(lambda match: environ.get(match[1] or match[2], ""), value)


def _unfit(recipe: Recipe, why: str) -> BadFileError:
    return BadFileError(
        f"{recipe.path}: the command cannot be filled in: {why}",
        next_step="correct the command: each {name} needs a default, braces of JSON are doubled",
    )
