"""Which engine is taken, and what each is told."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest

from sm12x.core import process
from sm12x.core.errors import EngineNotRunningError, NoEngineError
from sm12x.core.process import Completed
from sm12x.image import buildah, engines
from sm12x.image.buildah import Buildah, Podman
from sm12x.image.docker import Docker
from sm12x.image.engine import BuildRequest, qualified
from sm12x.image.engines import Probe

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


def test_the_first_that_can_build_is_taken_and_the_others_are_named() -> None:
    choice = engines.choose([LACKING_DOCKER, READY_DOCKER, READY_BUILDAH], None)
    assert choice.engine is READY_DOCKER.engine
    assert choice.notes == ("/usr/local/bin/docker is passed over: no buildx",)


def test_an_engine_that_is_down_is_passed_over_unless_asked_for() -> None:
    assert engines.choose([DOWN_DOCKER, READY_BUILDAH], None).engine is READY_BUILDAH.engine
    with pytest.raises(EngineNotRunningError, match=r"does not answer\. Next: start it\."):
        engines.choose([DOWN_DOCKER, READY_BUILDAH], "docker")


@pytest.mark.parametrize(
    ("probes", "wanted", "text"),
    [
        ([], None, "looked for docker, podman, buildah"),
        ([READY_DOCKER], "podman", "podman is not installed"),
        ([LACKING_DOCKER], None, r"/usr/local/bin/docker: no buildx\. Next: add buildx\."),
    ],
)
def test_no_engine_says_what_was_looked_for(
    probes: list[Probe], wanted: str | None, text: str
) -> None:
    with pytest.raises(NoEngineError, match=text):
        engines.choose(probes, wanted)


class Answers:
    """Stands in for process.run: the answer is that of the first entry whose words all occur."""

    def __init__(self, *entries: tuple[Sequence[str], int, str]) -> None:
        self.entries = entries

    def __call__(self, argv: Sequence[str | Path], **_: object) -> Completed:
        words = tuple(str(word) for word in argv)
        for wanted, code, text in self.entries:
            if all(word in words for word in wanted):
                return Completed(argv=words, returncode=code, stdout=text, stderr=text)
        raise AssertionError(f"unexpected: {words}")


def _probe(monkeypatch: pytest.MonkeyPatch, name: str, answers: Answers) -> list[Probe]:
    monkeypatch.setattr(
        process, "which_all", lambda asked: [Path(f"/bin/{name}")] if asked == name else []
    )
    monkeypatch.setattr(process, "run", answers)
    monkeypatch.setattr(engines, "needs_chroot", lambda: False)
    return engines.probe_all()


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
    assert "28.2.2 has no buildx plugin" in found.why


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Cannot connect to the Docker daemon", "does not answer"),
        ("permission denied while trying to connect", "may not be used by this user"),
    ],
)
def test_docker_that_is_down(monkeypatch: pytest.MonkeyPatch, said: str, why: str) -> None:
    (found,) = _probe(monkeypatch, "docker", Answers((("version",), 1, said)))
    assert found.down
    assert why in found.why


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
    assert found.why == "buildah 1.23.1 is too old (`build` knows no --output)"


def test_buildah_is_installed_only_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(engines, "_can_install", lambda: True)
    monkeypatch.setattr(engines, "_install", lambda *names, optional: installed.extend(names))
    monkeypatch.setattr(engines, "probe_all", lambda: [READY_BUILDAH] if installed else [])
    assert engines.find(None, say=said.append) is READY_BUILDAH.engine
    assert installed == ["buildah"]
    assert said == ["no container engine can build here: installing buildah with apt-get"]

    monkeypatch.setattr(engines, "probe_all", lambda: [DOWN_DOCKER])
    with pytest.raises(EngineNotRunningError):
        engines.find(None, say=said.append)
    assert installed == ["buildah"]


def test_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    common = [
        *("--file", "D", "--target", "out", "--build-arg", "A=1", "--build-arg", "B=2"),
        *("--secret", "id=ca,src=/s/ca", "--tag", "t:1"),
        *("--output", "type=local,dest=/o", "--network", "host"),
    ]
    docker = Docker(DOCKER, "20.10", buildx=False)
    assert docker.build_words(REQUEST) == ["build", "--progress", "plain", *common, "ctx"]
    assert docker.environment()["DOCKER_BUILDKIT"] == "1"
    found = Buildah(BUILDAH, "1.28.2", chroot=True)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, 20000))
    limits = ["--ulimit", "nofile=1024:20000", "--ulimit", "nproc=1024:20000"]
    words = ["build", "--layers", "--format", "docker", *common]
    assert found.build_words(REQUEST) == [*words, *limits, "ctx"]
    assert found.environment() == {"BUILDAH_ISOLATION": "chroot"}
    assert Buildah(BUILDAH, "1.28.2", chroot=False).build_words(REQUEST) == [*words, "ctx"]


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


def test_the_next_command_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    image = "vllm-sm12x:1"
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 20, 1 << 20))
    assert Docker(DOCKER, "1", buildx=True).run_hint(image, "check") == (
        "docker run --rm vllm-sm12x:1 check"
    )
    assert "--gpus all" in Docker(DOCKER, "1", buildx=True).run_hint(image, "r", gpus=True)
    assert "nvidia.com/gpu=all" in Podman(DOCKER, "1", chroot=False).run_hint(image, "r", gpus=True)
    assert (
        Buildah(BUILDAH, "1", chroot=True)
        .run_hint(image, "check")
        .startswith(
            "buildah run --isolation chroot $(buildah from vllm-sm12x:1) -- /opt/venv/bin/python"
        )
    )
    # A root that cannot raise its limits: what buildah would set has to be lowered here too.
    low = (1024, 20000)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda limit: low if limit == resource.RLIMIT_NOFILE else (1 << 20,) * 2,
    )
    assert "$(buildah from --ulimit nofile=1024:20000 vllm-sm12x:1) --" in Buildah(
        BUILDAH, "1", chroot=True
    ).run_hint(image, "check")
    # More processes than 1.28 allows, and fewer than 1.39 raises them to.
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda limit: (96365,) * 2 if limit == resource.RLIMIT_NPROC else (1 << 20,) * 2,
    )
    assert "$(buildah from --ulimit nproc=32768:32768 vllm-sm12x:1) --" in Buildah(
        BUILDAH, "1", chroot=True
    ).run_hint(image, "check")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    podman = Podman(DOCKER, "1", chroot=False)
    for may, limits in ((True, ""), (False, " --ulimit nproc=32768:32768")):
        monkeypatch.setattr(buildah, "may_raise_limits", lambda may=may: may)
        assert podman.run_hint(image, "check") == f"podman run --rm{limits} {image} check"


def test_an_isolation_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDAH_ISOLATION", "rootless")
    assert buildah.needs_chroot() is False
