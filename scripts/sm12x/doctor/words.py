"""Numbers and lists in the words of findings."""

from __future__ import annotations

from collections.abc import Iterable

GIB = 1024**3
MIB = 1024**2


def size(count: float) -> str:
    """Bytes, as "3.2 GiB" or "64 MiB"."""
    return f"{count / GIB:.1f} GiB" if abs(count) >= GIB else f"{count / MIB:.0f} MiB"


def some(number: int, one: str, many: str = "") -> str:
    """ "1 file", "3 files"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3" for 0, 1, 2, 3; "0, 2" otherwise."""
    found = sorted(numbers)
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ", ".join(str(number) for number in found)
