"""Finding the installed container engines, probing each, and choosing one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import EngineNotRunningError, NoEngineError, ToolFailedError
from sm12x.core.process import Completed
from sm12x.image.engine.buildah import Buildah, Podman, needs_chroot
from sm12x.image.engine.engine import Docker, Engine

# In the order they are taken.
NAMES = ("docker", "podman", "buildah")
# Seconds for an engine to answer; podman looks through its storage first.
_PROBE_SECONDS = 15.0
# Where docker's client looks for its daemon unless it is told otherwise.
_DOCKER_SOCKETS = ("unix:///var/run/docker.sock", "unix:///run/docker.sock")
_DOCKERD = Path("/usr/sbin/dockerd")
_MAY_NOT_MOUNT = (
    "start this container with --privileged, or with docker's socket: "
    "-v /var/run/docker.sock:/var/run/docker.sock"
)
# One distribution upgrades itself after its first start, and holds apt's lock for a while.
_APT = ("-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::http::Timeout=30")


def may_mount() -> bool:
    """Return whether this process may mount, in a user namespace if need be.

    The root of a container usually may not, and buildah's build steps mount.
    """
    if os.geteuid() != 0 or process.which("unshare") is None:
        return True
    return any(_ask("unshare", word, "true").returncode == 0 for word in ("--mount", "--user"))


def _can_install() -> bool:
    return os.geteuid() == 0 and process.which("apt-get") is not None


def _installation(package: str) -> str:
    """Return how a user gets ``package``; on Debian and Ubuntu that is a command."""
    if process.which("apt-get"):
        return f"`apt-get update && apt-get install -y {package}` as root"
    return f"install {package}"


def _without_daemon() -> str:
    """Return how this machine gets an engine that needs no daemon."""
    if not may_mount():
        return _MAY_NOT_MOUNT
    return f"{_installation('buildah')}, which needs no daemon"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one program on PATH answered.

    ``engine`` is set when it can build. Otherwise ``why`` says what is missing and ``next_step``
    what helps; ``down`` tells an engine that does not answer from one that cannot build.
    """

    name: str
    program: Path
    engine: Engine | None = None
    why: str = ""
    next_step: str = ""
    down: bool = False


def probe_all(choice: str | None = None) -> Iterator[Probe]:
    """Ask each docker, podman and buildah on PATH, or only the one named ``choice``.

    Probes are lazy: a caller that needs one engine probes no other.
    """
    kinds: dict[str, Callable[[Path], Probe]] = {
        "docker": _probe_docker,
        "podman": partial(_probe_podman, Podman),
        "buildah": partial(_probe_podman, Buildah),
    }
    for name in NAMES:
        for program in process.which_all(name) if choice in (None, name) else ():
            yield kinds[name](program)


def find(choice: str | None, *, say: Callable[[str], None], may_install: bool = True) -> Engine:
    """Return the engine to use; buildah is installed if none can build and that is possible.

    Args:
        choice: "docker", "podman" or "buildah"; None for the first that can build.
        say: called with one line for each engine that is skipped or installed.
        may_install: False where an engine without images is of no use.

    Raises:
        EngineNotRunningError: none can build, and the first one that is installed does not answer.
        NoEngineError: none can build.
    """
    passed: list[Probe] = []
    for probe in probe_all(choice):
        if probe.engine is not None:
            for other in passed:
                say(f"{other.program} is skipped: {other.why}")
            return probe.engine
        passed.append(probe)
    why = "; ".join(f"{probe.program}: {probe.why}" for probe in passed) or "none is installed"
    steps = list(dict.fromkeys(probe.next_step for probe in passed))
    what = f"{choice} cannot build here" if choice else "no container engine can build here"
    # Another engine does not replace the one that the user chose.
    lacks_buildah = not any(probe.name == "buildah" for probe in passed)
    if choice in (None, "buildah") and lacks_buildah:
        if may_install and _can_install() and may_mount():
            say(f"{what} ({why}): installing buildah with apt-get")
            try:
                _install("buildah", optional=("netavark",))
            except ToolFailedError as error:
                why += f"; apt-get could not install buildah: {_last_line(error.message)}"
            else:
                return find("buildah", say=say, may_install=False)
        # buildah needs no daemon; where it is the one that is missing, it is the shortest way.
        steps.append(_without_daemon())
    elif not passed:
        package = "docker.io" if choice == "docker" else f"{choice}"
        steps.append(f"{_installation(package)}, or another --engine")
    down = any(probe.down for probe in passed)
    kind = EngineNotRunningError if down else NoEngineError
    raise kind(f"{what}: {why}", next_step="; or ".join(steps))


def _install(*packages: str, optional: Sequence[str] = ()) -> None:
    """Install ``packages``, and those of ``optional`` that the distribution has.

    buildah of Debian 13 makes no container without netavark, which it does not depend on; older
    releases have buildahs that do without, and not all have netavark.
    """
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    process.run(["apt-get", *_APT, "update", "-qq"], env=env)
    there = [name for name in optional if _is_known_to_apt(name)]
    words = ["apt-get", *_APT, "install", "-y", "-qq", "--no-install-recommends"]
    process.run([*words, *packages, *there], env=env)


