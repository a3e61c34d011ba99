"""Checks a `TORCH_CUDA_ARCH_LIST` for SM12x, and suggests the probable one where it is wrong.

nvcc and the release's CMake accept, without a warning, many strings for which the image does not
run, or runs slowly, on a 12.0 or 12.1 device. This module refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import BadArchitectureError

# The compute capabilities of SM12x there are: RTX PRO 6000 and RTX 50, and GB10.
_DEVICES = ((12, 0), (12, 1))

_OTHER_SPELLING = re.compile(
    r"(?:sm|compute)?_?(?P<major>\d{1,2})\.?(?P<minor>\d)(?P<suffix>[af]?)"
)


def validate(text: str, *, default: str) -> tuple[CudaArch, ...]:
    """Parse an architecture list and refuse what SM12x cannot use.

    Args:
        text: as TORCH_CUDA_ARCH_LIST has it, such as "12.0a;12.1a".
        default: the base's own list, for the message.

    Raises:
        BadArchitectureError: with what was probably meant.
    """
    words = [word for word in re.split(r"[;,\s]+", text.strip()) if word]
    if not words:
        raise BadArchitectureError(
            "the architecture list is empty", next_step=f"leave it out to get {default}"
        )
    archs = tuple(dict.fromkeys(_one(word) for word in words))
    if not any(arch.runs_on(*device) for arch in archs for device in _DEVICES):
        raise BadArchitectureError(
            f"no target of {';'.join(words)} runs on SM12x (compute capability 12.0 or 12.1)",
            next_step=f"add 12.0a or 12.1a, or leave the list out to get {default}",
        )
    return archs


def require_complete(archs: Iterable[CudaArch]) -> None:
    """Raise BadArchitectureError for a list that a full build of a release's modules cannot use.

    Plain 12.0 is enough for the modules of quick mode; for Marlin it gives only PTX of 8.0.
    """
    if any((one.major, one.suffix) == (12, "") for one in archs):
        raise BadArchitectureError(
            "12.0 is the generic target: a full build for it leaves Marlin to PTX",
            next_step="use 12.0a, or 12.0f (one cubin for 12.0 and 12.1)",
        )


def to_text(archs: Iterable[CudaArch]) -> str:
    """Return the list as TORCH_CUDA_ARCH_LIST takes it."""
    return ";".join(str(arch) for arch in archs)


def _one(word: str) -> CudaArch:
    try:
        arch = CudaArch.parse(word)
    except ValueError:
        raise BadArchitectureError(
            f"{word!r} is not an architecture", next_step=_spelled(word)
        ) from None
    if arch.major != 12:
        return arch
    ptx = "+PTX" if arch.ptx else ""
    if (arch.major, arch.minor) not in _DEVICES:
        raise BadArchitectureError(
            f"there is no device of compute capability {word}", next_step="use 12.0a or 12.1a"
        )
    if arch.minor == 1 and arch.suffix == "":
        raise BadArchitectureError(
            "12.1 is the generic target: it has none of the FP4 and FP8 instructions of 12.1a, and "
            "the release's CMake turns it into 12.0",
            next_step=f"use 12.1a{ptx}",
        )
    if arch.suffix == "f" and arch.minor != 0:
        raise BadArchitectureError(
            f"{word} is a family target that leaves out 12.0",
            next_step=f"use 12.0f{ptx} (one cubin for 12.0 and 12.1) or 12.1a{ptx}",
        )
    return arch


def _spelled(word: str) -> str:
    match = _OTHER_SPELLING.fullmatch(word.lower())
    if match is None:
        return "use 12.0a, 12.1a or 12.0f"
    suffix = match["suffix"] or ("a" if match["major"] == "12" else "")
    return f"use {match['major']}.{match['minor']}{suffix}"
