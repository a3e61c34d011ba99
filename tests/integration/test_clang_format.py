"""The release's own clang-format leaves every line alone that a patch adds to its C++ and CUDA."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sm12x.stack.model import base as bases

SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr or done.stdout}"
    return done.stdout


def hook(tree: Path) -> tuple[str, re.Pattern[str]]:
    """The version of clang-format that the release pins, and the files it leaves out."""
    config = yaml.safe_load((tree / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        for entry in repository["hooks"]:
            if entry["id"] == "clang-format":
                return repository["rev"].removeprefix("v"), re.compile(entry.get("exclude", "^$"))
    raise AssertionError("the release has no clang-format hook")


def added(tree: Path, commit: str, path: str) -> list[str]:
    """The ranges of lines that a commit adds to a file, as clang-format is given them."""
    text = run("git", "diff", "-U0", f"{commit}^", commit, "--", path, cwd=tree)
    found: list[str] = []
    for match in _HUNK.finditer(text):
        first, count = int(match[1]), int(match[2] or 1)
        if count:
            found.append(f"--lines={first}:{first + count - 1}")
    return found


@pytest.mark.parametrize("version", bases.versions())
def test_no_added_line_is_formatted_anew(version: str, tmp_path: Path) -> None:
    tree = tmp_path / "vllm"
    sm12x = (sys.executable, "-m", "sm12x_dev")
    run(*sm12x, "apply", "--base", version, "--unpack", str(tree), cwd=tmp_path)
    clang_format = str(Path(sys.executable).with_name("clang-format"))
    pinned, excluded = hook(tree)
    assert f"version {pinned}" in run(clang_format, "--version", cwd=tree)
    wrong: list[str] = []
    seen = 0
    for commit in run("git", "rev-list", "base..HEAD", cwd=tree).split():
        paths = run(
            "git", "diff", "--name-only", "--diff-filter=AM", f"{commit}^", commit, cwd=tree
        )
        for path in paths.splitlines():
            lines = added(tree, commit, path) if path.endswith(SUFFIXES) else []
            if not lines or excluded.search(path):
                continue
            seen += 1
            before = run("git", "show", f"{commit}:{path}", cwd=tree)
            done = subprocess.run(
                [clang_format, "--style=file", f"--assume-filename={path}", *lines],
                cwd=tree,
                input=before,
                capture_output=True,
                text=True,
                check=True,
            )
            if done.stdout != before:
                subject = run("git", "log", "-1", "--format=%s", commit, cwd=tree).strip()
                wrong.append(f"{subject}: {path}")
    assert seen, "no patch adds C++"
    assert not wrong, wrong