def _is_known_to_apt(package: str) -> bool:
    shown = process.run(["apt-cache", "show", "--no-all-versions", package], check=False)
    return shown.returncode == 0 and bool(shown.stdout.strip())


def install(packages: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Install ``packages`` where that is possible. Raises ToolFailedError when apt-get fails."""
    if packages and _can_install():
        say(f"installing {' and '.join(packages)} with apt-get")
        _install(*packages)


def _ask(*argv: str | Path, env: Mapping[str, str] | None = None) -> Completed:
    """Return a program's answer; one that hangs or cannot be run has failed, with the reason."""
    try:
        return process.run(argv, env=env, check=False, timeout=_PROBE_SECONDS)
    except ToolFailedError:
        why = f"no answer in {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        why = f"cannot be run: {(error.strerror or str(error)).lower()}"
    return Completed(argv=tuple(map(str, argv)), returncode=124, stdout="", stderr=why)


def _probe_docker(program: Path) -> Probe:
    probe = partial(Probe, name="docker", program=program)
    answer = _ask(program, "version", "--format", "{{.Client.Version}} {{.Server.Version}}")
    if answer.returncode != 0:
        return _docker_down(program, answer.stderr)
    client = answer.stdout.split()[0]
    if "podman" in _ask(program, "--version").stdout.lower():
        # podman-docker puts a `docker` there that is podman.
        return probe(why="it is podman under another name", next_step="use --engine podman")
    buildx = _ask(program, "buildx", "version").returncode == 0
    usage = _ask(program, "build", "--help", env={"DOCKER_BUILDKIT": "1"})
    missing = _missing_options(usage.stdout if usage.returncode == 0 else "")
    if missing:
        return probe(
            why=f"docker {client} has no buildx plugin, and without it no BuildKit ({missing})",
            next_step="install the buildx plugin (package docker-buildx or docker-buildx-plugin)",
        )
    return probe(engine=Docker(program, client, buildx=buildx))


def _docker_down(program: Path, message: str) -> Probe:
    """Return why docker's client, which wrote ``message``, does not reach its daemon."""
    answer = _ask(program, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
    endpoint = answer.stdout.strip()
    probe = partial(Probe, name="docker", program=program)
    where = f"at {endpoint}" if endpoint else "where the client looks for it"
    if "permission denied" in message.lower():
        return probe(
            why=f"this user may not use the daemon {where}",
            next_step="run as root, or as a user of the group docker",
            down=True,
        )
    if endpoint and endpoint not in _DOCKER_SOCKETS:
        return probe(
            why=f"no daemon answers {where}: {_last_line(message)}",
            next_step="correct or unset DOCKER_HOST or DOCKER_CONTEXT, or `docker context use "
            "default`",
            down=True,
        )
    # A user's PATH need not have the daemon's folder.
    if process.which("dockerd") is None and not _DOCKERD.is_file():
        return probe(
            why="only docker's client is installed, its daemon is not",
            next_step="name the daemon of another machine with DOCKER_HOST",
        )
    return probe(
        why=f"its daemon does not answer {where}: {_last_line(message)}",
        next_step="start or restart the daemon, as root",
        down=True,
    )


def _probe_podman(kind: type[Podman], program: Path) -> Probe:
    name = kind.name
    probe = partial(Probe, name=name, program=program)
    usage = _ask(program, "build", "--help")
    if usage.returncode == 124:
        return probe(why=usage.stderr, next_step=f"repair {program}, or remove it from PATH")
    missing = _missing_options(usage.stdout if usage.returncode == 0 else "")
    number = re.search(r"\d+(?:\.\d+)+", _ask(program, "--version").stdout)
    version = number[0] if number else "of unknown version"
    if missing:
        return probe(
            why=f"{name} {version} is too old ({missing})", next_step=f"install a newer {name}"
        )
    if not may_mount():
        return probe(
            why="its build steps mount, which this container may not (it has neither "
            "CAP_SYS_ADMIN nor user namespaces)",
            next_step=_MAY_NOT_MOUNT,
        )
    # Its storage cannot be set up, or this user has no sub-ids: `info` says so, and quickly.
    info = _ask(program, "info")
    if info.returncode != 0:
        return probe(
            why=f"{name} does not work: {_last_line(info.stderr) or f'{name} info failed'}",
            next_step=f"fix what `{name} info` reports",
            down=True,
        )
    return probe(engine=kind(program, version, chroot=needs_chroot()))


def _missing_options(usage: str) -> str:
    lacking = [option for option in ("--secret", "--output") if option not in usage]
    return f"`build` knows no {' and no '.join(lacking)}" if lacking else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".?") if lines else ""
