"""Finding the installed container engines, probing each, and choosing one."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import EngineNotRunningError, NoEngineError, ToolFailedError
from sm12x.core.process import Completed
from sm12x.image.engine.buildah import SYS_ADMIN, Bud, Buildah, Podman, has_capability, needs_chroot
from sm12x.image.engine.docker import Docker
from sm12x.image.engine.engine import Engine

# In the order they are taken.
NAMES = ("docker", "podman", "buildah")
# Seconds for an engine to answer; podman looks through its storage first.
_PROBE_SECONDS = 15.0
# Where docker's client looks for its daemon unless it is told otherwise.
_DOCKER_SOCKETS = ("unix:///var/run/docker.sock", "unix:///run/docker.sock")
# Program that installs packages -> what it is given before their names.
_INSTALLERS = {
    "apt-get": "install -y",
    "dnf": "install -y",
    "zypper": "install -y",
    "apk": "add",
    "pacman": "-S --noconfirm",
}
_MAY_NOT_MOUNT = (
    "start this container with --privileged, or with docker's socket: "
    "-v /var/run/docker.sock:/var/run/docker.sock"
)
# One distribution upgrades itself after its first start, and holds apt's lock for a while.
_APT = ("-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::http::Timeout=30")


@dataclass(frozen=True, kw_only=True)
class EngineHost:
    """The facts that advice depends on: user, package installer, how daemons are started.

    ``installer`` is a key of _INSTALLERS, "" for none of them; ``dockerd`` whether docker's daemon
    is installed, ``docker_script`` whether `service` can start it; ``mounts`` whether this process
    may mount, in a user namespace if need be, which the root of a container usually may not.
    """

    root: bool
    sudo: bool
    installer: str
    systemd: bool
    dockerd: bool
    docker_script: bool
    mounts: bool = True
    user: str = "$USER"

    @classmethod
    def here(cls) -> EngineHost:
        root = os.geteuid() == 0
        return cls(
            root=root,
            sudo=process.which("sudo") is not None,
            installer=next((name for name in _INSTALLERS if process.which(name)), ""),
            systemd=Path("/run/systemd/system").is_dir(),
            # A user's PATH need not have the folders of daemons.
            dockerd=process.which("dockerd") is not None
            or any(Path(folder, "dockerd").is_file() for folder in ("/usr/sbin", "/usr/bin")),
            docker_script=Path("/etc/init.d/docker").is_file()
            and process.which("service") is not None,
            mounts=not root or has_capability(SYS_ADMIN) or _has_user_namespaces(),
            user=_user(),
        )

    def as_root(self, command: str) -> str:
        """``command`` in backquotes as this user gets it run by root."""
        if self.root:
            return f"`{command}`"
        if self.sudo:
            return "`" + " && ".join(f"sudo {part}" for part in command.split(" && ")) + "`"
        return f"`{command}` as root"

    def install(self, *packages: str) -> str:
        """The command that installs ``packages``; where none is known, the words to do it."""
        names = " ".join(packages)
        if not self.installer:
            return f"install {names} with the distribution's package manager"
        first = "apt-get update && " if self.installer == "apt-get" else ""
        command = f"{first}{self.installer} {_INSTALLERS[self.installer]} {names}"
        return self.as_root(command)

    @property
    def start_docker(self) -> str:
        """The command that starts docker's daemon, which is installed."""
        if self.systemd:
            return self.as_root("systemctl start docker")
        if self.docker_script:
            return self.as_root("service docker start")
        return self.as_root("sh -c 'dockerd >/var/log/dockerd.log 2>&1 &'")

    @property
    def can_install(self) -> bool:
        return self.root and self.installer == "apt-get"

    @property
    def without_daemon(self) -> str:
        """How this machine gets an engine that needs no daemon."""
        if not self.mounts:
            return _MAY_NOT_MOUNT
        return f"install buildah, which needs no daemon: {self.install('buildah')}"


def _has_user_namespaces() -> bool:
    """Whether this process may make a user namespace, as buildah does where it may not mount."""
    return process.which("unshare") is None or _ask("unshare", "--user", "true").returncode == 0


def _user() -> str:
    """The name of this user: `$USER` in advice that root runs would be another user's."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


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


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine, and a line for each one that was passed over."""

    engine: Engine
    notes: tuple[str, ...]


