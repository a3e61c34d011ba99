"""Which engine is taken, and what each is told."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sm12x.core import process
from sm12x.core.errors import EngineNotRunningError, NoEngineError, ToolFailedError
from sm12x.core.process import Completed
from sm12x.image.engine import buildah, engines
from sm12x.image.engine.buildah import Buildah, Podman
from sm12x.image.engine.engine import BuildRequest, Docker, Engine, qualified
from sm12x.image.engine.engines import Probe

DOCKER = Path("/usr/bin/docker")
BUILDAH = Path("/usr/bin/buildah")

READY_DOCKER = Probe(name="docker", program=DOCKER, engine=Docker(DOCKER, "20.10", buildx=False))
READY_BUILDAH = Probe(
    name="buildah", program=BUILDAH, engine=Buildah(BUILDAH, "1.28.2", chroot=True)
)
DOWN_DOCKER = Probe(
    name="docker", program=DOCKER, why="does not answer", next_step="start it", down=True
)
LACKING_DOCKER = Probe(
    name="docker", program=Path("/usr/local/bin/docker"), why="no buildx", next_step="add buildx"
)
REQUEST = BuildRequest(
    dockerfile=Path("D"),
    context=Path("ctx"),
    target="out",
    build_args={"B": "2", "A": "1"},
    secrets={"ca": Path("/s/ca")},
    tags=("t:1",),
    output_dir=Path("/o"),
    host_network=True,
)


class Here:
    """A machine with ``probes``; what apt-get installs is there from then on."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        probes: Sequence[Probe] = (),
        *,
        root: bool = True,
        programs: Sequence[str] = ("apt-get",),
        mounts: bool = True,
    ) -> None:
        self.probes = list(probes)
        self.asked: list[str] = []
        self.installed: list[str] = []
        self.said: list[str] = []
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(
            process, "which", lambda name: Path("/bin") / name if name in programs else None
        )
        monkeypatch.setattr(engines, "may_mount", lambda: mounts)
        monkeypatch.setattr(engines, "_install", self.install)
        monkeypatch.setattr(engines, "probe_all", self.probe_all)

    def probe_all(self, wanted: str | None = None) -> Iterator[Probe]:
        for probe in self.probes:
            if wanted in (None, probe.name):
                self.asked.append(probe.name)
                yield probe

    def install(self, *names: str, optional: Sequence[str] = ()) -> None:
        self.installed += names
        self.probes.append(READY_BUILDAH)

    def find(self, wanted: str | None = None, *, may_install: bool = True) -> Engine:
        return engines.find(wanted, say=self.said.append, may_install=may_install)


def test_the_first_that_can_build_is_taken_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Here(monkeypatch, [LACKING_DOCKER, READY_DOCKER, READY_BUILDAH])
    assert here.find() is READY_DOCKER.engine
    assert [line.split()[0] for line in here.said] == ["/usr/local/bin/docker"]
    assert here.asked == ["docker", "docker"]


def test_an_engine_that_is_down_is_passed_over_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Here(monkeypatch, [DOWN_DOCKER, READY_BUILDAH])
    assert here.find() is READY_BUILDAH.engine
    with pytest.raises(EngineNotRunningError) as caught:
        here.find("docker")
    assert caught.value.next_step == "start it"


class Answers:
    """Stands in for process.run: the answer is that of the first entry whose words all occur."""

    def __init__(self, *entries: tuple[Sequence[str], int, str]) -> None:
        self.entries = entries

    def __call__(
        self, argv: Sequence[str | Path], *, timeout: float | None = None, **_: object
    ) -> Completed:
        words = tuple(str(word) for word in argv)
        assert timeout, f"{words} could hang"
        for wanted, code, text in self.entries:
            if all(word in words for word in wanted):
                return Completed(argv=words, returncode=code, stdout=text, stderr=text)
        raise AssertionError(f"unexpected: {words}")


