"""What is understood of an engine's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core.errors import BadFileError, BuildFailedError, NoSpaceError
from sm12x.image.engine import follow
from sm12x.image.engine.buildah import Podman
from sm12x.image.engine.engine import Docker
from sm12x.image.engine.follow import Follower

BUILDKIT = """\
#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 2B done
#1 DONE 0.0s
#4 [packages 1/6] FROM docker.io/library/sm12x-base:trixie
#4 CACHED
#5 [source 2/3] RUN --mount=type=bind,source=sources,target=/sources     python -m sm12x build
#5 sha256:8c860539db6b
#5 0.512 src made
#5 DONE 1.5s
#6 [native 7/7] RUN python -m sm12x build native
#6 3.250 error: nvcc cannot compile x.cu. Next: read it.
#6 ERROR: executor failed running [/bin/sh -c python]: exit code: 15
 > [native 7/7] RUN python:
error: failed to solve: exit code: 15
"""

BUILDAH = """\
[1/2] STEP 1/2: FROM sm12x-base:trixie AS packages
[1/2] STEP 2/2: RUN --mount=type=cache,target=/root/.cache apt-get update
--> Using cache 30f37abe95b5
[2/2] STEP 1/2: FROM packages AS source
[2/2] STEP 2/2: COPY x /x
error: building at STEP "COPY x /x": write /x: no space left on device
"""


FAILED_UNIT = """\
#9 [native 9/9] RUN python -m sm12x build native
#9 12.25 _moe_C
#9 22.25 progress: _moe_C: 3 of 28, about 20 min left
#9 32.50 error: unit marlin.cu.o of _moe_C failed: `nvcc x.cu` ended with 1; its last lines:
#9 32.50     x.cu(3): error: identifier "nonsense" is undefined
#9 32.50
#9 32.50 . Next: repeat it alone with `nvcc x.cu`.
#9 ERROR: executor failed running [/bin/sh -c python]: exit code: 15
------
 > [native 9/9] RUN python -m sm12x build native:
#9 32.50 . Next: repeat it alone with `nvcc x.cu`.
------
error: failed to solve: executor failed running [/bin/sh -c python]: exit code: 15
"""


def _follow(text: str) -> tuple[Follower, list[str]]:
    steps: list[str] = []
    follower = Follower(steps.append)
    for line in text.splitlines():
        follower(line)
    return follower, steps


def test_buildkit() -> None:
    follower, steps = _follow(BUILDKIT)
    assert steps == [
        "packages: FROM docker.io/library/sm12x-base:trixie",
        "source: RUN python -m sm12x build",
        "native: RUN python -m sm12x build native",
    ]
    assert follower.reason == "nvcc cannot compile x.cu"
    assert not follower.no_space


def test_buildah() -> None:
    follower, steps = _follow(BUILDAH)
    assert steps[1] == "packages: RUN apt-get update"
    assert follower.no_space


def test_a_silent_failure_has_a_reason_too() -> None:
    assert Follower(lambda _: None).reason
    assert _follow("something odd\n")[0].reason == "something odd"
    killed = (
        "[1/1] STEP 1/9: FROM x AS work\nold words\n[1/1] STEP 2/9: RUN make\n--> 30f37abe95b5\n"
    )
    assert "work: RUN make" in _follow(killed)[0].reason


def test_units_done_and_the_unit_that_failed() -> None:
    follower, steps = _follow(FAILED_UNIT)
    assert steps[1:] == ["native: _moe_C: 3 of 28, about 20 min left"]
    assert follower.reason.startswith("unit marlin.cu.o of _moe_C failed: ")
    assert 'identifier "nonsense" is undefined' in follower.reason
    assert follower.next_step == "repeat it alone with `nvcc x.cu`"
    assert follower.exit_code == 15


def test_an_error_that_was_cut_off_is_still_told() -> None:
    follower, _ = _follow("#9 1.0 error: it ended; its last lines:\n#9 1.0     killed\n")
    assert follower.reason == "it ended; its last lines:"
    assert follower.next_step == ""


def test_a_full_disk_is_told_with_what_a_bundle_takes() -> None:
    follower, _ = _follow("#9 1.0 write /x: no space left on device\n")
    engine = Podman(Path("/usr/bin/podman"), "4.3", chroot=False)
    engine.storage = lambda: Path("/store")  # type: ignore[method-assign]
    error = follow.failure(engine, "Dockerfile.bundle", follower, Path("log"), needs_gib=17.4)
    assert isinstance(error, NoSpaceError)
    assert "/store" in error.message
    assert "17 GiB" in error.message
    assert "`podman image prune`" in error.next_step


@pytest.mark.parametrize(
    ("code", "kind"),
    [(15, BuildFailedError), (7, NoSpaceError), (4, BadFileError), (1, BuildFailedError)],
)
def test_the_error_of_a_step_is_the_users_error(code: int, kind: type[Exception]) -> None:
    follower, _ = _follow(FAILED_UNIT.replace("exit code: 15", f"exit code: {code}"))
    engine = Docker(Path("/usr/bin/docker"), "20.10", buildx=False)
    error = follow.failure(
        engine, "Dockerfile.builder", follower, Path("build/builder.log"), needs_gib=9
    )
    assert type(error) is kind
    assert str(error).startswith(
        "docker could not build Dockerfile.builder: unit marlin.cu.o of _moe_C failed: "
    )
    assert 'identifier "nonsense" is undefined' in str(error)
    assert str(error).endswith(
        "Next: read build/builder.log; the same command resumes at the step that failed "
        "(inside the builder: repeat it alone with `nvcc x.cu`)."
    )
