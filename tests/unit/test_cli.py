"""What the command layer makes of what no step foresaw or no user typed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import sm12x
from sm12x import cli
from sm12x.commands import audit, build
from sm12x.core.errors import BadFileError, of_system


def fail(error: OSError) -> Callable[..., None]:
    def command(**_: object) -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("number", "path", "code", "said"),
    [
        (errno.ENOSPC, None, 7, "error: no space left on device. Next: free space"),
        (errno.ENOSPC, "/x/y", 7, "error: /x/y: no space left on device. Next: free space"),
        (errno.EACCES, "/x/y", 4, "error: /x/y: permission denied. Next: check that path"),
        (errno.EROFS, "/x/y", 4, "error: /x/y: read-only file system. Next: check that path"),
    ],
)
def test_a_full_disk_and_a_closed_path_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    path: str | None,
    code: int,
    said: str,
) -> None:
    error = OSError(number, os.strerror(number), path)
    monkeypatch.setattr(cli.root, "main", fail(error))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_what_is_not_understood_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.root, "main", fail(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        cli.main()
    assert isinstance(cli.root, click.Command)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_the_null_device(
    monkeypatch: pytest.MonkeyPatch, closed: tuple[int, ...]
) -> None:
    """With the process's own streams: kept aside, closed as a shell's `>&-` does, put back."""
    streams = sys.stdin, sys.stdout, sys.stderr
    kept = [os.dup(number) for number in range(3)]
    made = []
    try:
        for number in closed:
            os.close(number)
            monkeypatch.setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        cli.open_streams()
        null = Path(os.devnull).stat().st_rdev
        made = [os.fstat(number).st_rdev == null for number in closed]
        made += [stream is not None for stream in (sys.stdin, sys.stdout, sys.stderr)]
        print("to the null device", flush=True)
    finally:
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)
        sys.stdin, sys.stdout, sys.stderr = streams
    assert all(made)


@pytest.mark.parametrize("given", ["environment", "option"])
def test_a_list_that_nobody_typed_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    given: str,
) -> None:
    argv = ["sm12x", "build", "native", "--base", "0.33.0", "--out", str(tmp_path / "out")]
    argv += ["--source", str(tmp_path), "--cuda-home", str(tmp_path)]
    if given == "environment":
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    else:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        argv += ["--arch-list", "9.0a"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 10
    said = capsys.readouterr().err
    assert "no target of 9.0a runs on SM12x" in said
    from_variable = "targets from TORCH_CUDA_ARCH_LIST: 9.0a (unset: 12.0a;12.1a)" in said
    assert from_variable == (given == "environment")


def test_paths_in_printed_commands_are_quoted() -> None:
    """A folder may have a blank in its name; what is printed has to work when it is typed."""
    command = re.compile(
        r"(?:`|next: )(?:sm12x|git|mv|cp|rm) [^`\n]*\{(?:directory|path|folder|output|file|dir)\}"
    )
    package = Path(sm12x.__file__).parent
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.py")
        for match in command.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 7), (errno.EDQUOT, 7), (errno.EACCES, 4)]
)
def test_what_a_copy_of_a_folder_gathers_is_understood(number: int, code: int) -> None:
    one = OSError(number, os.strerror(number), "/a/b")
    known = of_system(shutil.Error([("/a/b", "/c/d", str(one))]))
    assert known is not None
    assert known.exit_code == code
    assert of_system(OSError("nothing known")) is None


def test_no_folder_for_temporary_files_is_a_full_disk() -> None:
    text = "No usable temporary directory found in ['/tmp']"
    known = of_system(FileNotFoundError(errno.ENOENT, text))
    assert known is not None
    assert known.exit_code == 7


def test_packages_are_not_checked_where_vllm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    done = CliRunner().invoke(build.command, ["requirements"])
    assert isinstance(done.exception, BadFileError)
    assert "vllm is not installed in" in str(done.exception)
    assert "Next: run this with the Python of the image" in str(done.exception)


def test_a_policy_that_is_not_there_is_a_path_to_check(tmp_path: Path) -> None:
    done = CliRunner().invoke(audit.command, [str(tmp_path), "--policy", str(tmp_path / "no.toml")])
    assert isinstance(done.exception, BadFileError)
    assert "no.toml: there is no such file. Next: check that path" in str(done.exception)


def test_a_reader_that_left_is_not_left_to_click(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(*words: object, **settings: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("click.echo", left)
    monkeypatch.setattr("sys.argv", ["sm12x", "recipe", "show", "smoke"])
    monkeypatch.setattr(os, "dup2", lambda *handles: None)
    monkeypatch.setattr(signal, "signal", lambda *settings: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