def _probe(
    monkeypatch: pytest.MonkeyPatch, name: str, answers: Answers, *, mounts: bool = True
) -> list[Probe]:
    monkeypatch.setattr(
        process, "which_all", lambda asked: [Path(f"/bin/{name}")] if asked == name else []
    )
    monkeypatch.setattr(process, "run", answers)
    monkeypatch.setattr(engines, "needs_chroot", lambda: False)
    monkeypatch.setattr(engines, "may_mount", lambda: mounts)
    return list(engines.probe_all(None))


BUILDKIT_USAGE = "  --secret stringArray\n  -o, --output stringArray\n"


@pytest.mark.parametrize(("buildx", "how"), [(0, "with buildx"), (1, "with its own BuildKit")])
def test_docker_with_buildkit(monkeypatch: pytest.MonkeyPatch, buildx: int, how: str) -> None:
    answers = Answers(
        (("version", "--format"), 0, "20.10.24 20.10.24\n"),
        (("--version",), 0, "Docker version 20.10.24"),
        (("buildx",), buildx, ""),
        (("build", "--help"), 0, BUILDKIT_USAGE),
    )
    (found,) = _probe(monkeypatch, "docker", answers)
    assert found.engine is not None
    assert how in found.engine.description


def test_a_docker_without_buildkit_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(
        (("version", "--format"), 0, "28.2.2 20.10.24\n"),
        (("--version",), 0, "Docker version 28.2.2"),
        (("buildx",), 1, ""),
        (("build", "--help"), 1, "ERROR: the buildx component is missing"),
    )
    (found,) = _probe(monkeypatch, "docker", answers)
    assert found.engine is None
    assert not found.down
    assert "buildx" in found.next_step


NO_DAEMON = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"
SOCKET = "unix:///var/run/docker.sock"


@pytest.mark.parametrize(
    ("message", "endpoint", "installed", "down", "step"),
    [
        (NO_DAEMON, SOCKET, True, True, "start"),
        # Nothing to start: no advice to start it.
        (NO_DAEMON, SOCKET, False, False, "DOCKER_HOST"),
        ("permission denied while trying", SOCKET, True, True, "group docker"),
        ("request returned 404", SOCKET, True, True, "restart"),
        (NO_DAEMON, "tcp://ci:2375", True, True, "context use default"),
    ],
)
def test_docker_without_a_daemon_is_told_what_works_here(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    message: str,
    endpoint: str,
    installed: bool,
    down: bool,
    step: str,
) -> None:
    (tmp_path / "dockerd").touch()
    monkeypatch.setattr(engines, "_DOCKERD", tmp_path / ("dockerd" if installed else "none"))
    monkeypatch.setattr(process, "which", lambda name: None)
    answers = Answers((("context",), 0, endpoint + "\n"), (("version",), 1, message))
    (found,) = _probe(monkeypatch, "docker", answers)
    assert (found.engine, found.down) == (None, down)
    assert step in found.next_step
    assert endpoint in found.why or not installed


def test_a_program_that_hangs_or_cannot_be_run_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        ToolFailedError("did not finish", next_step="wait"),
        OSError(errno.ENOEXEC, "Exec format error"),
    ):

        def refuse(*_: object, error: Exception = error, **__: object) -> Completed:
            raise error

        for name in engines.NAMES:
            (found,) = _probe(monkeypatch, name, refuse)  # type: ignore[arg-type]
            assert found.engine is None
            assert found.why


def test_a_root_that_may_not_mount_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(
        (("build", "--help"), 0, "  --secret stringArray\n  --output x\n"),
        (("--version",), 0, "buildah version 1.28.2"),
    )
    (found,) = _probe(monkeypatch, "buildah", answers, mounts=False)
    assert found.engine is None
    assert "--privileged" in found.next_step


def test_podman_under_the_name_of_docker_is_not_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(
        (("version", "--format"), 0, "4.3.1 4.3.1\n"), (("--version",), 0, "podman version 4.3.1")
    )
    (found,) = _probe(monkeypatch, "docker", answers)
    assert found.next_step == "use --engine podman"


