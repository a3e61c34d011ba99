"""CUDA architecture strings as `TORCH_CUDA_ARCH_LIST` and nvcc write them.

12.0 (generic), 12.0a (architecture-specific, runs on that one compute capability only) and 12.0f
(family, runs on every later minor of the same major) are three different targets: NVIDIA, CUDA C++
Programming Guide, "Family-Specific and Architecture-Specific Features".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(?P<major>\d+)\.(?P<minor>\d)(?P<suffix>[af]?)(?P<ptx>\+PTX)?")


@dataclass(frozen=True, kw_only=True, order=True)
class CudaArch:
    """One target: compute capability ``major.minor``, suffix "", "a" or "f", with PTX or not."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @classmethod
    def parse(cls, text: str) -> CudaArch:
        """Read "12.0", "12.0a", "12.0f" or "9.0+PTX". Raises ValueError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an architecture such as 12.0a, 12.0f or 9.0+PTX")
        return cls(
            major=int(match["major"]),
            minor=int(match["minor"]),
            suffix=match["suffix"],
            ptx=bool(match["ptx"]),
        )

    @property
    def sm(self) -> str:
        """Return the name nvcc gives it: "sm_120a"."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    def runs_on(self, major: int, minor: int) -> bool:
        """Tell whether a cubin of this target loads on compute capability ``major.minor``."""
        if self.major != major:
            return False
        if self.suffix == "a":
            return self.minor == minor
        return self.minor <= minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"


def parse_list(text: str) -> tuple[CudaArch, ...]:
    """Read a `TORCH_CUDA_ARCH_LIST`: targets separated by semicolons, commas or blanks."""
    return tuple(CudaArch.parse(word) for word in re.split(r"[;,\s]+", text.strip()) if word)
