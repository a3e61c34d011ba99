"""A patch file (`git format-patch`): reading one, and the required parts of its message.

A message gives the reason for the patch in its body, and four trailers that a check can read:

    Upstream: owner/repository#123 (closed, never merged)
    Drop-when: what has to happen for this patch to go
    Witness: tests/witness/test_it.py

`Upstream: none (why)` stands for a defect without a report.
"""

from __future__ import annotations

import email.errors
import email.parser
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
from sm12x.stack.model.diff import PatchedFile

_SUBJECT_WIDTH = 72
_BODY_WIDTH = 100
# Fewer words cannot state both the defect and why the patch fixes it.
_BODY_WORDS = 20
_TRAILERS = ("Upstream", "Drop-when", "Witness")
# May be given more than once: several threads, several tests.
_REPEATABLE = ("Upstream", "Witness")
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
class Trailer:
    key: str
    value: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """A commit message taken apart; ``body`` is the text between subject and trailers."""

    subject: str
    body: str
    trailers: tuple[Trailer, ...]
    first_body_line: int

    def trailer(self, key: str) -> str:
        """All values of ``key``, "" where there is none."""
        return "; ".join(trailer.value for trailer in self.trailers if trailer.key == key)


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

    def fault(line: int, message: str) -> tuple[None, list[MessageFault]]:
        return None, [MessageFault(path=path, line=line, message=message)]

    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        return fault(1, "is not a regular file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        return fault(1, f"cannot be read: {error.strerror or error}")
    head = raw.split(b"\n\n", 1)[0]
    if b"\r" in head.split(b"\ndiff --git ", 1)[0]:
        return fault(
            1,
            "has CRLF line endings: a mail program or git's autocrlf mangled it; get the file "
            "again without conversion",
        )
    # The text being patched may be in any encoding; the message may not.
    lines = raw.decode("utf-8", errors="surrogateescape").split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    blank = next((n for n, line in enumerate(lines) if line == ""), len(lines))
    start = next((n for n, line in enumerate(lines) if line.startswith("diff --git ")), None)
    if not lines or not lines[0].startswith("From "):
        return fault(1, "is not a patch in mail form: its first line is not `From <commit> ...`")
    if start is None or start < blank:
        return fault(len(lines), "is a mail without a diff")
    try:
        "\n".join(lines[:start]).encode()
    except UnicodeEncodeError:
        return fault(1, "the message is not UTF-8")
    headers = email.parser.HeaderParser(policy=email.policy.default).parsestr(
        "\n".join(lines[1:blank]) + "\n"
    )
    subject_line = 1 + next(
        (n for n, line in enumerate(lines[:blank]) if line.startswith("Subject:")), 0
    )
    subject = _PREFIX.sub("", str(headers["Subject"] or "")).strip()
    if not subject:
        return fault(subject_line, "has no subject")
    author = _author(str(headers["From"] or ""), str(headers["Date"] or ""))
    if author is None:
        return fault(1, "`From:` or `Date:` is missing or not readable")
    # What follows `---` is for readers of the mail and no part of the message.
    end = next((n for n in range(blank, start) if lines[n] == "---"), start)
    message = split(subject, lines[blank:end], first_line=blank + 1)
    try:
        files = diff.parse(lines[start:], first_line=start + 1)
    except diff.DiffError as error:
        return fault(error.line, str(error))
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
        files=files,
        message=f"{subject}\n\n{text}\n" if text else f"{subject}\n",
        author=author,
    )
    return patch, [
        MessageFault(path=path, line=line, message=text)
        for line, text in lint(message, subject_line=subject_line, root=root)
    ]


def split(subject: str, lines: Sequence[str], *, first_line: int) -> Message:
    """Take a message apart. ``lines`` is all of it after the subject; the first is numbered."""
    body = list(lines)
    while body and not body[-1].strip():
        body.pop()
    begin = len(body)
    while begin and body[begin - 1].strip():
        begin -= 1
    block = body[begin:]
    trailers: list[Trailer] = []
    if block and _TRAILER.match(block[0]):
        for offset, line in enumerate(block):
            match = _TRAILER.match(line)
            if match:
                trailers.append(
                    Trailer(key=match[1], value=match[2].strip(), line=first_line + begin + offset)
                )
            elif line[:1].isspace():
                last = trailers[-1]
                trailers[-1] = Trailer(
                    key=last.key, value=f"{last.value} {line.strip()}", line=last.line
                )
            else:
                # A paragraph whose first line only looks like a trailer.
                trailers = []
                break
    if trailers:
        body = body[:begin]
    leading = 0
    while leading < len(body) and not body[leading].strip():
        leading += 1
    return Message(
        subject=subject,
        body="\n".join(body[leading:]).rstrip(),
        trailers=tuple(trailers),
        first_body_line=first_line + leading,
    )


def lint(message: Message, *, subject_line: int, root: Path | None) -> list[tuple[int, str]]:
    """Return the faults of a message, as (line, text)."""
    faults: list[tuple[int, str]] = []
    if len(message.subject) > _SUBJECT_WIDTH:
        faults.append((subject_line, f"the subject is longer than {_SUBJECT_WIDTH} characters"))
    if message.subject.endswith("."):
        faults.append((subject_line, "the subject ends with a period"))
    if not _slug(message.subject):
        faults.append((subject_line, "the subject has no letter that a file name could have"))
    if len(message.body.split()) < _BODY_WORDS:
        faults.append(
            (
                message.first_body_line,
                "the body does not say what was wrong and why this fixes it "
                f"(fewer than {_BODY_WORDS} words)",
            )
        )
    faults += [
        (message.first_body_line + n, f"is longer than {_BODY_WIDTH} characters")
        for n, line in enumerate(message.body.split("\n"))
        if len(line) > _BODY_WIDTH
    ]
    last = message.trailers[-1].line if message.trailers else message.first_body_line
    for key in _TRAILERS:
        trailers = [trailer for trailer in message.trailers if trailer.key == key]
        if not trailers:
            faults.append((last, f"the trailer `{key}:` is missing from the last paragraph"))
        if len(trailers) > 1 and key not in _REPEATABLE:
            faults.append((trailers[1].line, f"the trailer `{key}:` is given twice"))
        for trailer in trailers:
            complaint = _lint_trailer(trailer, root)
            if complaint:
                faults.append((trailer.line, complaint))
    return sorted(faults)


def _lint_trailer(trailer: Trailer, root: Path | None) -> str | None:
    value = trailer.value
    if not value:
        return f"`{trailer.key}:` is empty"
    if trailer.key == "Upstream":
        if not _NONE.match(value) and not (_THREAD.search(value) and _STATE.search(value)):
            return (
                "`Upstream:` must name a thread and its state (open, closed, merged or draft), as "
                "in `owner/repository#123 (closed, never merged)`, or be `none (why)`"
            )
    elif trailer.key == "Drop-when" and len(value.split()) < 3:
        return "`Drop-when:` does not say what has to happen for the patch to go"
    elif trailer.key == "Witness" and root is not None:
        path = value.split("::", 1)[0]
        if not (root / path).is_file():
            return f"`Witness:` names {path}, and there is no such file"
        if not (root / path).resolve().is_relative_to(root.resolve()):
            return f"`Witness:` names {path}, which is outside the checkout"
    return None


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
