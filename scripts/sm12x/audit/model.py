"""The findings of an audit, and the verdict for a device. Nothing here reads a file."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainValidator

from sm12x.audit.fatbin import FatContainer
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import BadArchitectureError

NATIVE, MIXED, PTX, NONE, HOST, UNKNOWN = "native", "mixed", "ptx", "none", "host", "unknown"
LTO = "lto"
# What one translation unit can be; a library can also be mixed or host.
UNIT_VERDICTS = (NATIVE, PTX, LTO, NONE, UNKNOWN)


@dataclass(frozen=True, order=True)
class Device:
    """A compute capability, such as 12.0 (RTX PRO 6000, RTX 50) or 12.1 (GB10)."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read "12.0". Raises BadArchitectureError for anything else, "12.0a" included."""
        try:
            arch = CudaArch.parse(text)
        except ValueError:
            raise BadArchitectureError(
                f"{text!r} is not a compute capability", next_step="write it as 12.0 or 12.1"
            ) from None
        if arch.suffix or arch.ptx:
            raise BadArchitectureError(
                f"{text!r} is what code is compiled for; an audit asks how it runs on a device",
                next_step=f"write {arch.major}.{arch.minor}",
            )
        return cls(arch.major, arch.minor)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def _device(text: str) -> Device:
    try:
        return Device.parse(text)
    except BadArchitectureError as error:
        raise ValueError(error.message) from None


# Of a declared file, where it is written "12.0".
DeclaredDevice = Annotated[Device, PlainValidator(_device, json_schema_input_type=str)]
SM120, SM121 = Device(12, 0), Device(12, 1)
DEVICES = (SM120, SM121)


def compiles_on(ptx: CudaArch, device: Device) -> bool:
    """Whether the driver can compile this PTX for the device.

    Generic PTX runs on its capability and every later one, `a` on that one alone, `f` on later
    minors of its major (PTX ISA, `.target`).
    """
    if ptx.suffix == "a":
        return (ptx.major, ptx.minor) == (device.major, device.minor)
    if ptx.suffix == "f":
        return ptx.major == device.major and ptx.minor <= device.minor
    return (ptx.major, ptx.minor) <= (device.major, device.minor)


def _unit_verdict(unit: FatContainer, device: Device) -> str:
    """How one translation unit runs: the driver takes a fitting cubin first, then fitting PTX.

    "lto" is a unit with nothing but LTO-IR that fits: the driver does not load that, but a library
    can link it for the device at run time (nvJitLink). "host" is a hollow unit: there is nothing in
    it to call.
    """
    if unit.hollow:
        return HOST
    entries = unit.entries
    if any(
        entry.kind == "cubin" and entry.arch.runs_on(device.major, device.minor)
        for entry in entries
    ):
        return NATIVE
    if any(entry.kind == "ptx" and compiles_on(entry.arch, device) for entry in entries):
        return PTX
    if any(entry.kind in ("unknown", "other") for entry in entries):
        return UNKNOWN
    if any(entry.kind == "lto" and compiles_on(entry.arch, device) for entry in entries):
        return LTO
    return NONE


