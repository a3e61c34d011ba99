"""Patches in mail form: reading them, and what the lint says of their messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core.errors import BadFileError
from sm12x.stack.model import diff, patchfile
from sm12x_dev.worktree import lint

GOOD = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Jörg X <person@example.org>
Date: Fri, 20 Nov 2026 10:57:00 +0200
Subject: [PATCH] Reset the error state when an allocation begins, and not
 only at exit
MIME-Version: 1.0
Content-Type: text/plain; charset=UTF-8
Content-Transfer-Encoding: 8bit

One failure made every later allocation fail, because the state is kept
for the whole process and nothing clears it.

This clears it on entry, so that each call starts afresh and says no more than what it met.

Upstream: vllm-project/vllm#35489 (closed, never merged),
 vllm-project/vllm#1 (open)
Upstream: https://example.org/thread/1 (draft)
Drop-when: a release clears it on entry
Witness: tests/witness/test_it.py
Signed-off-by: Jörg X <person@example.org>

diff --git a/x.py b/x.py
index 40734b4c4d887cbf9cb744c77e3d1ca81960ed56..027cf41f32e458b76483521ba9655a9acf91bd04 100644
--- a/x.py
+++ b/x.py
@@ -1,2 +1,3 @@ def f():
 a
+b
 c
"""
BODY = GOOD[GOOD.index("One failure") : GOOD.index("\nUpstream")]
WHERE = "0001-Reset-the-error-state-when-an-allocation-begins-and-.patch"


def _examine(
    tmp_path: Path, text: str | bytes, *, root: Path | None = None
) -> tuple[patchfile.Patch | None, list[str]]:
    path = tmp_path / WHERE
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    patch, findings = lint.examine(path, root=root)
    return patch, [str(finding).removeprefix(f"{path}:") for finding in findings]


def test_a_patch_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests/witness").mkdir(parents=True)
    (tmp_path / "tests/witness/test_it.py").touch()
    patch, findings = _examine(tmp_path, GOOD, root=tmp_path)
    assert patch is not None
    assert findings == []
    assert patch.subject == "Reset the error state when an allocation begins, and not only at exit"
    assert patch.author.name == "Jörg X"
    assert patch.author.date == "1795165020 +0200"
    assert patch.body.startswith("One failure")
    assert patch.body.endswith("what it met.")
    assert patch.upstream == (
        "vllm-project/vllm#35489 (closed, never merged), vllm-project/vllm#1 (open); "
        "https://example.org/thread/1 (draft)"
    )
    assert patch.drop_when == "a release clears it on entry"
    assert patch.witnesses == ("tests/witness/test_it.py",)
    assert [file.path for file in patch.files] == ["x.py"]
    assert patch.message.startswith(f"{patch.subject}\n\nOne failure")
    assert patch.message.endswith("Signed-off-by: Jörg X <person@example.org>\n")
    assert patch.name == lint.file_name(1, patch.subject)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("only at exit", "only when it ends", 4),
        ("only at exit", "only.", 4),
        ("Drop-when: a release clears it on entry\n", "", 19),
        ("Drop-when: a release clears it on entry", "Drop-when: later", 18),
        ("Drop-when: a release", "Drop-when: a b c\nDrop-when: a release", 19),
        ("Witness: tests/witness/test_it.py\n", "", 19),
        ("Witness: tests/", "Witness: elsewhere/", 19),
        ("Witness: tests/witness/test_it.py", "Witness: /etc/passwd", 19),
        (" (draft)", "", 17),
        ("https://example.org/thread/1 (draft)", "none", 17),
        ("https://example.org/thread/1 (draft)", "none ()", 17),
        ("One failure", "x" * 101, 10),
        (BODY, "Short.\n", 10),
    ],
)
def test_every_fault_of_a_message_has_its_line(
    tmp_path: Path, old: str, new: str, line: int
) -> None:
    assert old in GOOD
    (tmp_path / "tests/witness").mkdir(parents=True)
    (tmp_path / "tests/witness/test_it.py").touch()
    patch, findings = _examine(tmp_path, GOOD.replace(old, new, 1), root=tmp_path)
    assert patch is not None
    assert [finding.partition(":")[0] for finding in findings] == [str(line)]