def test_an_old_buildah_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(
        (("build", "--help"), 0, "  --secret stringArray\n"),
        (("--version",), 0, "buildah version 1.23.1 (image-spec 1.0.1)"),
    )
    (found,) = _probe(monkeypatch, "buildah", answers)
    assert found.engine is None
    assert all(fact in found.why for fact in ("1.23.1", "--output"))


@pytest.mark.parametrize("there", [[], [DOWN_DOCKER], [LACKING_DOCKER]])
def test_root_gets_buildah_where_nothing_can_build(
    monkeypatch: pytest.MonkeyPatch, there: list[Probe]
) -> None:
    here = Here(monkeypatch, there)
    assert here.find() is READY_BUILDAH.engine
    assert here.installed == ["buildah"]
    assert "installing buildah with apt-get" in here.said[0]
    for probe in there:
        assert probe.why in here.said[0]


@pytest.mark.parametrize(
    ("there", "machine", "wanted", "may_install", "kind", "steps"),
    [
        ([], {}, "podman", True, NoEngineError, ["apt-get install -y podman"]),
        # Not root, or no apt-get: what to do.
        ([], {"root": False}, None, True, NoEngineError, ["install -y buildah` as root"]),
        ([], {"programs": ()}, None, True, NoEngineError, ["install buildah"]),
        (
            *([DOWN_DOCKER], {"root": False}, None, True, EngineNotRunningError),
            ["start it", "install -y buildah"],
        ),
        ([LACKING_DOCKER], {"root": False}, None, True, NoEngineError, ["add buildx", "buildah"]),
        # In a container that may not mount buildah would be of no use.
        ([], {"mounts": False}, None, True, NoEngineError, ["--privileged", "docker's socket"]),
        # An engine that was asked for is not replaced by another.
        ([DOWN_DOCKER], {}, "docker", True, EngineNotRunningError, ["start it"]),
        ([], {}, "docker", True, NoEngineError, ["apt-get install -y docker.io"]),
        # An engine without images is of no use to who looks for one.
        ([DOWN_DOCKER], {}, None, False, EngineNotRunningError, ["start it"]),
    ],
)
def test_what_cannot_be_had_is_an_error_with_advice_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    there: list[Probe],
    machine: dict[str, Any],
    wanted: str | None,
    may_install: bool,
    kind: type[Exception],
    steps: list[str],
) -> None:
    here = Here(monkeypatch, there, **machine)
    with pytest.raises(kind) as caught:
        here.find(wanted, may_install=may_install)
    assert all(step in str(caught.value) for step in steps)
    assert here.installed == []


def test_an_install_that_fails_keeps_what_docker_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(monkeypatch, [DOWN_DOCKER])

    def refuse(*_: str, optional: Sequence[str] = ()) -> None:
        raise ToolFailedError("E: Unable to locate package buildah", next_step="-")

    monkeypatch.setattr(engines, "_install", refuse)
    with pytest.raises(EngineNotRunningError, match=r"does not answer.*Unable to locate.*start it"):
        here.find()


def test_a_buildah_that_is_there_and_cannot_build_is_not_installed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Probe(name="buildah", program=BUILDAH, why="too old", next_step="newer")
    here = Here(monkeypatch, [old])
    with pytest.raises(NoEngineError) as caught:
        here.find()
    assert caught.value.next_step == "newer"
    assert here.installed == []


