"""What the message, the file name and the series of a patch have to be."""

from __future__ import annotations

import re
from pathlib import Path

from sm12x.core.errors import BadFileError
from sm12x.stack.model import patchfile, series
from sm12x.stack.model.base import Base
from sm12x.stack.model.diff import DiffError
from sm12x.stack.model.patchfile import Message, MessageFault, Patch

_SUBJECT_WIDTH = 72
_BODY_WIDTH = 100
# Fewer words cannot state both the defect and why the patch fixes it.
_BODY_WORDS = 20
_TRAILERS = ("Upstream", "Drop-when", "Witness")
# What git gives a file name of format-patch, ".patch" and the closing NUL included.
_NAME_MAX = 64

# What to do with a patch file that lacks what the message of a patch has.
INSTEAD = "leave out --like, and give --subject, --body, --upstream, --drop-when and --witness"

_THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+|https?://\S+")
_STATE = re.compile(r"\b(open|closed|merged|draft)\b", re.IGNORECASE)
_NONE = re.compile(r"^none \(.*\w.*\)$", re.IGNORECASE | re.DOTALL)


def _slug(subject: str) -> str:
    """The subject as git makes a file name of it (``git format-patch``, "%f")."""
    text = re.sub(r"[^A-Za-z0-9._]+", "-", subject.encode("ascii", "replace").decode())
    return re.sub(r"\.{2,}", ".", text).lstrip("-").rstrip(".-")


def file_name(number: int, subject: str) -> str:
    """The file name of patch ``number`` (from 1), as ``git format-patch`` chooses it."""
    longest = _NAME_MAX - len(".patch") - 1
    return f"{number:04d}-{_slug(subject)}"[:longest] + ".patch"


def parse(path: Path) -> Patch:
    """Read a patch file.

    Raises:
        BadFileError: unreadable, not a mail, or its diff is malformed; says at which line.
    """
    patch, findings = examine(path)
    if patch is None:
        raise BadFileError(f"{findings[0]}", next_step=INSTEAD)
    return patch


def examine(path: Path, *, root: Path | None = None) -> tuple[Patch | None, list[MessageFault]]:
    """Read a patch file and list all its faults.

    Args:
        root: the checkout; when given, the witness's path must exist in it.

    Returns:
        The patch, None where it cannot be read at all, and the findings.
    """
    try:
        patch, message, subject_line = patchfile.read(path)
    except DiffError as error:
        return None, [MessageFault(path=path, line=error.line, message=str(error))]
    faults = faults_of(message, subject_line=subject_line, root=root)
    return patch, [MessageFault(path=path, line=line, message=text) for line, text in faults]


def faults_of(message: Message, *, subject_line: int, root: Path | None) -> list[tuple[int, str]]:
    """Return the faults of a message, as (line, text)."""
    body_line = message.first_body_line
    last = message.trailers[-1][2] if message.trailers else body_line
    faults: list[tuple[int, str]] = []
    if len(message.subject) > _SUBJECT_WIDTH:
        faults.append((subject_line, f"the subject is longer than {_SUBJECT_WIDTH} characters"))
    if message.subject.endswith("."):
        faults.append((subject_line, "the subject ends with a period"))
    if not _slug(message.subject):
        faults.append((subject_line, "the subject has no letter that a file name could have"))
    if len(message.body.split()) < _BODY_WORDS:
        what = "the body does not say what was wrong and why this fixes it"
        faults.append((body_line, f"{what} (fewer than {_BODY_WORDS} words)"))
    faults += [
        (body_line + n, f"is longer than {_BODY_WIDTH} characters")
        for n, line in enumerate(message.body.split("\n"))
        if len(line) > _BODY_WIDTH
    ]
    for key in _TRAILERS:
        lines = [line for name, _, line in message.trailers if name == key]
        if not lines:
            faults.append((last, f"the trailer `{key}:` is missing from the last paragraph"))
        if len(lines) > 1 and key == "Drop-when":
            faults.append((lines[1], f"the trailer `{key}:` is given twice"))
    for key, value, line in message.trailers:
        if complaint := _lint_trailer(key, value, root):
            faults.append((line, complaint))
    return sorted(faults)


def _lint_trailer(key: str, value: str, root: Path | None) -> str:
    """Return what is wrong with the value of a trailer, "" where nothing is."""
    if key == "Upstream":
        if not _NONE.match(value) and not (_THREAD.search(value) and _STATE.search(value)):
            return (
                "`Upstream:` must name a thread and its state (open, closed, merged or draft), as "
                "in `owner/repository#123 (closed, never merged)`, or be `none (why)`"
            )
    elif key == "Drop-when" and len(value.split()) < 3:
        return "`Drop-when:` does not say what has to happen for the patch to go"
    elif key == "Witness" and root is not None:
        path = (root / value.split("::", 1)[0]).resolve()
        if not path.is_file() or not path.is_relative_to(root.resolve()):
            return f"`Witness:` names {value}, which is no file of the checkout"
    return ""


def check(base: Base, *, root: Path | None) -> list[MessageFault]:
    """Return all faults of the series, the folder and the messages.

    Args:
        root: the checkout that the witnesses' paths are in.
    """
    names, findings = series.read(base)
    for number, name in enumerate(names, start=1):
        path = base.folder / name
        patch, faults = examine(path, root=root)
        findings += faults
        expected = file_name(number, patch.subject) if patch is not None else name
        if name != expected:
            message = f"the file name should be {expected}: place in the series, then subject"
            findings.append(MessageFault(path=path, line=1, message=message))
    slugs = {name.partition("-")[2]: name for name in names}
    path = base.folder / "base.toml"
    for entry in base.dropped:
        if same := slugs.get(entry.patch.partition("-")[2]):
            text = path.read_text(encoding="utf-8", errors="replace")
            line = text.partition(entry.patch)[0].count("\n") + 1
            message = f"[[dropped]] names {entry.patch}, and the series lists {same}: take out one"
            findings.append(MessageFault(path=path, line=line, message=message))
    return findings