@dataclass(frozen=True, kw_only=True)
class LibraryAudit:
    """One file of code: a library, a program, an object file or archive, a cubin, PTX.

    Args:
        path: relative to the wheel, folder or image; as given for a single file.
        sha256: in hex. ``size`` is in bytes.
        machine: of the host code: "x86_64", "aarch64", "cuda" where there is none, or "" when it
            could not be read.
        units: what a process loads: one fat binary for each translation unit.
        relocatable: translation units that are only input for the device linker (``-rdc=true``).
            The linked result is among ``units``; these count on their own only where there is none.
        embedded: fat binaries and cubins in other places, which no runtime registers: the library
            picks among them and loads them itself. Each counts as a unit.
        unloadable: why the file cannot be loaded at all, "" where nothing says so.
        faults: what could not be read, in words. With any, every verdict is "unknown".
    """

    path: str
    sha256: str
    size: int
    machine: str
    units: tuple[FatContainer, ...] = ()
    relocatable: tuple[FatContainer, ...] = ()
    embedded: tuple[FatContainer, ...] = ()
    unloadable: str = ""
    faults: tuple[str, ...] = ()

    @functools.cached_property
    def loaded(self) -> tuple[FatContainer, ...]:
        linked = self.units and not all(unit.hollow for unit in self.units)
        return self.units + (() if linked else self.relocatable) + self.embedded

    @property
    def has_code(self) -> bool:
        """Whether there is device code that can be called."""
        return not all(unit.hollow for unit in self.loaded)

    @functools.cached_property
    def cubins(self) -> Mapping[str, int]:
        """Cubins by target, oldest first: {"9.0a": 10, "12.0": 32, "12.0f": 8}."""
        return self._count("cubin")

    @functools.cached_property
    def ptx(self) -> Mapping[str, int]:
        """PTX by virtual architecture: {"8.0": 19, "9.0a": 1}."""
        return self._count("ptx")

    @functools.cached_property
    def lto(self) -> Mapping[str, int]:
        """LTO-IR by virtual architecture."""
        return self._count("lto")

    @functools.cached_property
    def unknown(self) -> tuple[str, ...]:
        """All that could not be read: faults of the file, then damaged entries.

        An entry of an unknown kind counts only where its unit has no other entry: beside cubins and
        PTX it changes no verdict, or only that unit's.
        """
        odd = Counter(
            f"{entry.note} ({entry.arch.sm})"
            for unit in self.loaded
            for entry in unit.entries
            if entry.kind == "unknown"
            or (entry.kind == "other" and all(each.kind == "other" for each in unit.entries))
        )
        return (*self.faults, *(f"{number} x {note}" for note, number in sorted(odd.items())))

    def units_on(self, device: Device) -> Mapping[str, int]:
        """How many translation units are native, ptx, none and unknown on ``device``.

        And "lto", where there are any. Of a file that cannot be loaded none runs.
        """
        return self._verdicts(self.loaded, device)

    def embedded_on(self, device: Device) -> Mapping[str, int]:
        """As ``units_on``, but only of the pieces that the library loads itself."""
        return self._verdicts(self.embedded, device)

    def _verdicts(self, units: tuple[FatContainer, ...], device: Device) -> Mapping[str, int]:
        if self.unloadable:
            counts = Counter({NONE: sum(not unit.hollow for unit in units)})
        else:
            counts = Counter(_unit_verdict(unit, device) for unit in units)
        return {word: counts[word] for word in UNIT_VERDICTS if word != LTO or counts[word]}

    def verdict(self, device: Device) -> str:
        """Return the verdict on the library as a whole.

        "unknown" if anything in it could not be read, "host" if it has no device code, else
        "native", "ptx", "lto" or "none" if that holds for every translation unit, else "mixed".
        """
        if self.unknown:
            return UNKNOWN
        verdicts = [verdict for verdict, number in self.units_on(device).items() if number]
        if not verdicts:
            return NONE if self.unloadable else HOST
        return verdicts[0] if len(verdicts) == 1 else MIXED

    @property
    def sm120(self) -> str:
        return self.verdict(SM120)

    @property
    def sm121(self) -> str:
        return self.verdict(SM121)

    def _count(self, kind: str) -> Mapping[str, int]:
        counts = Counter(
            entry.arch for unit in self.loaded for entry in unit.entries if entry.kind == kind
        )
        return {str(arch): counts[arch] for arch in sorted(counts)}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``subject`` is what was asked about; ``kind`` "file", "directory", "wheel" or "image"."""

    subject: str
    kind: str
    libraries: tuple[LibraryAudit, ...]

    def __getitem__(self, path: str) -> LibraryAudit:
        """The library at ``path``. Raises KeyError."""
        for library in self.libraries:
            if library.path == path:
                return library
        raise KeyError(path)
