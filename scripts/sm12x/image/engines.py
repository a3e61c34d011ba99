"""Which container engines are there, what each can do, and which one to take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import EngineNotRunningError, NoEngineError, ToolFailedError
from sm12x.image.buildah import Buildah, Podman, needs_chroot
from sm12x.image.docker import Docker
from sm12x.image.engine import Engine

# In the order they are taken.
NAMES = ("docker", "podman", "buildah")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one program on PATH answered.

    ``engine`` is set when it can build. Otherwise ``why`` says what is missing and ``next_step``
    what helps; ``down`` tells an engine that does not answer from one that cannot do it.
    """

    name: str
    program: Path
    engine: Engine | None = None
    why: str = ""
    next_step: str = ""
    down: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine, and a line for each one that was passed over."""

    engine: Engine
    notes: tuple[str, ...]


def probe_all() -> list[Probe]:
    """Ask every docker, podman and buildah on PATH what it can do."""
    kinds: dict[str, Callable[[Path], Probe]] = {
        "docker": _probe_docker,
        "podman": _probe_podman,
        "buildah": _probe_buildah,
    }
    return [kinds[name](program) for name in NAMES for program in process.which_all(name)]


def choose(probes: Sequence[Probe], wanted: str | None) -> Choice:
    """The first program that can build; of the kind ``wanted`` if given.

    Raises:
        EngineNotRunningError: none can, and one is only not running.
        NoEngineError: none can.
    """
    asked = [probe for probe in probes if wanted in (None, probe.name)]
    ready = next((probe for probe in asked if probe.engine is not None), None)
    if ready is not None and ready.engine is not None:
        passed = asked[: asked.index(ready)]
        notes = tuple(f"{probe.program} is passed over: {probe.why}" for probe in passed)
        return Choice(engine=ready.engine, notes=notes)
    down = next((probe for probe in asked if probe.down), None)
    if down is not None:
        raise EngineNotRunningError(f"{down.program}: {down.why}", next_step=down.next_step)
    if asked:
        why = "; ".join(f"{probe.program}: {probe.why}" for probe in asked)
        raise NoEngineError(f"no engine can build: {why}", next_step=asked[0].next_step)
    if wanted is not None:
        raise NoEngineError(
            f"{wanted} is not installed", next_step=f"install {wanted}, or leave out --engine"
        )
    raise NoEngineError(
        f"no container engine is installed (looked for {', '.join(NAMES)})",
        next_step="install one, such as `apt-get install buildah`, or run as root on Debian or "
        "Ubuntu, where buildah is installed for you",
    )


def find(wanted: str | None, *, say: Callable[[str], None]) -> Engine:
    """The engine to use; buildah is installed if there is none and that is possible.

    Args:
        wanted: "docker", "podman" or "buildah"; None for the first that can build.
        say: told, in one line each, what was passed over or installed.
    """
    probes = probe_all()
    there = [probe for probe in probes if wanted in (None, probe.name)]
    usable = any(probe.engine or probe.down for probe in there)
    if not usable and wanted in (None, "buildah") and _can_install():
        say("no container engine can build here: installing buildah with apt-get")
        try:
            _install("buildah", optional=("netavark",))
        except ToolFailedError as error:
            raise NoEngineError(
                "no container engine is installed, and apt-get could not install buildah: "
                f"{_last_line(error.message)}",
                next_step="install docker, podman or buildah",
            ) from None
        probes = probe_all()
    choice = choose(probes, wanted)
    for note in choice.notes:
        say(note)
    return choice.engine


def _can_install() -> bool:
    return os.geteuid() == 0 and process.which("apt-get") is not None


def _install(*packages: str, optional: Sequence[str] = ()) -> None:
    """Install ``packages``, and those of ``optional`` that the distribution has.

    buildah of Debian 13 makes no container without netavark, which it does not depend on; older
    releases have buildahs that do without, and not all have netavark.
    """
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    process.run(["apt-get", "update", "-qq"], env=env)
    there = [name for name in optional if _is_known_to_apt(name)]
    words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, *there]
    process.run(words, env=env)


def _is_known_to_apt(package: str) -> bool:
    shown = process.run(["apt-cache", "show", "--no-all-versions", package], check=False)
    return shown.returncode == 0 and bool(shown.stdout.strip())


def install(packages: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Install ``packages`` where that is possible. Raises ToolFailedError when apt-get fails."""
    if packages and _can_install():
        say(f"installing {' and '.join(packages)} with apt-get")
        _install(*packages)


def _probe_docker(program: Path) -> Probe:
    answer = process.run(
        [program, "version", "--format", "{{.Client.Version}} {{.Server.Version}}"], check=False
    )
    if answer.returncode != 0:
        return _docker_down(program, answer.stderr)
    client = answer.stdout.split()[0]
    if "podman" in process.run([program, "--version"], check=False).stdout.lower():
        # podman-docker puts a `docker` there that is podman.
        return _lacking("docker", program, "it is podman under another name", "use --engine podman")
    buildx = process.run([program, "buildx", "version"], check=False).returncode == 0
    usage = process.run([program, "build", "--help"], env={"DOCKER_BUILDKIT": "1"}, check=False)
    missing = _missing_options(usage.stdout if usage.returncode == 0 else "")
    if missing:
        return _lacking(
            "docker",
            program,
            f"docker {client} has no buildx plugin, and without it no BuildKit ({missing})",
            "install the buildx plugin (package docker-buildx or docker-buildx-plugin)",
        )
    return Probe(name="docker", program=program, engine=Docker(program, client, buildx=buildx))


def _docker_down(program: Path, said: str) -> Probe:
    if "permission denied" in said.lower():
        why, step = (
            "the engine may not be used by this user",
            "run as root, or `sudo usermod -aG docker $USER` and log in again",
        )
    else:
        managed = Path("/run/systemd/system").is_dir()
        start = "systemctl start docker" if managed else "dockerd >/tmp/dockerd.log 2>&1 &"
        why, step = "the engine does not answer", f"start it as root with `{start}`, then try again"
    return Probe(name="docker", program=program, why=why, next_step=step, down=True)


def _probe_podman(program: Path) -> Probe:
    info = process.run([program, "info"], check=False)
    if info.returncode != 0:
        reason = _last_line(info.stderr) or "podman info failed"
        return Probe(
            name="podman",
            program=program,
            why=f"podman does not answer: {reason}",
            next_step="mend what `podman info` reports, or use another --engine",
            down=True,
        )
    return _probe_bud("podman", program, Podman)


def _probe_buildah(program: Path) -> Probe:
    return _probe_bud("buildah", program, Buildah)


def _probe_bud(name: str, program: Path, kind: type[Buildah]) -> Probe:
    usage = process.run([program, "build", "--help"], check=False)
    missing = _missing_options(usage.stdout if usage.returncode == 0 else "")
    version = _version(process.run([program, "--version"], check=False).stdout)
    if missing:
        return _lacking(
            name, program, f"{name} {version} is too old ({missing})", f"install a newer {name}"
        )
    return Probe(name=name, program=program, engine=kind(program, version, chroot=needs_chroot()))


def _missing_options(usage: str) -> str:
    lacking = [option for option in ("--secret", "--output") if option not in usage]
    return f"`build` knows no {' and no '.join(lacking)}" if lacking else ""


def _lacking(name: str, program: Path, why: str, step: str) -> Probe:
    return Probe(name=name, program=program, why=why, next_step=step)


def _version(text: str) -> str:
    match = re.search(r"\d+(?:\.\d+)+", text)
    return match[0] if match else "of unknown version"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
