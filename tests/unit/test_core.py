"""Architecture strings, atomic writes, exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import cudaarch, errors, files, machine, picture, process


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


def test_an_output_that_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("plain")
    files.write_output(link, "report")
    assert link.is_symlink()
    assert plain.read_text() == "report"
    os.mkfifo(pipe)
    # Both ways at once: a pipe that is opened to be written to waits for a reader.
    reader = os.open(pipe, os.O_RDWR)
    try:
        files.write_output(pipe, "report")
        assert os.read(reader, 64) == b"report"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    files.write_output(plain, "other")
    assert plain.read_text() == "other"
    assert sorted(tmp_path.iterdir()) == [link, pipe, plain]


def test_a_picture_leaves_a_link_and_what_is_no_file_in_place(tmp_path: Path) -> None:
    class Drawn:
        def savefig(self, path: Path, **settings: object) -> None:
            path.write_bytes(b"a picture")

    pipe, link = tmp_path / "pipe", tmp_path / "link.png"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        for path in (pipe, link):
            picture.write(Drawn(), path)
            assert os.read(reader, 64) == b"a picture"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_every_error_has_a_code_of_its_own() -> None:
    kinds: list[type[errors.Sm12xError]] = [
        errors.Sm12xError,
        *errors.Sm12xError.__subclasses__(),
    ]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(errors.EXIT_CODES[kind.exit_code] == kind.meaning for kind in kinds)


def test_space_is_checked_before_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSpaceError, match=r"1000000\.0 GiB"):
        files.require_space(tmp_path / "not" / "there", 1e6, what="the build")


# ---- the machine


def _machine(root: Path, **texts: str) -> Path:
    """A folder that looks like a machine; `__` in a name is a slash."""
    for name, text in {"proc__meminfo": "MemTotal: 64 kB\nMemAvailable: 32 kB\n", **texts}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUP = "sys__fs__cgroup__"
STAT = "anon 4096\nactive_file 1024\ninactive_file 2048\ntotal_inactive_file 9\n"


@pytest.mark.parametrize(
    ("texts", "free"),
    [
        ({}, 32768),
        ({f"{GROUP}memory.max": "max", f"{GROUP}memory.current": "5"}, 32768),
        ({f"{GROUP}memory.max": "20000", f"{GROUP}memory.current": "5000"}, 15000),
        # What is used holds files that the kernel gives up.
        (
            {
                f"{GROUP}memory.max": "20000",
                f"{GROUP}memory.current": "5000",
                f"{GROUP}memory.stat": STAT,
            },
            18072,
        ),
        ({f"{GROUP}memory.max": "99999", f"{GROUP}memory.current": "5000"}, 32768),
        ({f"{GROUP}memory.max": "4000", f"{GROUP}memory.current": "5000"}, 0),
        # Version 1, with and without a limit.
        (
            {
                f"{GROUP}memory__memory.limit_in_bytes": "20000",
                f"{GROUP}memory__memory.usage_in_bytes": "5000",
                f"{GROUP}memory__memory.stat": STAT,
            },
            18072,
        ),
        (
            {
                f"{GROUP}memory__memory.limit_in_bytes": "9223372036854771712",
                f"{GROUP}memory__memory.usage_in_bytes": "5000",
            },
            32768,
        ),
        ({"proc__meminfo": "MemTotal: 64 kB\n"}, None),
        (
            {
                "proc__meminfo": "",
                f"{GROUP}memory.max": "20000",
                f"{GROUP}memory.current": "5000",
            },
            15000,
        ),
    ],
)
def test_free_memory_is_that_of_the_machine_or_of_the_group(
    tmp_path: Path, texts: dict[str, str], free: int | None
) -> None:
    assert machine.available(_machine(tmp_path, **texts)) == free


@pytest.mark.parametrize(
    ("texts", "cores"),
    [
        ({}, 8),
        ({f"{GROUP}cpu.max": "max 100000"}, 8),
        ({f"{GROUP}cpu.max": "250000 100000"}, 3),
        ({f"{GROUP}cpu.max": "10000 100000"}, 1),
        ({f"{GROUP}cpu.max": "9900000 100000"}, 8),
        ({f"{GROUP}cpu__cpu.cfs_quota_us": "-1", f"{GROUP}cpu__cpu.cfs_period_us": "100000"}, 8),
        (
            {f"{GROUP}cpu__cpu.cfs_quota_us": "150000", f"{GROUP}cpu__cpu.cfs_period_us": "100000"},
            2,
        ),
        ({f"{GROUP}cpu.max": "x"}, 8),
        ({f"{GROUP}cpu.max": "1 0"}, 8),
    ],
)
def test_processors_are_those_of_the_affinity_or_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores(_machine(tmp_path, **texts)) == cores


def test_a_cache_without_a_home_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SM12X_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(errors.UsageError) as caught:
        layout.cache()
    assert "SM12X_CACHE" in caught.value.next_step
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert layout.cache() == Path("/caches/sm12x")


def test_a_program_given_as_text_is_not_repeated_by_an_error() -> None:
    argv = ("docker", "run", "IMAGE", "python3", "-c", "\nimport json\nprint(json.dumps({}))\n")
    done = process.Completed(argv=argv, returncode=125, stdout="", stderr="no such image\n")
    said = str(process.failed(done))
    assert "docker run IMAGE python3 -c 'import json...'" in said
    assert "no such image" in said
    assert "dumps" not in said


@pytest.mark.parametrize(
    ("path", "glob", "fits"),
    [
        ("a/b.c", "a/*.c", True),
        ("a/b/c.c", "a/*.c", False),
        ("a/b/c.c", "a/**", True),
        ("a/c.c", "a/**/*.c", True),
        ("a/b/d/c.c", "a/**/*.c", True),
        ("b/c.c", "a/**", False),
        ("a", "a/b", False),
    ],
)
def test_globs(path: str, glob: str, fits: bool) -> None:
    assert files.matches(path, glob) is fits
