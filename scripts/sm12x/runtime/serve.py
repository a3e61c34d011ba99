"""From a recipe's name and arguments to the process that serves it."""

from __future__ import annotations

import os
import platform
import pwd
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm12x import layout
from sm12x.core import machine
from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import GIB
from sm12x.recipes import options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered, render, require_harmless, settings_from
from sm12x.runtime import sleep_backend
from sm12x.runtime.places import CACHE_VARIABLES, Places, require_temporary

# How many compilers FlashInfer, and torch's extensions, run at a time.
_JOBS = "MAX_JOBS"


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Divide what follows a recipe's name into settings and vLLM's own arguments.

    Raises:
        UsageError: a word before `--` is not key=value.
    """
    words = list(arguments)
    extra: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, extra = words[:at], words[at + 1 :]
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key.startswith("-"):
            raise UsageError(
                f"{word!r} is not key=value",
                next_step=f"put vLLM's own arguments after --: -- {' '.join(words)}",
            )
        settings[key] = value
    return settings, extra


def prepare(
    recipe: Recipe, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Rendered, list[str]]:
    """The process to become, and remarks for the user.

    Raises:
        UsageError: an argument or setting the recipe does not have; it is for several machines and
            does not say how one of them is started alone; it would run a repository's code at no
            certain commit, or offer sleep routes to a network without a key.
    """
    if recipe.cluster_only and recipe.sm12x is None:
        raise UsageError(
            f"{recipe.key} is for several machines (cluster_only)",
            next_step="start it with the runner of that cluster, or pick a recipe for one machine",
        )
    given, extra = split(arguments)
    inherited, remarks = settings_from(environ, recipe)
    first = {**recipe.defaults, **inherited, **given}.get("master_addr", "")
    if recipe.cluster_only and first in ("127.0.0.1", "localhost"):
        raise UsageError(
            f"{recipe.key} needs the first machine's address, on every machine",
            next_step="give master_addr=ADDRESS, and on the others node_rank=N and -- --headless",
        )
    if why := recipe.blocked_on(layout.release()):
        remarks.append(f"{recipe.key} cannot serve yet: {why}")
    if recipe.mods:
        remarks.append(f"{recipe.key} asks for mods that are not applied: {', '.join(recipe.mods)}")

    def rendered(*more: str) -> Rendered:
        return render(
            recipe,
            settings={**inherited, **given},
            extra=[*extra, *more],
            environ=environ,
            # A file without our block was written for machines with one GPU each.
            solo=recipe.sm12x is None,
        )

    plain = rendered()
    require_harmless(recipe, plain.serve)
    remarks += _keyless(recipe, plain, environ)
    if plain.unpinned:
        remarks.append(f"model_revision of {recipe.key} is not applied: {plain.unpinned}")
    more = sleep_backend.arguments(
        plain.serve,
        setting={**plain.env, **environ}.get(sleep_backend.SETTING, ""),
        installed=sleep_backend.is_installed(),
    )
    return rendered(*more) if more else plain, remarks


def _keyless(recipe: Recipe, rendered: Rendered, environ: Mapping[str, str]) -> list[str]:
    """A remark on a server that other machines may reach, and that asks for no key.

    Raises:
        UsageError: it has sleep routes, with which a stranger could stop it.
    """
    given = options.parse(rendered.serve or ())
    keyless = options.is_keyless(given, {**environ, **rendered.env})
    if rendered.serve is None or "headless" in given or not keyless:
        return []
    where = f"{recipe.key} listens on {options.find(given, 'host') or 'every address'}"
    if options.find(given, "enable-sleep-routes") is not None:
        raise UsageError(
            f"{where} with sleep routes and no key: any client there could put it to sleep",
            next_step="set VLLM_API_KEY (docker run -e VLLM_API_KEY), or listen on 127.0.0.1",
        )
    return [
        f"{where} and asks for no key: publish its port on 127.0.0.1 alone, or set VLLM_API_KEY "
        "(docker run -e VLLM_API_KEY)"
    ]


def require_caches(places: Places, environ: Mapping[str, str]) -> list[str]:
    """Raise BadFileError unless caches and /tmp can be written: vLLM fails late and obscurely.

    Returns a remark where any user may replace what another one compiled there.
    """
    require_temporary()
    folders = {str(places.cache), *(environ[name] for name in CACHE_VARIABLES if name in environ)}
    for folder in sorted(folders):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            uid = os.getuid()
            raise BadFileError(
                f"{folder} cannot be written by uid {uid}: {error.strerror}",
                next_step="add `-v sm12x-cache:/cache` to docker run, or "
                f"`-v DIR:/cache` with a DIR that uid {uid} may write",
            ) from None
    mode = places.cache.stat().st_mode
    if mode & stat.S_ISVTX or not mode & stat.S_IWOTH:
        return []
    try:
        # The image's folder has the bit; the volume that `buildah run` makes of it has not.
        places.cache.chmod(stat.S_IMODE(mode) | stat.S_ISVTX)
    except OSError:
        return [f"any user may replace what is compiled in {places.cache}: chmod +t its folder"]
    return []


def compilers(environ: Mapping[str, str], resident: float = 0.0) -> dict[str, str]:
    """MAX_JOBS for what is compiled at a server's first start; nothing where it is set.

    FlashInfer and torch start a compiler for each core otherwise, whatever memory there is.

    Args:
        resident: GiB that the model takes before the compilers start, which counts where the GPU
            has the host's memory: of 14 compilers beside a model all were killed, two fitted
            (edurdias/capyctl, October 2026, GB10).
    """
    free = machine.available()
    if environ.get(_JOBS) or free is None:
        return {}
    # SM12x GPUs share the host's memory where the processor is AArch64.
    unified = platform.machine() == "aarch64"
    if unified:
        free = max(0, free - int(resident * GIB))
    jobs = machine.compilers(cores=machine.cores(), available=free, unified=unified)
    return {_JOBS: str(jobs)}


def remark(jobs: Mapping[str, str]) -> str:
    """The remark on the variable that ``compilers`` set."""
    return (
        f"{_JOBS}={jobs[_JOBS]}: compilers at a time in the first start, by cores and free memory; "
        f"-e {_JOBS}=N changes it"
    )


def identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a uid that has no passwd entry (`--user 12345`).

    torch asks for the user's name, and tools write to HOME; without these they raise KeyError or
    write to /.
    """
    variables = {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        variables = {name: "vllm" for name in ("LOGNAME", "USER") if not environ.get(name)}
    home = environ.get("HOME", "/")
    if home == "/" or not os.access(home, os.W_OK):
        variables["HOME"] = "/cache"
    return variables