def probe_all(wanted: str | None = None, machine: EngineHost | None = None) -> Iterator[Probe]:
    """Ask each docker, podman and buildah on PATH, or those named ``wanted``, what it can do.

    Probes are lazy: a caller that needs one engine probes no other.
    """
    machine = machine or EngineHost.here()
    kinds: dict[str, Callable[[Path, EngineHost], Probe]] = {
        "docker": _probe_docker,
        "podman": partial(_probe_bud, "podman", Podman),
        "buildah": partial(_probe_bud, "buildah", Buildah),
    }
    for name in NAMES:
        for program in process.which_all(name) if wanted in (None, name) else ():
            yield kinds[name](program, machine)


def choose(probes: Iterable[Probe], wanted: str | None, machine: EngineHost) -> EngineChoice:
    """The first program that can build; of the kind ``wanted`` if given.

    Raises:
        EngineNotRunningError: none can, and the first one that is installed does not answer.
        NoEngineError: none can.
    """
    passed: list[Probe] = []
    for probe in probes:
        if wanted not in (None, probe.name):
            continue
        if probe.engine is not None:
            notes = tuple(f"{other.program} is skipped: {other.why}" for other in passed)
            return EngineChoice(engine=probe.engine, notes=notes)
        passed.append(probe)
    who = wanted or "no container engine"
    can = f"{who} {'cannot' if wanted else 'can'} build here"
    why = "; ".join(f"{probe.program}: {probe.why}" for probe in passed)
    steps = list(dict.fromkeys(probe.next_step for probe in passed))
    # buildah needs no daemon; where it is the one that is missing, it is the shortest way.
    if wanted is None and not any(probe.name == "buildah" for probe in passed):
        steps.append(machine.without_daemon)
    down = next((probe for probe in passed if probe.down), None)
    if down is not None:
        raise EngineNotRunningError(f"{can}: {why}", next_step="; or ".join(steps))
    if passed:
        raise NoEngineError(f"{can}: {why}", next_step="; or ".join(steps))
    if wanted is not None:
        raise NoEngineError(
            f"{wanted} is not installed",
            next_step=f"{machine.install(_PACKAGES.get(wanted, wanted))}, or leave out --engine",
        )
    raise NoEngineError(
        f"no container engine is installed (looked for {', '.join(NAMES)})",
        next_step=machine.without_daemon,
    )


# Engine -> Debian's package of it, where its name is another.
_PACKAGES = {"docker": "docker.io"}


def find(wanted: str | None, *, say: Callable[[str], None], may_install: bool = True) -> Engine:
    """The engine to use; buildah is installed if none can build and that is possible.

    Args:
        wanted: "docker", "podman" or "buildah"; None for the first that can build.
        say: told, in one line each, what was passed over or installed.
        may_install: False where an engine without images is of no use.

    Raises:
        EngineNotRunningError, NoEngineError: as ``choose`` does.
    """
    machine = EngineHost.here()
    probes = _until_ready(probe_all(wanted, machine))
    ready = any(probe.engine for probe in probes)
    lacks_buildah = not any(probe.name == "buildah" for probe in probes)
    if (
        not ready
        and lacks_buildah
        and may_install
        and wanted in (None, "buildah")
        and machine.can_install
        # buildah is of no use to a process that may not mount.
        and machine.mounts
    ):
        why = "".join(f" ({probe.program}: {probe.why})" for probe in probes)
        say(f"no container engine can build here{why}: installing buildah with apt-get")
        try:
            _install("buildah", optional=("netavark",))
        except ToolFailedError as error:
            raise NoEngineError(
                f"no container engine can build here{why}, and apt-get could not install buildah: "
                f"{_last_line(error.message)}",
                next_step=_after_failed_install(probes),
            ) from None
        probes += _until_ready(probe_all("buildah", machine))
    choice = choose(probes, wanted, machine)
    for note in choice.notes:
        say(note)
    return choice.engine


def _until_ready(probes: Iterable[Probe]) -> list[Probe]:
    """``probes`` up to the first that can build."""
    found: list[Probe] = []
    for probe in probes:
        found.append(probe)
        if probe.engine is not None:
            break
    return found


def _after_failed_install(probes: Sequence[Probe]) -> str:
    steps = ["fix what `apt-get update && apt-get install buildah` reports"]
    steps += [probe.next_step for probe in probes if probe.down]
    return "; or ".join(dict.fromkeys(steps))


