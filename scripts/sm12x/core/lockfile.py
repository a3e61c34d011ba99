"""Lock files: pinned requirements with hashes, as `uv pip compile` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm12x.core.errors import BadFileError

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[^]]*\])?==(?P<version>[^\s;\\]+)")
# The lines of a requirement after its first: hashes, and what asked for it.
_MORE = re.compile(r"\s+(--hash=|#)")
_HASH = re.compile(r"--hash=(\w+:[0-9a-f]+)")
_VIA = re.compile(r"^\s+# +via\b")
_NEXT = (
    "restore it with git, or write it anew with `make lock BASE=VERSION` (that of test tools: "
    "`make lock-dev`)"
)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One requirement. ``name`` is normalised; ``via`` names what asked for it, normalised."""

    name: str
    version: str
    hashes: tuple[str, ...]
    via: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Lockfile:
    """``head`` is what stands before the first requirement: comments and options."""

    head: str
    pins: tuple[Pin, ...]

    @property
    def versions(self) -> dict[str, str]:
        return {pin.name: pin.version for pin in self.pins}

    @property
    def options(self) -> tuple[str, ...]:
        """Return the option lines, such as ``--only-binary :all:``, in order."""
        return tuple(line.strip() for line in self.head.splitlines() if line.startswith("--"))


def read(path: Path) -> Lockfile:
    """Parse a lock file. Raises BadFileError, with the line, for anything but pins and comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step=_NEXT) from None
    return parse(text, where=str(path))


def parse(text: str, *, where: str = "lock file") -> Lockfile:
    """Parse the text of a lock file; ``where`` is what errors call it."""
    head: list[str] = []
    blocks: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if _PIN.match(line):
            blocks.append([line])
        elif blocks and _MORE.match(line):
            blocks[-1].append(line)
        elif not blocks and line.startswith("--"):
            head.append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            raise BadFileError(
                f"{where}:{number}: {line.strip()!r} is not a pinned requirement", next_step=_NEXT
            )
        elif not blocks:
            head.append(line)
    return Lockfile(
        head="".join(f"{line}\n" for line in head), pins=tuple(_pin(lines) for lines in blocks)
    )


def restrict(text: str, names: Iterable[str], *, where: str = "lock file") -> str:
    """Return the lock of ``names`` and of their direct and indirect requirements.

    The requirements of a package are read from the ``# via`` comments. These do not tell extras
    apart, so a package's optional requirements are included where the whole lock has them.

    Raises BadFileError if a name is not in the lock.
    """
    lock = parse(text, where=where)
    roots: set[str] = {canonicalize_name(re.sub(r"\[.*", "", name)) for name in names}
    absent = sorted(roots - set(lock.versions))
    if absent:
        raise BadFileError(
            f"{where} does not have {', '.join(absent)}", next_step="name what is in the lock"
        )
    needs: dict[str, set[str]] = {}
    for pin in lock.pins:
        for parent in pin.via:
            needs.setdefault(parent, set()).add(pin.name)
    closure, fresh = set(roots), set(roots)
    while fresh:
        fresh = {need for name in fresh for need in needs.get(name, ())} - closure
        closure |= fresh
    heading = f"# Cut down to what these need: {', '.join(sorted(roots))}.\n"
    return heading + lock.head + "".join(pin.text for pin in lock.pins if pin.name in closure)


def brought_by(requirement: Requirement, extra: str) -> bool:
    """Tell whether a package has the requirement only when that extra is asked for."""
    marker = requirement.marker
    if marker is None:
        return False
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _pin(lines: list[str]) -> Pin:
    match = _PIN.match(lines[0])
    assert match is not None  # noqa: S101 - a block starts with such a line
    parents: list[str] = []
    inside = False
    for line in lines:
        if _VIA.match(line):
            inside = True
            line = _VIA.sub("", line)
        elif inside:
            line = line.strip().removeprefix("#")
        word = line.strip()
        # `-r file` and `-c file` name requirement files, not packages.
        if inside and word and not word.startswith("-"):
            parents.append(canonicalize_name(re.sub(r"\[.*", "", word)))
    return Pin(
        name=canonicalize_name(match["name"]),
        version=match["version"],
        hashes=tuple(digest for line in lines for digest in _HASH.findall(line)),
        via=tuple(parents),
        text="".join(f"{line}\n" for line in lines),
    )
