"""A patch file (`git format-patch`): reading one, and the required parts of its message.

A message gives the reason for the patch in its body, and four trailers that a check can read:

    Upstream: owner/repository#123 (closed, never merged)
    Drop-when: what has to happen for this patch to go
    Witness: tests/witness/test_it.py

`Upstream: none (why)` stands for a defect without a report.
"""

from __future__ import annotations

import email
import email.errors
import email.policy
import email.utils
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core.errors import BadFileError
from sm12x.core.git import Signature
from sm12x.stack.model import diff
from sm12x.stack.model.diff import DiffError, PatchedFile

_SUBJECT_WIDTH = 72
_BODY_WIDTH = 100
# Fewer words cannot state both the defect and why the patch fixes it.
_BODY_WORDS = 20
_TRAILERS = ("Upstream", "Drop-when", "Witness")
# What git gives a file name of format-patch, ".patch" and the closing NUL included.
_NAME_MAX = 64

# What to do with a patch file that lacks what the message of a patch has.
INSTEAD = "leave out --like, and give --subject, --body, --upstream, --drop-when and --witness"

_TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Za-z]+)*): +(.*)$")
_PREFIX = re.compile(r"^\[PATCH[^\]]*\] *")
_THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+|https?://\S+")
_STATE = re.compile(r"\b(open|closed|merged|draft)\b", re.IGNORECASE)
_NONE = re.compile(r"^none \(.*\w.*\)$", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MessageFault:
    """Something wrong with a file; ``line`` counts from 1."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Message:
    """A commit message taken apart; ``body`` is the text between subject and trailers.

    ``trailers`` are key, value and line of each.
    """

    subject: str
    body: str
    trailers: tuple[tuple[str, str, int], ...]
    first_body_line: int

    def trailer(self, key: str) -> str:
        """All values of ``key``, "" where there is none."""
        return "; ".join(value for name, value, _ in self.trailers if name == key)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch file. ``upstream``, ``drop_when`` and ``witness`` are its trailers' values.

    ``message`` is the commit message as git stores it; ``sha256`` is of the file, in hex.
    """

    name: str
    path: Path
    sha256: str
    subject: str
    body: str
    upstream: str
    drop_when: str
    witness: str
    files: tuple[PatchedFile, ...]
    message: str
    author: Signature

    @property
    def witnesses(self) -> tuple[str, ...]:
        """The test paths (or pytest node ids) of ``witness``, one by one."""
        return tuple(part.strip() for part in self.witness.split(";") if part.strip())

    def content(self) -> bytes:
        return self.path.read_bytes()


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
        patch, message, subject_line = _read(path)
    except DiffError as error:
        return None, [MessageFault(path=path, line=error.line, message=str(error))]
    faults = lint(message, subject_line=subject_line, root=root)
    return patch, [MessageFault(path=path, line=line, message=text) for line, text in faults]


def _read(path: Path) -> tuple[Patch, Message, int]:
    """Return a patch, its message, and the line of the subject. Raises DiffError."""
    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        raise DiffError(1, "is not a regular file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DiffError(1, f"cannot be read: {error.strerror or error}") from None
    if b"\r" in raw.partition(b"\ndiff --git ")[0].partition(b"\n\n")[0]:
        raise DiffError(
            1,
            "has CRLF line endings: a mail program or git's autocrlf mangled it; get the file "
            "again without conversion",
        )
    # The text being patched may be in any encoding; the message may not.
    lines = raw.decode("utf-8", errors="surrogateescape").removesuffix("\n").split("\n")
    blank = next((n for n, line in enumerate(lines) if line == ""), len(lines))
    start = next((n for n, line in enumerate(lines) if line.startswith("diff --git ")), 0)
    if not lines[0].startswith("From "):
        raise DiffError(1, "is not a patch in mail form: its first line is not `From <commit> ...`")
    if start < blank:
        raise DiffError(len(lines), "is a mail without a diff")
    try:
        "\n".join(lines[:start]).encode()
    except UnicodeEncodeError:
        raise DiffError(1, "the message is not UTF-8") from None
    headers = email.message_from_string("\n".join(lines[1:blank]), policy=email.policy.default)
    subject = _PREFIX.sub("", str(headers["Subject"] or "")).strip()
    if not subject:
        raise DiffError(1, "has no subject")
    author = _author(str(headers["From"] or ""), str(headers["Date"] or ""))
    if author is None:
        raise DiffError(1, "`From:` or `Date:` is missing or not readable")
    # What follows `---` is for readers of the mail and no part of the message.
    end = lines.index("---", blank, start) if "---" in lines[blank:start] else start
    message = split(subject, lines[blank:end], first_line=blank + 1)
    text = "\n".join(lines[blank:end]).strip("\n")
    patch = Patch(
        name=path.name,
        path=path,
        sha256=hashlib.sha256(raw).hexdigest(),
        subject=subject,
        body=message.body,
        upstream=message.trailer("Upstream"),
        drop_when=message.trailer("Drop-when"),
        witness=message.trailer("Witness"),
        files=diff.parse(lines[start:], first_line=start + 1),
        message=f"{subject}\n\n{text}\n" if text else f"{subject}\n",
        author=author,
    )
    line = next(n for n, text in enumerate(lines, start=1) if text.startswith("Subject:"))
    return patch, message, line


def split(subject: str, lines: Sequence[str], *, first_line: int) -> Message:
    """Take a message apart. ``lines`` is all of it after the subject; the first is numbered."""
    text = "\n".join(lines)
    first_line += len(text) - len(text.lstrip("\n"))
    paragraphs = text.strip("\n").split("\n\n")
    last = paragraphs[-1].split("\n")
    trailers = _trailers(last, first_line + text.strip("\n").count("\n") + 1 - len(last))
    return Message(
        subject=subject,
        body="\n\n".join(paragraphs[:-1] if trailers else paragraphs).rstrip(),
        trailers=tuple(trailers),
        first_body_line=first_line,
    )


def _trailers(lines: Sequence[str], first_line: int) -> list[tuple[str, str, int]]:
    """Return the trailers that a paragraph consists of; none where it is no paragraph of them."""
    trailers: list[tuple[str, str, int]] = []
    for number, line in enumerate(lines, start=first_line):
        if match := _TRAILER.match(line):
            trailers.append((match[1], match[2].strip(), number))
        elif trailers and line[:1].isspace():
            key, value, first = trailers[-1]
            trailers[-1] = (key, f"{value} {line.strip()}", first)
        else:
            return []
    return trailers


def lint(message: Message, *, subject_line: int, root: Path | None) -> list[tuple[int, str]]:
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


def _author(sender: str, date: str) -> Signature | None:
    name, address = email.utils.parseaddr(sender)
    try:
        when = email.utils.parsedate_to_datetime(date)
    except (ValueError, TypeError, email.errors.MessageError):
        return None
    if not name or not address:
        return None
    # git's raw form keeps the zone: `format-patch` prints the date in it.
    zone = when.strftime("%z") or "+0000"
    return Signature(name=name, email=address, date=f"{int(when.timestamp())} {zone}")
