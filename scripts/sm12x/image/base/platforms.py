"""The platform that an image is built for, and what building it needs on this machine.

The wheel of another machine is compiled here by a cross compiler, at full speed and by the steps
that CI tries; only installing packages into the image runs that machine's programs, through an
emulator that is registered with the kernel.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadArchitectureError, UsageError
from sm12x.stack.model.base import Base
from sm12x.wheel.toolchain import cross

_BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Packages of the other machine in the builder, a second base image.
CROSS_GIB = 2.0


# Platform -> its machine, and Debian's name of that.
_PLATFORMS = {"linux/amd64": ("x86_64", "amd64"), "linux/arm64": ("aarch64", "arm64")}


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
        return _PLATFORMS[self.platform][1] if self.crossing else ""

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
    base: Base, option: str | None, *, image: bool = True, binfmt: Path = _BINFMT
) -> Platforms:
    """Return the target of a build for the platform ``option``; None is this machine's.

    Args:
        image: whether an image will be made, and not only the wheel.

    Raises:
        UsageError: there is no such platform.
        BadArchitectureError: the base has no wheel for it, nothing here compiles for it, or this
            kernel cannot run its programs.
    """
    here = platform.machine()
    if option is not None and option not in _PLATFORMS:
        raise UsageError(
            f"there is no platform {option!r} of an SM12x GPU",
            next_step=f"use {' or '.join(_PLATFORMS)}",
        )
    machine = _PLATFORMS[option][0] if option else here
    if machine not in base.wheels:
        names = [name for name, (other, _) in _PLATFORMS.items() if other in base.wheels]
        raise BadArchitectureError(
            f"base {base.version} has no wheel for {machine}",
            next_step=f"choose one of {', '.join(names)} with --platform",
        )
    if option is None or not cross.needed(machine, here=here):
        return Platforms(machine=machine, here=here)
    # The name that Debian's packages, and every other that is known of, register it by. Flag F
    # opens the emulator at registration: a container does not have it.
    handler = files.kernel_text(binfmt / f"qemu-{machine}")
    if image and not re.fullmatch(r"(?s)enabled\n.*^flags:.*F.*", handler, re.MULTILINE):
        raise BadArchitectureError(
            f"building an image for {option} runs {machine} programs, and this kernel has no "
            f"emulator with flag F for them in {binfmt}",
            next_step="install one, such as with `apt-get install qemu-user-static binfmt-support` "
            f"on Debian and Ubuntu (and `mount -t binfmt_misc binfmt_misc {binfmt}`, where that is "
            f"not mounted), or build on a machine that is {machine}; the wheel alone needs no "
            "emulator: --no-image",
        )
    return Platforms(machine=machine, here=here, platform=option)
