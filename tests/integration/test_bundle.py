"""The engine layer with each real engine that is here: builds, secrets, caches, failures."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import process
from sm12x.core.errors import ToolFailedError
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.engine import engines
from sm12x.image.engine.buildah import Buildah
from sm12x.image.engine.engine import BuildRequest, Engine
from sm12x.image.engine.follow import Follower

# podman and buildah share a store: one that looks for a cached image fails over one that the other
# removes, whoever's it is.
pytestmark = pytest.mark.xdist_group("engines")

# Ends a step that fails. buildah's chroot isolation does not wait for the copy of a step's output:
# what is printed as the step ends can be lost, seen on machines under load.
COPIED = "sleep 1"
TAG = f"sm12x-engine-test:{os.getpid()}"
HIDDEN = "vHj3-what-no-layer-may-hold"
MARKER = "vHj3-what-the-step-wrote"

DOCKERFILE = f"""\
FROM {TAG}-base AS work
COPY with-host.sh /with-host.sh
RUN --mount=type=secret,id=env,mode=0444,required=false \\
    --mount=type=secret,id=netrc,mode=0444,required=false \\
    --mount=type=cache,target=/cache \\
    --mount=type=bind,source=links,target=/links \\
    sh /with-host.sh sh -c 'test ${{#TOKEN}} = {len(HIDDEN)} \\
      && test -z "$NETRC" && echo {MARKER} > /result'
ARG MODE
LABEL sm12x.mode="${{MODE}}"
FROM scratch AS out
COPY --from=work /result /result
"""


@dataclass(frozen=True, kw_only=True)
class Rig:
    engine: Engine
    context: Path
    host: HostConfig

    def build(self, folder: Path, **choices: object) -> None:
        with self.host.files(folder) as secrets:
            request = BuildRequest(
                **{
                    "dockerfile": self.context / "Dockerfile",
                    "context": self.context,
                    "target": "work",
                    "secrets": secrets,
                    **choices,
                }  # type: ignore[arg-type]
            )
            self.engine.build(request, on_line=lambda line: None, log=folder / "log")


def _programs(*names: str) -> dict[str, Path]:
    """Programs of this machine and the libraries they load, by their place in an image."""
    found: dict[str, Path] = {}
    for name in names:
        program = process.which(name)
        assert program is not None
        found[f"bin/{name}"] = program.resolve()
        for library in re.findall(r"(/\S+) \(0x", process.run(["ldd", program]).stdout):
            found[library.lstrip("/")] = Path(library).resolve()
    return found


@pytest.fixture(scope="module", params=engines.NAMES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    ready = (probe.engine for probe in engines.probe_all() if probe.name == request.param)
    engine = next((found for found in ready if found), None)
    if engine is None:
        pytest.skip(f"no {request.param} here can build")
    folder = tmp_path_factory.mktemp(request.param)
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for name, path in _programs("sh", "sleep", "test").items():
            tar.add(path, name)
        # Else one of podman and buildah takes from the cache what the other has built.
        tar.addfile(tarfile.TarInfo(f"of-{os.getpid()}-{request.param}"))
    engine.import_tar(archive, f"{TAG}-base", {"made": "here"}, on_line=lambda line: None)
    context = folder / "context"
    (context / "links").mkdir(parents=True)
    (context / "Dockerfile").write_text(DOCKERFILE)
    wrapper = layout.data() / "image" / "with-host.sh"
    (context / "with-host.sh").write_bytes(wrapper.read_bytes())
    host = HostConfig(secrets={"env": f"export TOKEN={HIDDEN}\n"}, mirror="", host_network=False)
    yield Rig(engine=engine, context=context, host=host)
    process.run([engine.program, "rmi", "--force", f"{TAG}-base"], check=False)


def test_workers_keep_to_groups(request: pytest.FixtureRequest) -> None:
    """Needs `--dist loadgroup`; pytest-xdist writes a test's group at the end of its id."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@engines")


def test_the_imported_image_has_its_label(rig: Rig) -> None:
    assert rig.engine.labels(f"{TAG}-base")["made"] == "here"
    assert rig.engine.has_image(f"{TAG}-base")
    assert not rig.engine.has_image("sm12x-engine-test:nowhere")


def test_a_stage_is_written_to_a_folder(rig: Rig, tmp_path: Path) -> None:
    rig.build(tmp_path, target="out", output_dir=tmp_path / "out")
    assert (tmp_path / "out" / "result").read_text() == f"{MARKER}\n"


def test_a_secret_is_in_no_layer_and_no_configuration(rig: Rig, tmp_path: Path) -> None:
    try:
        rig.build(tmp_path, tags=(TAG,), build_args={"MODE": "quick"})
        assert rig.engine.labels(TAG)["sm12x.mode"] == "quick"
        assert rig.engine.image_id(TAG)
        assert rig.engine.size(TAG) > 1_000_000
        archive = tmp_path / "image.tar"
        save: tuple[str | Path, ...] = ("save", "--output", archive, TAG)
        if rig.engine.name == "buildah":
            save = ("push", TAG, f"docker-archive:{archive}:{TAG}")
        process.run([rig.engine.program, *save])
    finally:
        process.run([rig.engine.program, "rmi", TAG], check=False)
    raw = archive.read_bytes()
    # The marker shows that the layers are there to be read, uncompressed.
    assert MARKER.encode() in raw
    assert HIDDEN.encode() not in raw


