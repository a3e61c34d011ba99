"""A patch file (`git format-patch`): reading one, with the trailers of its message.

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

from sm12x.core.git import Signature
from sm12x.stack.model import diff
from sm12x.stack.model.diff import DiffError, PatchedFile

_TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Za-z]+)*): +(.*)$")
_PREFIX = re.compile(r"^\[PATCH[^\]]*\] *")


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


def read(path: Path) -> tuple[Patch, Message, int]:
    """Return a patch, its message, and the line of the subject.

    Raises:
        DiffError: unreadable, not a mail, or its diff is malformed.
    """
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
