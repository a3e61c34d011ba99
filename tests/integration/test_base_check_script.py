"""`.ci/base-check`: an issue where the check found something, none where it did not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sm12x import layout

GH = """\
#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
[ "$2" != list ] || printf '%s' "$OPEN"
"""


@pytest.mark.parametrize(
    ("code", "dry", "opened", "calls"),
    [
        (0, "", "", []),
        (1, "", "", ["issue list", "issue create"]),
        (16, "", "", ["issue list", "issue create"]),
        (1, "", "47", ["issue list"]),
        (1, "1", "", []),
    ],
)
def test_an_issue_is_opened_once(
    tmp_path: Path, code: int, dry: str, opened: str, calls: list[str]
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    script = (layout.root() / ".ci" / "base-check").read_text()
    (checkout / ".ci" / "base-check").write_text(script)
    (checkout / "Makefile").write_text(".venv/.installed:\n\t@true\n")
    check = tmp_path / "check"
    check.write_text(f"#!/bin/sh\necho 'base 0.33.0: 2 releases behind'\nexit {code}\n")
    path = tmp_path / "bin"
    path.mkdir()
    (path / "gh").write_text(GH)
    for program in (check, path / "gh"):
        program.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{path}:{os.environ['PATH']}",
        "CHECK": str(check),
        "DRY": dry,
        "CALLS": str(tmp_path / "calls"),
        "OPEN": opened,
    }
    done = subprocess.run(
        ["bash", str(checkout / ".ci" / "base-check")],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 releases behind" in done.stdout
    said = tmp_path / "calls"
    text = said.read_text() if said.is_file() else ""
    assert [word for word in ("issue list", "issue create") if word in text] == calls
    assert ("would open" in done.stdout) == bool(dry)
    if "issue create" in calls:
        assert f"ended with {code}" in text
