"""The message of `patch new`: what is wrapped, and what a foreign patch file lacks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases
from sm12x.stack.model import patchfile, series
from sm12x_dev.commands.tree import new_command
from sm12x_dev.worktree import add_drop, lint
from sm12x_dev.worktree.export import MessageError

LONG = (
    "The allocator keeps the error of one call for the whole process, and nothing clears it. " * 3
)
DIFF = "diff --git a/x.py b/x.py\nindex 1..2 100644\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
# What GitHub gives for a pull request.
PULL = (
    "From 89b3e0a1c04d6f7b1e7b7d2f7e0d3b1b1d7b7a11 Mon Sep 17 00:00:00 2001\n"
    "From: Some One <some@example.org>\nDate: Fri, 20 Nov 2026 10:57:00 +0200\n"
    "Subject: [PATCH 1/2] fix(worker): clear it\n\n{body}\n---\n x.py | 2 +-\n\n" + DIFF
)


def message(body: str) -> str:
    return add_drop.message(
        subject="Clear it",
        body=body,
        upstream=["owner/repo#1 (open) " + "x" * 100],
        drop_when="upstream clears it " + "y " * 60,
        witness=["tests/witness/test_it.py"],
    )


def body_of(text: str) -> list[str]:
    lines = text.rstrip("\n").split("\n")
    return patchfile.split(lines[0], lines[1:], first_line=2).body.split("\n")


def test_a_line_that_is_too_long_is_wrapped_and_no_word_is_lost() -> None:
    lines = body_of(message(LONG))
    assert len(lines) > 1
    assert max(map(len, lines)) <= 100
    assert " ".join(lines) == LONG.strip()


def test_what_is_short_enough_stays_as_it_is() -> None:
    body = "One.\n\n- a\n- b\n\n    code  with  blanks\n\n\nCo-authored-by: A <a@b>"
    assert body_of(message(body)) == body.split("\n")


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        *(("- ", "  "), ("* ", "  "), ("12. ", "    "), ("  - ", "    "), ("    ", "    ")),
        ("Reported-by: ", " "),
    ],
)
def test_the_lines_of_a_list_and_of_a_trailer_hang(first: str, rest: str) -> None:
    lines = body_of(message(f"Why.\n\n{first}{LONG}\n{first}short"))[2:]
    assert lines[0].startswith(first)
    assert all(line.startswith(rest) and line[len(rest)] != " " for line in lines[1:-1])
    assert lines[-1] == f"{first}short"
    assert max(map(len, lines)) <= 100


def test_the_trailers_are_not_wrapped() -> None:
    block = message(LONG).rstrip("\n").split("\n")[-3:]
    assert [line.partition(":")[0] for line in block] == ["Upstream", "Drop-when", "Witness"]
    assert len(block[0]) > 100


@pytest.mark.parametrize("seed", range(5))
def test_any_body_keeps_its_words(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    words = [
        "a",
        "- b",
        "12.",
        "https://x.example/" + "y" * 120,
        "Key-by:",
        "",
        " ",
        "\t",
        "ü" * 30,
    ]
    for _ in range(300):
        body = "".join(draw.choice(words) + draw.choice(" \n") for _ in range(60))
        text = message(body)
        assert text == message("\n".join(text.split("\n")[2:-5])), "wrapped twice"
        assert text.split("\n\n", 1)[1].rpartition("\n\n")[0].split() == body.split()
        # Only a word can be too long.
        assert all(len(line) <= 100 or len(line.split()) < 3 for line in text.split("\n")[2:-5])


@pytest.mark.parametrize(
    "text",
    [
        DIFF,
        f"commit 89b3e0a1\nAuthor: A <a@b>\n\n    subject\n\n{DIFF}",
        PULL.replace("From: Some One <some@example.org>", "From: some@example.org"),
        PULL.replace("Date: Fri, 20 Nov 2026 10:57:00 +0200\n", ""),
        PULL.replace("Date: Fri, 20 Nov", "Date: 20/11"),
        PULL.replace("Subject: [PATCH 1/2] fix(worker): clear it\n", "Subject: [PATCH]\n"),
        PULL.replace("\n", "\r\n"),
        PULL + PULL,
        PULL.partition("diff --git")[0],
        *("", "\n", "# HG changeset patch\n", "--- a/x\n+++ b/x\n", "\x00\xff"),
    ],
    ids=range(14),
)
def test_a_file_without_our_header_asks_for_the_options_instead(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pr.patch"
    path.write_bytes(text.encode("latin-1"))
    done = CliRunner().invoke(new_command, [str(tmp_path), "--like", str(path)])
    assert isinstance(done.exception, BadFileError), done.exception
    assert str(path) in done.exception.message
    for option in ("--like", "--subject", "--upstream", "--drop-when", "--witness"):
        assert option in done.exception.next_step
    assert "refresh" not in done.exception.next_step


@pytest.mark.parametrize(
    "body", ["", LONG, f"{LONG}\n\nSigned-off-by: Some One <some@example.org>"]
)
def test_a_pull_request_lacks_trailers_and_says_which_options_have_them(
    tmp_path: Path, body: str
) -> None:
    path = tmp_path / "pr.patch"
    path.write_text(PULL.format(body=body))
    model = lint.parse(path)
    with pytest.raises(MessageError) as refused:
        add_drop.checked(model.message, root=tmp_path, like=model)
    assert {finding.path.name for finding in refused.value.findings} == {"message of pr.patch"}
    assert "--author 'Some One <some@example.org>'" in refused.value.next_step
    for option in ("--like", "--subject", "--upstream", "--drop-when", "--witness"):
        assert option in refused.value.next_step


def test_files_that_a_patch_made_like_another_leaves_out() -> None:
    base = bases.load(bases.default())
    model = series.load(base).patches[0]
    first, *others = [file.path for file in model.files]
    assert add_drop.missing(model, [first, *others]) == ()
    assert add_drop.missing(model, [*others, "elsewhere.txt"]) == (first,)
    # One of its name in another folder is where its hunks went.
    assert add_drop.missing(model, [*others, f"moved/{Path(first).name}"]) == ()
