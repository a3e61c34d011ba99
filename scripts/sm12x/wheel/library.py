"""The dynamic section of a shared library: the libraries it needs, and their search path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from sm12x.core.errors import BadFileError


@dataclass(frozen=True, kw_only=True)
class Library:
    """``glibc`` is the newest version of it that a symbol asks for, such as "2.34", or "".

    ``machine`` is what `platform.machine()` says where it runs, such as "x86_64".
    """

    machine: str
    needed: tuple[str, ...]
    runpath: str
    glibc: str


def read(path: Path) -> Library:
    """Read the dynamic section of ``path``. Raises BadFileError when it is not a shared library."""
    needed: list[str] = []
    runpath: list[str] = []
    into = {"DT_NEEDED": needed, "DT_RUNPATH": runpath, "DT_RPATH": runpath}
    versions: list[tuple[int, ...]] = []
    try:
        with path.open("rb") as handle:
            elf = ELFFile(handle)
            machine = elf["e_machine"].removeprefix("EM_").lower()
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    for tag in section.iter_tags():
                        kind = tag.entry.d_tag
                        if kind in into:
                            # pyelftools names the attribute after the tag: DT_NEEDED, needed.
                            into[kind].append(str(getattr(tag, kind.removeprefix("DT_").lower())))
                elif isinstance(section, GNUVerNeedSection):
                    for _, symbols in section.iter_versions():
                        versions += [found for symbol in symbols if (found := _glibc(symbol.name))]
    except (OSError, ELFError) as error:
        raise BadFileError(
            f"{path} is not a shared library that can be read: {error}",
            next_step="build it again",
        ) from None
    newest = max(versions, default=())
    return Library(
        machine=machine,
        needed=tuple(needed),
        runpath=":".join(runpath),
        glibc=".".join(str(part) for part in newest),
    )


def _glibc(name: str) -> tuple[int, ...]:
    head, _, version = name.partition("_")
    parts = version.split(".")
    # GLIBC_PRIVATE and GLIBC_ABI_DT_RELR are no versions.
    if head != "GLIBC" or not all(part.isdigit() for part in parts):
        return ()
    return tuple(int(part) for part in parts)
