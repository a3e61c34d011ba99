"""Architecture strings, atomic writes, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core import cudaarch, errors, files


@pytest.mark.parametrize(
    ("text", "device", "runs"),
    [
        ("12.0", (12, 1), True),
        ("12.0a", (12, 0), True),
        ("12.0a", (12, 1), False),
        ("12.0f", (12, 1), True),
        ("12.1", (12, 0), False),
        ("9.0", (12, 0), False),
    ],
)
def test_where_a_cubin_loads(text: str, device: tuple[int, int], runs: bool) -> None:
    assert cudaarch.CudaArch.parse(text).runs_on(*device) is runs


def test_an_arch_list_round_trips() -> None:
    assert [str(arch) for arch in cudaarch.parse_list("12.0a; 12.1a,9.0+PTX")] == [
        "12.0a",
        "12.1a",
        "9.0+PTX",
    ]
    with pytest.raises(ValueError, match="sm_120"):
        cudaarch.parse_list("sm_120")


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_every_error_has_a_code_of_its_own() -> None:
    kinds: list[type[errors.Sm12xError]] = [
        errors.Sm12xError,
        *errors.Sm12xError.__subclasses__(),
    ]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(errors.EXIT_CODES[kind.exit_code] == kind.meaning for kind in kinds)


def test_space_is_checked_before_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSpaceError, match=r"the build needs 1000000\.0 GiB under"):
        files.require_space(tmp_path / "not" / "there", 1e6, what="the build")