def test_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    common = [
        *("--file", "D", "--target", "out", "--build-arg", "A=1", "--build-arg", "B=2"),
        *("--secret", "id=ca,src=/s/ca", "--tag", "t:1"),
        *("--output", "type=local,dest=/o", "--network", "host"),
    ]
    plain = Docker(DOCKER, "20.10", buildx=False)
    assert [*plain.build_options(), *REQUEST.words()] == ["--progress", "plain", *common, "ctx"]
    assert plain.environment()["DOCKER_BUILDKIT"] == "1"
    found = Buildah(BUILDAH, "1.28.2", chroot=True)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 20000))
    limits = ["--ulimit", "nofile=1024:20000", "--ulimit", "nproc=1024:20000"]
    words = ["--layers", "--format", "docker"]
    assert found.build_options() == [*words, *limits]
    assert found.environment() == {"BUILDAH_ISOLATION": "chroot"}
    assert Buildah(BUILDAH, "1.28.2", chroot=False).build_options() == words


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("debian:trixie-slim", "docker.io/library/debian:trixie-slim"),
        ("debian:trixie-slim@sha256:ab", "docker.io/library/debian@sha256:ab"),
        ("me/debian:13", "docker.io/me/debian:13"),
        ("mirror.example:5000/debian:13@sha256:ab", "mirror.example:5000/debian@sha256:ab"),
        ("localhost/debian:13", "localhost/debian:13"),
        ("sm12x-base:trixie", "sm12x-base:trixie"),
    ],
)
def test_references_are_spelled_for_every_engine(given: str, expected: str) -> None:
    assert qualified(given) == expected


def test_the_next_command_is_the_engines_own() -> None:
    image = "vllm-sm12x:1"
    assert Docker(DOCKER, "1", buildx=True).run_hint(image, "check") == (
        "docker run --rm vllm-sm12x:1 check"
    )
    assert "--gpus all" in Docker(DOCKER, "1", buildx=True).run_hint(image, "r", gpus=True)
    podman = Podman(DOCKER, "1", chroot=False)
    assert "nvidia.com/gpu=all" in podman.run_hint(image, "r", gpus=True)


def test_buildah_runs_an_image_by_a_script_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    image = "vllm-sm12x:1"
    # A root that cannot raise its limits: what buildah would set has to be lowered here too.
    low = (1024, 20000)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda limit: low if limit == resource.RLIMIT_NOFILE else (1 << 20,) * 2,
    )
    engine = Buildah(BUILDAH, "1", chroot=True)
    assert engine.run_hint(image, "check", folder="dist/1") == "sh dist/1/run-image check"
    # Where the GPUs are there is a docker, maybe on another machine.
    save, load = engine.run_hint(image, "r", gpus=True, folder="dist/1").splitlines()
    assert save == "sh dist/1/run-image save vllm-sm12x.tar"
    assert load.startswith("docker load --input vllm-sm12x.tar && docker run ")
    assert '"docker-archive:${2:-vllm-sm12x.tar}:$image"' in engine.script(image)
    assert "buildah from --ulimit nofile=1024:20000 " in engine.script(image)


def test_an_isolation_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDAH_ISOLATION", "rootless")
    assert buildah.needs_chroot() is False


@pytest.mark.parametrize(
    ("status", "folder"),
    [
        ('[["driver-type","io.containerd.snapshotter.v1"]]', "containerd"),
        ('[["Backing Filesystem","extfs"]]', "docker"),
    ],
)
def test_dockers_layers_lie_where_its_image_store_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, folder: str
) -> None:
    for name in ("docker", "containerd"):
        (tmp_path / name).mkdir()
    answer = Completed(argv=(), returncode=0, stdout=f"{tmp_path}/docker\t{status}\n", stderr="")
    monkeypatch.setattr(process, "run", lambda *_, **__: answer)
    monkeypatch.setattr(Docker, "containerd", tmp_path / "containerd")
    assert Docker(DOCKER, "29", buildx=True).storage() == tmp_path / folder
    gone = Completed(argv=(), returncode=1, stdout="", stderr="")
    monkeypatch.setattr(process, "run", lambda *_, **__: gone)
    assert Docker(DOCKER, "29", buildx=True).storage() is None


@pytest.mark.parametrize("kind", [Buildah, Podman])
def test_buildahs_packages_lie_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, kind: type[Buildah]
) -> None:
    engine = kind(BUILDAH, "1.28.2", chroot=True)
    monkeypatch.setenv("TMPDIR", "/big/tmp")
    assert engine.package_cache() == Path("/big/tmp")
    monkeypatch.delenv("TMPDIR")
    assert engine.package_cache() == Path("/var/tmp")  # noqa: S108
    assert engine.name in engine.more_room