def _install(*packages: str, optional: Sequence[str] = ()) -> None:
    """Install ``packages``, and those of ``optional`` that the distribution has.

    buildah of Debian 13 makes no container without netavark, which it does not depend on; older
    releases have buildahs that do without, and not all have netavark.
    """
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    process.run(["apt-get", *_APT, "update", "-qq"], env=env)
    there = [name for name in optional if _is_known_to_apt(name)]
    words = ["apt-get", *_APT, "install", "-y", "-qq", "--no-install-recommends"]
    words += [*packages, *there]
    process.run(words, env=env)


def _is_known_to_apt(package: str) -> bool:
    shown = process.run(["apt-cache", "show", "--no-all-versions", package], check=False)
    return shown.returncode == 0 and bool(shown.stdout.strip())


def install(packages: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Install ``packages`` where that is possible. Raises ToolFailedError when apt-get fails."""
    if packages and EngineHost.here().can_install:
        say(f"installing {' and '.join(packages)} with apt-get")
        _install(*packages)


def _ask(*argv: str | Path, env: Mapping[str, str] | None = None) -> Completed:
    """A program's answer. One that hangs or cannot be run has failed; ``stderr`` has the reason."""
    try:
        return process.run(argv, env=env, check=False, timeout=_PROBE_SECONDS)
    except ToolFailedError:
        why = f"no answer in {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        why = f"cannot be run: {(error.strerror or str(error)).lower()}"
    return Completed(argv=tuple(map(str, argv)), returncode=124, stdout="", stderr=why)


def _probe_docker(program: Path, machine: EngineHost) -> Probe:
    probe = partial(Probe, name="docker", program=program)
    answer = _ask(program, "version", "--format", "{{.Client.Version}} {{.Server.Version}}")
    if answer.returncode != 0:
        endpoint = _ask(
            program, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"
        ).stdout.strip()
        return _docker_down(program, answer.stderr, endpoint, machine)
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


def _docker_down(program: Path, said: str, endpoint: str, machine: EngineHost) -> Probe:
    """The reason why docker's client does not reach its daemon.

    Args:
        said: what `docker version` wrote to stderr.
        endpoint: where the client looks for the daemon, "" where it cannot say.
    """
    probe = partial(Probe, name="docker", program=program)

    def down(why: str, step: str) -> Probe:
        return probe(why=why, next_step=step, down=True)

    where = f"at {endpoint}" if endpoint else "where the client looks for it"
    if "permission denied" in said.lower():
        join = machine.as_root(f"usermod -aG docker {machine.user}")
        return down(
            f"this user may not use the daemon {where}",
            f"run as root, or {join} and log in again",
        )
    if endpoint and endpoint not in _DOCKER_SOCKETS:
        named = next(
            (name for name in ("DOCKER_HOST", "DOCKER_CONTEXT") if os.environ.get(name)), ""
        )
        return down(
            f"no daemon answers {where}, which {named or 'the docker context'} names: "
            f"{_last_line(said)}",
            f"correct or unset {named}" if named else "`docker context use default`",
        )
    if "cannot connect" not in said.lower():
        restart = machine.start_docker.replace(" start", " restart", 1)
        step = f"restart the daemon with {restart}" if machine.dockerd else "read that message"
        return down(f"the daemon {where} does not work: {_last_line(said)}", step)
    if not machine.dockerd:
        return probe(
            why="only docker's client is installed, its daemon is not",
            next_step="name the daemon of another machine with DOCKER_HOST",
        )
    return down(
        f"its daemon is installed and not running (nothing answers {where})",
        f"start it with {machine.start_docker}",
    )


def _probe_bud(name: str, kind: type[Bud], program: Path, machine: EngineHost) -> Probe:
    probe = partial(Probe, name=name, program=program)
    usage = _ask(program, "build", "--help")
    if usage.returncode == 124:
        return probe(why=usage.stderr, next_step=f"repair {program}, or remove it from PATH")
    missing = _missing_options(usage.stdout if usage.returncode == 0 else "")
    version = _version(_ask(program, "--version").stdout)
    if missing:
        docker = machine.install("docker.io", "docker-buildx")
        return probe(
            why=f"{name} {version} is too old ({missing})",
            next_step=f"install a newer {name}, or docker with BuildKit: {docker}"
            if machine.installer == "apt-get"
            else f"install a newer {name}",
        )
    if not machine.mounts:
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


def _version(text: str) -> str:
    match = re.search(r"\d+(?:\.\d+)+", text)
    return match[0] if match else "of unknown version"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".?") if lines else ""
