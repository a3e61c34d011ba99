"""What the command layer makes of an error that no step foresaw."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import click
import pytest

from sm12x import cli


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
