"""The image that both Dockerfiles start from: pulled by digest, or made here with debootstrap."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sm12x.core import files, process
from sm12x.core.errors import BuildFailedError, Sm12xError, ToolFailedError, ToolMissingError
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.base.platforms import Platforms
from sm12x.image.engine import engines
from sm12x.image.engine.engine import LOCAL_BASE, Engine, OnLine
from sm12x.stack.model.base import ImageBase

_ROOTFS_LABEL = "sm12x.rootfs.sha256"
_MADE_HERE = "debootstrap"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
# What a slim image leaves out; what an engine mounts its own over is empty below.
_LEFT_OUT = (
    *("dev", "usr/share/man", "usr/share/info", "usr/share/locale"),
    *("var/cache/apt", "var/cache/ldconfig", "var/lib/apt/lists", "var/log"),
)
# Written with the base image.
_FILES = {
    # What later packages leave out as well.
    "etc/dpkg/dpkg.cfg.d/80-slim": "path-exclude /usr/share/doc/*\n"
    "path-include /usr/share/doc/*/copyright\npath-exclude /usr/share/man/*\n"
    "path-exclude /usr/share/info/*\npath-exclude /usr/share/locale/*\n",
    "etc/apt/apt.conf.d/80-slim": 'Acquire::Languages "none";\nAPT::Install-Recommends "false";\n',
    # The host's, copied by debootstrap.
    **dict.fromkeys(("etc/resolv.conf", "etc/hostname", "etc/machine-id"), ""),
}


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """``reference`` is what FROM names; ``digest`` is the registry's digest of a pulled image, or
    the sha256 of the root file system of one made here; ``origin`` says which.
    """

    reference: str
    digest: str
    origin: str


def resolve(
    spec: ImageBase,
    engine: Engine,
    host: HostConfig,
    machines: Platforms,
    *,
    override: str | None,
    say: Callable[[str], None],
    on_line: OnLine,
) -> BaseImage:
    """Return the base image in the engine: ``override``, else the pinned one, else one made here.

    Raises BuildFailedError when it can neither be pulled nor made.
    """
    if override is not None:
        reason = "" if engine.has_image(override) else _pull(engine, override, machines)
        if reason:
            raise BuildFailedError(
                f"the base image {override} is not in the engine and cannot be pulled: {reason}",
                next_step="check the name, or leave out --base-image",
            )
        return _described(engine, override, override)
    local, pulled = _names(spec, machines)
    if engine.has_image(local) and not engine.has_image(pulled):
        return _described(engine, local, _MADE_HERE)
    if not engine.has_image(pulled):
        if reason := _pull(engine, spec.base, machines):
            say(f"{spec.base} cannot be pulled ({reason}): making a base image with debootstrap")
            return make(spec, engine, host, machines, say=say, on_line=on_line)
        engine.tag(spec.base, pulled)
    return BaseImage(reference=pulled, digest=spec.base.partition("@")[2], origin=spec.base)


def _pull(engine: Engine, reference: str, machines: Platforms) -> str:
    """Pull an image; return why it cannot be, "" where it could."""
    try:
        engine.pull(reference, machines.platform)
    except ToolFailedError as error:
        return _last_line(error)
    return ""


def _last_line(error: Sm12xError) -> str:
    return error.message.rstrip().splitlines()[-1].strip()


def _described(engine: Engine, reference: str, origin: str) -> BaseImage:
    """Describe an image that is in the engine; one made here is known by its file system."""
    label = engine.labels(reference).get(_ROOTFS_LABEL)
    # An image that was built on one made here has its label too.
    digest = label if origin == _MADE_HERE else engine.digest(reference) or label
    digest = digest or engine.image_id(reference) or ""
    return BaseImage(
        reference=reference, digest=f"sha256:{digest.removeprefix('sha256:')}", origin=origin
    )


def is_there(spec: ImageBase, engine: Engine, machines: Platforms, *, override: str | None) -> bool:
    """Tell whether ``resolve`` would neither pull nor make the base image."""
    if override is not None:
        return engine.has_image(override)
    return any(map(engine.has_image, _names(spec, machines)))


def make(
    spec: ImageBase,
    engine: Engine,
    host: HostConfig,
    machines: Platforms,
    *,
    say: Callable[[str], None],
    on_line: OnLine,
) -> BaseImage:
    """Make `sm12x-base:<suite>` with debootstrap and hand it to the engine.

    For another machine, debootstrap runs that machine's programs through the kernel's emulator.

    Raises BuildFailedError when debootstrap cannot be installed or fails.
    """
    next_step = (
        "name an image of Debian 13 that the engine has (--base-image), or run this as root with "
        "debootstrap and debian-archive-keyring installed"
    )
    if os.geteuid() != 0:
        raise BuildFailedError(
            "making a base image with debootstrap needs root", next_step=next_step
        )
    # Ubuntu's debootstrap comes without Debian's keys.
    missing = [] if process.which("debootstrap") else ["debootstrap"]
    missing += [] if _KEYRING.is_file() else ["debian-archive-keyring"]
    try:
        engines.install(missing, say=say)
    except ToolFailedError as error:
        raise BuildFailedError(
            f"debootstrap cannot be installed: {error.message}", next_step=next_step
        ) from None
    local, _ = _names(spec, machines)
    # Not in a folder of the user's: a root file system needs a disk that allows device nodes.
    with TemporaryDirectory(prefix="sm12x-base-", dir="/var/tmp") as folder:
        root = Path(folder) / "root"
        _debootstrap(spec.suite, root, host, machines, on_line, next_step)
        for name, text in {**_FILES, **_sources(spec.suite)}.items():
            (root / name).write_text(text, encoding="utf-8")
        archive = Path(folder) / "base.tar"
        # Its bytes depend on the packages alone, so that its sha256 names the contents.
        words = [f"--file={archive}", f"--directory={root}", "--sort=name", "--numeric-owner"]
        words += ["--mtime=@0", *(f"--exclude=./{name}/*" for name in _LEFT_OUT), "."]
        process.run(["tar", "--create", *words])
        labels = {_ROOTFS_LABEL: files.sha256(archive)}
        engine.import_tar(archive, local, labels, platform=machines.platform, on_line=on_line)
    return _described(engine, local, _MADE_HERE)


def _names(spec: ImageBase, machines: Platforms) -> tuple[str, str]:
    """Return the local names of a base image made here, and of the pinned one once pulled."""
    local = f"{LOCAL_BASE}:{spec.suite}{machines.suffix}"
    return local, f"{local}-{spec.base.partition('@sha256:')[2][:12]}"


def _debootstrap(
    suite: str, root: Path, host: HostConfig, machines: Platforms, on_line: OnLine, next_step: str
) -> None:
    words: list[str | Path] = ["debootstrap", "--variant=minbase", "--force-check-gpg"]
    if machines.crossing:
        words.append(f"--arch={machines.debian}")
    if _KEYRING.is_file():
        words.append(f"--keyring={_KEYRING}")
    # All releases use the same script; an older debootstrap has no link of that name yet.
    script = [] if (_SCRIPTS / suite).exists() else [_SCRIPTS / "sid"]
    # Without a mirror debootstrap takes the public one; "" says so where a script follows.
    mirror = [host.mirror] if host.mirror else [""] if script else []
    try:
        process.stream([*words, suite, root, *mirror, *script], on_line=on_line)
    except (ToolFailedError, ToolMissingError) as error:
        raise BuildFailedError(
            f"debootstrap of {suite} from {host.mirror or 'the public archive'} failed: "
            f"{_last_line(error)}",
            next_step=next_step,
        ) from None


def _sources(suite: str) -> dict[str, str]:
    """Return apt's list with the public archive, which debootstrap's script names."""
    program = process.which("debootstrap")
    script = program.read_text(encoding="utf-8", errors="replace") if program else ""
    public = re.search(r'(?m)^DEF_MIRROR="(\S+?)/?"$', script)
    if public is None:
        return {}
    places = ("", suite), ("", f"{suite}-updates"), ("-security", f"{suite}-security")
    lines = [f"deb {public[1]}{archive} {name} main\n" for archive, name in places]
    return {"etc/apt/sources.list": "".join(lines)}