def test_a_second_build_comes_from_the_cache_whatever_the_secret(rig: Rig, tmp_path: Path) -> None:
    rig.build(tmp_path, target="out", output_dir=tmp_path / "one")
    other = Rig(
        engine=rig.engine,
        context=rig.context,
        host=HostConfig(
            secrets={"env": "export TOKEN=another one\n"}, mirror="", host_network=False
        ),
    )
    (tmp_path / "log").unlink()
    other.build(tmp_path, target="out", output_dir=tmp_path / "two")
    assert re.search(r"CACHED|Using cache", (tmp_path / "log").read_text())
    assert (tmp_path / "two" / "result").read_text() == f"{MARKER}\n"


def test_a_failing_step_is_named(rig: Rig, tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text(
        f"FROM {TAG}-base AS work\n"
        "RUN echo 'error: the compiler is gone. Next: look for it.'"
        f" && {COPIED} && exit 3\n"
    )
    follower = Follower(lambda step: None)
    with pytest.raises(ToolFailedError):
        rig.engine.build(
            BuildRequest(dockerfile=broken, context=rig.context, target="work"), on_line=follower
        )
    assert follower.reason == "the compiler is gone"
    assert follower.exit_code == 3


def test_units_done_and_the_unit_that_failed_reach_the_user(rig: Rig, tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    said = "error: unit x.cu.o failed: `nvcc x.cu` ended with 1; its last lines:"
    quoted = 'x.cu(3): error: identifier "nonsense" is undefined'
    broken.write_text(
        f"FROM {TAG}-base AS native\n"
        "RUN echo 'progress: compile: 3 of 28, about 20 min left' \\\n"
        f" && echo '{said}' && echo '    {quoted}' \\\n"
        f" && echo '. Next: repeat it with `nvcc x.cu`.' && {COPIED} && exit 7\n"
        "FROM scratch AS out\nCOPY --from=native /x /x\n"
    )
    steps: list[str] = []
    follower = Follower(steps.append)
    with pytest.raises(ToolFailedError):
        rig.engine.build(
            BuildRequest(dockerfile=broken, context=rig.context, target="native"), on_line=follower
        )
    assert steps[-1] == "native: compile: 3 of 28, about 20 min left"
    assert follower.reason.startswith("unit x.cu.o failed: ")
    assert quoted in follower.reason
    assert follower.next_step == "repeat it with `nvcc x.cu`"
    assert follower.exit_code == 7


def test_what_a_failed_step_left_in_its_work_folder_is_there_for_the_next(
    rig: Rig, tmp_path: Path
) -> None:
    """As the native stage has it: units that were compiled are not compiled again."""
    dockerfile = tmp_path / "Dockerfile"
    mount = f"--mount=type=cache,id={TAG.replace(':', '-')},target=/work"
    request = BuildRequest(
        dockerfile=dockerfile, context=rig.context, target="out", output_dir=tmp_path / "out"
    )

    def build(step: str) -> None:
        dockerfile.write_text(
            f"FROM {TAG}-base AS native\nRUN {mount} {step}\n"
            "FROM scratch AS out\nCOPY --from=native /result /result\n"
        )
        rig.engine.build(request, on_line=lambda line: None)

    with pytest.raises(ToolFailedError):
        build(": > /work/unit-1; exit 15")
    build("test -e /work/unit-1 && echo resumed > /result")
    assert (tmp_path / "out" / "result").read_text() == "resumed\n"


def test_a_client_without_its_daemon_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    probes = list(engines.probe_all("docker"))
    if not probes:
        pytest.skip("no docker here")
    for probe in probes:
        assert probe.engine is None
        assert probe.down
        assert "unix:///nowhere/docker.sock" in probe.why
        assert "DOCKER_HOST" in probe.next_step


def test_the_script_beside_a_bundle_of_buildahs(tmp_path: Path) -> None:
    # A stand-in for buildah that notes how it was called.
    program = tmp_path / "buildah"
    program.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n[ "$1" != from ] || echo made\n')
    program.chmod(0o755)
    script = tmp_path / "run-image"
    script.write_text(Buildah(program, "1", chroot=True).script(TAG))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for words in (["check", "--json"], ["save", "a b.tar"]):
        process.run(["sh", script, *words], env=env)
    start, *rest = (tmp_path / "buildah.log").read_text().splitlines()
    assert start.startswith("from ")
    assert start.endswith(f" {TAG}")
    assert rest == [
        "run --isolation chroot made -- /opt/venv/bin/python -P -m sm12x.runtime check --json",
        "rm made",
        f"push {TAG} docker-archive:a b.tar:{TAG}",
    ]


def test_a_program_that_does_not_end_when_asked_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.2)
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.stream(
            ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done"], on_line=interrupt
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
