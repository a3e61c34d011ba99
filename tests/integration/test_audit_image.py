"""The audit of an image by name, through each real engine that is here."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm12x.audit import scan
from sm12x.core import process
from sm12x.core.errors import BadFileError, ToolFailedError

# With test_bundle.py, which says why.
pytestmark = pytest.mark.xdist_group("engines")

KERNELS = Path(__file__).parents[1] / "unit" / "data" / "kernels.so"
NAME = f"sm12x-audit-test:{os.getpid()}"


@pytest.fixture(scope="module", params=scan.ENGINES)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    name: str = request.param
    if process.which(name) is None or process.run([name, "info"], check=False).returncode:
        pytest.skip(f"{name} is not here or does not answer")
    archive = tmp_path_factory.mktemp(name) / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(KERNELS, "opt/kernels.so")
    if name == "buildah":
        container = process.run([name, "from", "scratch"]).stdout.strip()
        process.run([name, "add", container, archive, "/"])
        process.run([name, "commit", "--rm", container, NAME])
    else:
        process.run([name, "import", archive, NAME])
    yield name
    process.run([name, "rmi", NAME])


def containers(engine: str) -> str:
    """Those of our image: other tests use the engine meanwhile."""
    listing = ["containers", "-q"] if engine == "buildah" else ["ps", "-aq"]
    return process.run([engine, *listing, "--filter", f"ancestor={NAME}"]).stdout


def test_an_image_is_audited_and_no_container_stays(engine: str) -> None:
    before = containers(engine)
    found = scan.image(f"{engine}:{NAME}")
    assert found.kind == "image"
    assert [(each.path, each.sm120) for each in found.libraries] == [("opt/kernels.so", "native")]
    assert containers(engine) == before


def test_the_saved_archive_holds_the_same(engine: str, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    if engine == "buildah":
        process.run([engine, "push", NAME, f"oci-archive:{archive}"])
    else:
        process.run([engine, "save", NAME, "-o", archive])
    assert scan.scan(archive).libraries == scan.image(f"{engine}:{NAME}").libraries


def test_an_image_that_is_not_there_is_one_line(engine: str) -> None:
    with pytest.raises(BadFileError) as caught:
        scan.image(f"{engine}:sm12x-no-such-image")
    assert "\n" not in str(caught.value)


def test_a_program_that_fails_is_the_error_not_what_it_cut_off() -> None:
    with pytest.raises(ToolFailedError, match="boom"):
        _read_and_fail("printf half; echo boom >&2; exit 3")
    with pytest.raises(BadFileError):
        _read_and_fail("printf half")


def _read_and_fail(script: str) -> None:
    with process.reading(["sh", "-c", script]) as stream:
        stream.read()
        raise BadFileError("it is cut off", next_step="save it again")
