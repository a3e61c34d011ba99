"""The platform that an image is built for, and what building it needs on this machine.

The wheel of another machine is compiled here by a cross compiler, at full speed and by the steps
that CI tries; only installing packages into the image runs that machine's programs, through an
emulator that is registered with the kernel.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadArchitectureError, UsageError
from sm12x.stack.model.base import Base
from sm12x.wheel.toolchain import cross

_BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Packages of the other machine in the builder, a second base image.
CROSS_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A platform: its machine, Debian's name of that, and ELF's number of it."""

    machine: str
    debian: str
    elf: int


_PLATFORMS = {
    "linux/amd64": _Kind(machine="x86_64", debian="amd64", elf=62),
    "linux/arm64": _Kind(machine="aarch64", debian="arm64", elf=183),
}


@dataclass(frozen=True, kw_only=True)
class Platforms:
    """``machine`` is the image's, ``here`` this one, on which the builder runs.

    ``platform`` is the image's where that is another than this machine's, such as "linux/arm64".
    """

    machine: str
    here: str
    platform: str = ""

    @property
    def native(self) -> Platforms:
        """That of the builder."""
        return Platforms(machine=self.here, here=self.here)

    @property
    def crossing(self) -> bool:
        return bool(self.platform)

    @property
    def debian(self) -> str:
        """Debian's name of the image's machine, "" for this one's."""
        return _PLATFORMS[self.platform].debian if self.crossing else ""

    def install_args(self) -> dict[str, str]:
        """More build arguments of Dockerfile.bundle: emulation then takes minutes, not an hour.

        A static uv of this machine runs beside the other's programs: it unpacks the packages.
        The image compiles its bytecode at start.
        """
        if not self.crossing:
            return {}
        return {"UV_PLATFORM": f"musllinux_1_1_{self.here}", "BYTECODE": ""}

    @property
    def suffix(self) -> str:
        """A suffix of names that keeps builds for another machine apart from those for this one."""
        return f"-{self.debian}" if self.crossing else ""


def choose(
    base: Base, asked: str | None, *, image: bool = True, binfmt: Path = _BINFMT
) -> Platforms:
    """The target of a build for the platform ``asked``; None is this machine's.

    Args:
        image: whether an image will be made, and not only the wheel.

    Raises:
        UsageError: there is no such platform.
        BadArchitectureError: the base has no wheel for it, nothing here compiles for it, or this
            kernel cannot run its programs.
    """
    here = platform.machine()
    if asked is None:
        machine = here
    elif asked in _PLATFORMS:
        machine = _PLATFORMS[asked].machine
    else:
        raise UsageError(
            f"there is no platform {asked!r} of an SM12x GPU",
            next_step=f"use {' or '.join(_PLATFORMS)}",
        )
    if machine not in base.wheels:
        known = [name for name, kind in _PLATFORMS.items() if kind.machine in base.wheels]
        raise BadArchitectureError(
            f"base {base.version} has no wheel for {machine}",
            next_step=f"choose one of {', '.join(known)} with --platform",
        )
    if asked is None or not cross.needed(machine, here=here):
        return Platforms(machine=machine, here=here)
    if image:
        _require_emulator(asked, binfmt)
    return Platforms(machine=machine, here=here, platform=asked)


def _require_emulator(name: str, binfmt: Path) -> None:
    kind = _PLATFORMS[name]
    install = (
        "install one, such as with `apt-get install qemu-user-static binfmt-support` on Debian and "
        f"Ubuntu, or build on a machine that is {kind.machine}; the wheel alone needs no emulator: "
        "--no-image"
    )
    what = f"building an image for {name} runs {kind.machine} programs, and this kernel"
    if not (binfmt / "register").exists():
        raise BadArchitectureError(
            f"{what} has no emulators set up ({binfmt} is not mounted)",
            next_step=f"run `mount -t binfmt_misc binfmt_misc {binfmt}` as root, then {install}",
        )
    handlers = [path for path in sorted(binfmt.iterdir()) if path.name not in _NOT_HANDLERS]
    texts = [text for path in handlers if _runs(text := files.kernel_text(path), kind.elf)]
    if not texts:
        raise BadArchitectureError(f"{what} has no emulator for these", next_step=install)
    if not any("F" in flags for text in texts for flags in _values(text, "flags:")):
        (interpreter, *_) = [*_values(texts[0], "interpreter"), "an emulator"]
        raise BadArchitectureError(
            f"{what} starts {interpreter} for these, which a container does not have: the handler "
            "lacks flag F, which opens the emulator at registration",
            next_step=install,
        )


_NOT_HANDLERS = ("register", "status")


def _runs(text: str, machine: int) -> bool:
    """Whether a handler, as the kernel prints it, is for programs of an ELF machine."""
    try:
        magic = bytes.fromhex("".join(_values(text, "magic")))
        mask = bytes.fromhex("".join(_values(text, "mask"))) or b"\xff" * len(magic)
        (offset,) = (int(value) for value in _values(text, "offset"))
    except ValueError:
        return False
    if not magic or not text.startswith("enabled"):
        return False
    # 64 bits, little-endian, version 1; 16 bytes in, an executable (2) of that machine.
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes([2, 0, machine, 0])
    part = head[offset : offset + len(magic)]
    return len(part) == len(magic) and all(
        byte & care == want & care for byte, care, want in zip(part, mask, magic, strict=True)
    )


def _values(text: str, key: str) -> Iterable[str]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            yield value