def test_without_trailers_each_one_is_missing(tmp_path: Path) -> None:
    _, findings = _examine(tmp_path, GOOD.replace("\nUpstream: vllm", "\n: vllm", 1))
    assert len(findings) == 3


def test_an_unreported_defect_may_say_so(tmp_path: Path) -> None:
    text = GOOD.replace("https://example.org/thread/1 (draft)", "none (found while testing)")
    _, findings = _examine(tmp_path, text)
    assert findings == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD.replace("\n", "\r\n"), 1),
        (GOOD.replace("\n", "\r\n", 12), 1),
        ("diff --git a/x b/x\n", 1),
        ("", 1),
        (GOOD[: GOOD.index("diff --git")], 21),
        (GOOD.replace("Subject:", "Object:"), 1),
        (GOOD.replace("20 Nov", "20 Nox"), 1),
        (GOOD.replace("Jörg X <person@example.org>\nDate", "\nDate"), 1),
        (GOOD.encode("latin-1"), 1),
        (GOOD.replace("\n c\n", "\n\n"), 29),
        (GOOD + "-- \n2.39.5\n", 31),
        (GOOD.replace("index 4", "rename from x\nindex 4"), 23),
        (GOOD.replace("b/x.py\nindex 4", "b/y.py\nindex 4"), 22),
        (GOOD[: GOOD.index("index 4")] + "Binary files differ\n", 23),
        (GOOD.replace("index 4", "new file mode 160000\nindex 4"), 23),
    ],
    ids=range(15),
)
def test_what_is_no_patch_is_told_by_line(tmp_path: Path, text: str | bytes, line: int) -> None:
    patch, findings = _examine(tmp_path, text)
    assert patch is None
    assert [finding.partition(":")[0] for finding in findings] == [str(line)]
    with pytest.raises(BadFileError) as caught:
        lint.parse(tmp_path / WHERE)
    assert "--like" in caught.value.next_step


def test_a_missing_file_is_a_finding(tmp_path: Path) -> None:
    patch, findings = lint.examine(tmp_path / "nowhere.patch")
    assert patch is None
    assert findings[0].line == 1


def test_text_in_any_encoding_may_be_patched(tmp_path: Path) -> None:
    patch, _ = _examine(tmp_path, GOOD.encode().replace(b"+b", b"+\xff\r"))
    assert patch is not None


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("Fix it", "0001-Fix-it.patch"),
        ("a/b: c  (d) -- e...", "0001-a-b-c-d-e.patch"),
        ("..x..y", "0001-.x.y.patch"),
        ("größer", "0001-gr-er.patch"),
        ("x" * 90, f"0001-{'x' * 52}.patch"),
    ],
)
def test_a_file_is_named_after_its_subject(subject: str, name: str) -> None:
    assert lint.file_name(1, subject) == name


def test_a_paragraph_that_only_begins_like_a_trailer_is_body() -> None:
    message = patchfile.split("S", ["", "Note: this is prose", "and goes on."], first_line=2)
    assert message.trailers == ()
    assert message.body == "Note: this is prose\nand goes on."
    assert message.first_body_line == 3


@pytest.mark.parametrize(
    "path", ["../x.py", "a/../../x.py", ".git/config", "a/.GIT/x", "/etc/passwd", "a//b", "./a"]
)
def test_a_path_that_leads_out_of_the_tree_is_refused(path: str) -> None:
    lines = [
        f"diff --git a/{path} b/{path}",
        "new file mode 100644",
        f"index {'0' * 40}..{'1' * 40}",
        "--- /dev/null",
        f"+++ b/{path}",
        "@@ -0,0 +1 @@",
        "+x",
    ]
    with pytest.raises(diff.DiffError) as caught:
        diff.parse(lines)
    assert caught.value.line == 1
