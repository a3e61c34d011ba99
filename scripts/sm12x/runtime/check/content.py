"""Are vLLM's files those of the ledger, and its own and its extras' those of their RECORD?"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from stat import S_ISGID, S_ISREG, S_ISUID

from packaging.utils import canonicalize_name

from sm12x.core.text import first_of
from sm12x.runtime import sleep_backend
from sm12x.runtime.check.report import FAIL, Line, Topic
from sm12x.wheel.ledger import Ledger

_TOPIC = Topic("files", "pull or rebuild the image; nothing should write to its packages")
_MODES = Topic("modes", "rebuild the image, or run `chmod a-s` on them in an image built on it")
# The origin of a file of the release that the stack removes.
_REMOVED = "removed"
# What packages share: `..` leads to scripts and headers, __pycache__ has modules without a folder.
_SHARED = ("..", "__pycache__")
# What an import writes beside the sources; RECORD may list it, but never with a hash.
_COMPILED = (".pyc", ".pyo")


def check(ledger: Ledger, site: Path) -> list[Line]:
    """Hash the files of the ledger and of RECORD. Reads about 0.6 GB for a whole release."""
    seen = _Digests(site)
    lines = []
    entries = {entry.path: (entry.sha256, entry.origin) for entry in ledger.libraries}
    entries |= {entry.path: (entry.sha256, entry.origin) for entry in ledger.files}
    for path, (digest, origin) in entries.items():
        actual = seen.of(path)
        if origin == _REMOVED:
            if actual is not None:
                lines.append(_TOPIC.failed(f"{path} is there, the stack removes it"))
        elif actual is None:
            lines.append(_TOPIC.failed(f"{path} ({origin}) is missing"))
        elif actual.hex() != digest:
            lines.append(
                _TOPIC.failed(
                    f"{path} ({origin}) has sha256 {actual.hex()[:12]}, ledger {digest[:12]}"
                )
            )
    if not lines:
        lines.append(
            _TOPIC.passed(
                f"{len(ledger.files)} files that are not the official wheel's and "
                f"{len(ledger.libraries)} libraries have the ledger's sha256"
            )
        )
    lines += _record("vllm", site, seen, listed=_listed(ledger))
    for package in (*(extra.package for extra in ledger.extras), sleep_backend.PACKAGE):
        lines += _record(package, site, seen)
    return lines


def check_modes(top: Path) -> list[Line]:
    """Check that no file below ``top``, on the same file system, has a setuid or setgid bit.

    A folder that this user cannot list is skipped: this user cannot run its files either.
    """
    device = top.lstat().st_dev
    paths = []
    for folder, names, files in os.walk(top):
        names[:] = [one for one in names if os.lstat(f"{folder}/{one}").st_dev == device]
        for one in files:
            # A file may be gone by now.
            with suppress(OSError):
                mode = os.lstat(f"{folder}/{one}").st_mode
                if S_ISREG(mode) and mode & (S_ISUID | S_ISGID):
                    paths.append(f"{folder}/{one}")
    if paths:
        message = f"files that run as another user: {first_of(sorted(paths), 5)}"
        return [_MODES.failed(message)]
    return [_MODES.passed("no file has a setuid or setgid bit")]


def _record(
    package: str, site: Path, seen: _Digests, *, listed: Collection[str] = ()
) -> list[Line]:
    """Compare a package with its RECORD, which has to name all of ``listed``."""
    folders = [
        folder
        for folder in sorted(site.glob("*.dist-info"))
        if canonicalize_name(folder.name.partition("-")[0]) == package
    ]
    if len(folders) != 1:
        seen_names = ", ".join(folder.name for folder in folders) or "none"
        return [_TOPIC.failed(f"one {package}-*.dist-info is expected, found {seen_names}")]
    try:
        text = (folders[0] / "RECORD").read_text(encoding="utf-8")
        entries = [(path, digest, size) for path, digest, size in csv.reader(text.splitlines())]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return [_TOPIC.failed(f"{folders[0].name}/RECORD cannot be read: {error}")]
    lines = []
    names = {path for path, _, _ in entries}
    for path, digest, size in entries:
        problem = _entry(path, digest, size, site, seen)
        if problem:
            lines.append(_TOPIC.failed(f"RECORD: {path} {problem}"))
    for file in (
        inside for top in _tops(package, names) for inside in sorted(site.glob(f"{top}/**/*"))
    ):
        name = file.relative_to(site).as_posix()
        if file.is_file() and name not in names and file.suffix not in _COMPILED:
            lines.append(_TOPIC.failed(f"{name} is on disk and not in RECORD"))
    for name in sorted(set(listed) - names):
        lines.append(_TOPIC.failed(f"{name} is in the ledger and not in RECORD"))
    if any(line.state == FAIL for line in lines):
        return lines
    return [
        _TOPIC.passed(
            f"RECORD of {package} agrees with {len(entries)} files, and there are no others"
        )
    ]


def _tops(package: str, names: Iterable[str]) -> list[str]:
    """The folders of the site that are the package's: by its name, and by what RECORD names."""
    tops = {package.replace("-", "_")}
    tops |= {PurePosixPath(name).parts[0] for name in names if "/" in name}
    return sorted(top for top in tops if top not in _SHARED and not top.endswith(".dist-info"))


def _listed(ledger: Ledger) -> set[str]:
    kept = {file.path for file in ledger.files if file.origin != _REMOVED}
    return kept | {library.path for library in ledger.libraries}


def _entry(path: str, listed: str, size: str, site: Path, seen: _Digests) -> str:
    """What is wrong with a line of RECORD, or "".

    ``listed`` is its hash in urlsafe base64 without padding, "" when it has none.
    """
    if path.endswith(_COMPILED):
        return ""
    digest = seen.of(path)
    if digest is None:
        return "is missing"
    if not listed:
        # RECORD cannot hold its own hash; installers write REQUESTED and INSTALLER with theirs.
        return "" if PurePosixPath(path).name == "RECORD" else "has no hash in RECORD"
    kind, _, value = listed.partition("=")
    if kind != "sha256" or value != base64.urlsafe_b64encode(digest).rstrip(b"=").decode():
        return "is not the file that was installed"
    if size and int(size) != (site / path).stat().st_size:
        return "has another size than RECORD says"
    return ""


class _Digests:
    """The sha256 of files, each read once: the libraries are in the ledger and in RECORD."""

    def __init__(self, site: Path) -> None:
        self._site = site
        self._known: dict[str, bytes | None] = {}

    def of(self, path: str) -> bytes | None:
        if path not in self._known:
            try:
                with (self._site / path).open("rb") as handle:
                    self._known[path] = hashlib.file_digest(handle, "sha256").digest()
            except OSError:
                self._known[path] = None
        return self._known[path]
