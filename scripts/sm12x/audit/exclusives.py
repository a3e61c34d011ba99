"""Store-exclusives of A64 code whose status no instruction reads: a lost store counts as done.

A store-exclusive (STXR, STLXR, their byte, halfword and pair forms) writes memory only if the
reservation of the load-exclusive before it still holds, and says whether it did in a register: 0
for stored, 1 for not. Code that never reads that register goes on as if the store had happened. A
compare-and-swap that retries on the compared value alone has this fault, and loses an update now
and then: NCCL before 2.29.3, built with GCC older than 10, has one in ncclProxyGetPostedOps
(NVIDIA/nccl#2353, release notes of v2.29.3-1).

The encodings are those of the Arm Architecture Reference Manual for A-profile (ARM DDI 0487),
chapter C4 "A64 Instruction Set Encoding": C4.1 for the groups, and there "Load/store exclusive
register", "Compare and branch", "Data processing - immediate" and so on. Which registers a call
keeps is in the Procedure Call Standard for the Arm 64-bit Architecture (AAPCS64), "General-purpose
Registers".

An instruction that is not decoded here, or a branch to an unknown address, counts as a read of the
status. So a finding is a store whose status is dead on every path, and a fault in this decoder is
more likely to hide a finding than to invent one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sm12x.audit.fatbin import Buffer
from sm12x.core.declared import Declared

# Instructions to look at in one file, and behind one store. Of 692 libraries in the wheels that the
# two aarch64 locks name, the one with the most has 4,847 stores, nearly all beside their test.
MAX_STEPS = 1_000_000
_MAX_BEHIND = 4096
# Within how many instructions before a store its load-exclusive is looked for. Data between
# functions can look like a store-exclusive (1 word in 16,384), but has no load before it.
_BEFORE = 64
# Bytes that are searched at a time.
_PIECE = 1 << 24
# Load/store exclusive register, ordered, and compare and swap: bits 29:24 are 001000.
_GROUP = re.compile(rb"[\x08\x48\x88\xc8]")
_WORD = struct.Struct("<I")
_ZERO = 31
# AAPCS64: what a callee may change (r0-r18, and the link register), and what it reads.
_CHANGED, _ARGUMENTS = frozenset((*range(19), 30)), frozenset(range(9))
# What a caller reads: results, and whatever is its own.
_RETURNED = frozenset((*range(9), *range(19, 31)))
_ALL = frozenset(range(32))
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CodeRange:
    """Instructions in a file: ``offset`` and ``size`` in bytes; ``address`` is where they run."""

    offset: int
    size: int
    address: int


@dataclass(frozen=True, kw_only=True)
class ExclusiveStores(Declared):
    """The store-exclusives of aarch64 host code."""

    total: Annotated[int, Field(ge=1)]
    untested: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(.*:)?0x[0-9a-f]+$")], ...],
        Field(
            description="Addresses of those whose status no instruction reads: a store that failed "
            "counts as done; in an archive with the member's name before."
        ),
    ]

    def __bool__(self) -> bool:
        return self.total > 0


NO_STORES = ExclusiveStores(total=0, untested=())


def scan(data: Buffer, ranges: Iterable[CodeRange]) -> ExclusiveStores:
    """Look at every store-exclusive in ``ranges`` of an AArch64 file.

    Ranges may overlap, begin anywhere and claim any size; each byte is looked at once.

    Raises:
        ValueError: following them takes more than ``MAX_STEPS`` instructions.
    """
    total, steps = 0, MAX_STEPS
    untested: list[str] = []
    end = 0
    for each in sorted(ranges, key=lambda each: each.offset):
        start = max(each.offset, end)
        # What an earlier range has is not looked at again, and instructions stay aligned.
        start += -(start - each.offset) % 4
        stop = min(each.offset + each.size, len(data))
        if stop - start < 4:
            continue
        end = stop
        code = _Code(data, start, (stop - start) // 4)
        for at in code.candidates():
            looked, is_store = code.is_store(at)
            steps -= looked
            tested = True
            if is_store:
                total += 1
                followed, tested = code.follow(at)
                steps -= followed
            if steps <= 0:
                raise ValueError(
                    f"its store-exclusives lead through more than {MAX_STEPS} instructions"
                )
            if not tested:
                untested.append(f"{each.address + start - each.offset + 4 * at:#x}")
    return ExclusiveStores(total=total, untested=tuple(untested))


def merged(found: Sequence[tuple[str, ExclusiveStores]]) -> ExclusiveStores:
    """The stores of an archive's members, by the member's name."""
    return ExclusiveStores(
        total=sum(stores.total for _, stores in found),
        untested=tuple(f"{name}:{at}" for name, stores in found for at in stores.untested),
    )


class _Code:
    """A run of instructions; each is known by its number in the run."""

    def __init__(self, data: Buffer, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def _word(self, at: int) -> int:
        word: int = _WORD.unpack_from(self._data, self._start + 4 * at)[0]
        return word

    def candidates(self) -> Iterator[int]:
        """Where a word is of the group that has the store-exclusives."""
        for first in range(0, self._count, _PIECE // 4):
            last = min(first + _PIECE // 4, self._count)
            begin = self._start + 4 * first
            # The highest byte of each word: little-endian, as instructions always are.
            highest = bytes(self._data[begin : begin + 4 * (last - first)])[3::4]
            for match in _GROUP.finditer(highest):
                yield first + match.start()

    def is_store(self, at: int) -> tuple[int, bool]:
        """How many instructions were looked at, and whether the one at ``at`` is a store-exclusive.

        Before a store there is a load-exclusive of the same size from the same base register.
        """
        word = self._word(at)
        if not _is_store(word):
            return 1, False
        # Size and pair (bits 31:30 and 21), base register; the load has L, bit 22.
        mask, value = 0xFFE003E0, (word & 0xC02003E0) | 0x08400000
        before = range(at - 1, max(at - _BEFORE, 0) - 1, -1)
        for steps, number in enumerate(before, start=1):
            if self._word(number) & mask == value:
                return steps, True
        return 1 + len(before), False

    def follow(self, store: int) -> tuple[int, bool]:
        """How many instructions were followed, and whether one may read the store's status."""
        status = self._word(store) >> 16 & 31
        if status == _ZERO:
            return 1, False
        waiting, seen = [store + 1], {store + 1}
        steps = 0
        while waiting:
            at = waiting.pop()
            steps += 1
            if not 0 <= at < self._count or steps >= _MAX_BEHIND:
                return steps, True
            reads, writes, ways = _decoded(self._word(at))
            if status in reads:
                return steps, True
            if status in writes:
                continue
            for way in ways:
                # To itself: no loop that ends, or an address that the linker has yet to fill in.
                if way == 0:
                    return steps, True
                if at + way not in seen:
                    seen.add(at + way)
                    waiting.append(at + way)
        return steps, False


def _is_store(word: int) -> bool:
    """STXR, STLXR (B, H) and STXP, STLXP: bits 29:22 are 00100000, so no load, none ordered only.

    Bit 21 is the pair, which exists for 32 and 64 bits; CASP has its place below. A single store
    has 11111 for its second register.
    """
    if word & 0x3FC00000 != 0x08000000:
        return False
    return bool(word >> 31) if word & 0x00200000 else word & 0x7C00 == 0x7C00


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


# Registers that are read, registers that are written, and how far on the next instructions are.
_Effect = tuple[frozenset[int], frozenset[int], tuple[int, ...]]
_UNKNOWN: _Effect = (_ALL, _NONE, ())


def _decoded(word: int) -> _Effect:
    """What one instruction does to the general-purpose registers. 31 is none of them."""
    group = word >> 25 & 15
    if group in (0b1010, 0b1011):
        return _branch(word)
    if group in (0b1000, 0b1001):
        reads, writes = _immediate(word)
    elif group & 0b0101 == 0b0100:
        reads, writes = _memory(word)
    elif group & 0b0111 == 0b0101:
        reads, writes = _register(word)
    elif group & 0b0111 == 0b0111:
        reads, writes = _vector(word)
    elif word >> 16 == 0:
        # UDF: it ends the process.
        return _NONE, _NONE, ()
    else:
        # SVE and SME: their general-purpose operands are in any of these.
        reads, writes = _set(word, 0, 5, 10, 16), _NONE
    return reads, writes - {_ZERO}, (1,)


def _set(word: int, *places: int) -> frozenset[int]:
    return frozenset(word >> place & 31 for place in places)


def _branch(word: int) -> _Effect:
    """C4.1 "Branches, exception generating and system instructions"."""
    if word & 0x7C000000 == 0x14000000:
        # A call's callee may be anywhere: it takes arguments, and comes back.
        if word >> 31:
            return _ARGUMENTS, _CHANGED, (1,)
        return _NONE, _NONE, (_signed(word & 0x3FFFFFF, 26),)
    if word & 0xFF000000 == 0x54000000:
        target = _signed(word >> 5 & 0x7FFFF, 19)
        # Conditions 1110 and 1111 are "always".
        return _NONE, _NONE, (target,) if word & 14 == 14 else (1, target)
    if word & 0x7E000000 == 0x34000000:
        return _set(word, 0), _NONE, (1, _signed(word >> 5 & 0x7FFFF, 19))
    if word & 0x7E000000 == 0x36000000:
        return _set(word, 0), _NONE, (1, _signed(word >> 5 & 0x3FFF, 14))
    if word & 0xFF9F0000 == 0xD61F0000:
        # BR, BLR, RET, and the forms that check the address's signature.
        kind = word >> 21 & 3
        if kind == 1:
            return _ARGUMENTS | _set(word, 0, 5), _CHANGED, (1,)
        # A jump through a register is a tail call, or one within the function: not known where to.
        return _UNKNOWN if kind == 0 else (_RETURNED, _NONE, ())
    if word & 0xFFE0001F == 0xD4200000:
        # BRK: a trap.
        return _NONE, _NONE, ()
    if word & 0xFFE0001F == 0xD4000001:
        # SVC: Linux takes its arguments in r0-r5 and the number in r8, and changes r0 alone.
        return _ARGUMENTS, frozenset((0,)), (1,)
    if word & 0xFFC00000 == 0xD5000000:
        # MRS and SYSL (bit 21) write their register; MSR and SYS read it, hints and barriers have
        # 31 there.
        return (_NONE, _set(word, 0), (1,)) if word >> 21 & 1 else (_set(word, 0), _NONE, (1,))
    return _UNKNOWN


def _immediate(word: int) -> tuple[frozenset[int], frozenset[int]]:
    """C4.1 "Data processing - immediate", by bits 25:23."""
    kind, operation = word >> 23 & 7, word >> 29 & 3
    if kind in (0, 1):
        reads = _NONE
    elif kind == 5:
        # MOVK keeps the rest of its register.
        reads = _set(word, 0) if operation == 3 else _NONE
    elif kind == 6:
        # BFM keeps what it does not insert.
        reads = _set(word, 0, 5) if operation == 1 else _set(word, 5)
    else:
        reads = _set(word, 5, 16) if kind == 7 else _set(word, 5)
    return reads, _set(word, 0)


def _memory(word: int) -> tuple[frozenset[int], frozenset[int]]:
    """C4.1 "Loads and stores". With bit 26 the data are in vector registers."""
    vector, load = word >> 26 & 1, word >> 22 & 1
    data = _NONE if vector else _set(word, 0)
    pair = _NONE if vector else _set(word, 0, 10)
    base = _set(word, 5)
    if word & 0x3F000000 == 0x08000000:
        return _exclusive(word)
    if word & 0x3B000000 == 0x18000000:
        # A literal; 11 in bits 31:30 is a prefetch.
        return _NONE, _NONE if word >> 30 == 3 else data
    if word & 0x3A000000 == 0x28000000:
        return (base, pair) if load else (base | pair, _NONE)
    if word & 0x3B000000 == 0x39000000 or word & 0x3B200000 == 0x38000000:
        # An offset that is a number. 00 in bits 23:22 is a store; 10 with the largest size is a
        # prefetch.
        kind = word >> 22 & 3
        if kind == 0:
            return base | data, _NONE
        return base, _NONE if kind == 2 and word >> 30 == 3 else data
    if word & 0x3B200C00 == 0x38200800:
        index = _set(word, 5, 16)
        kind = word >> 22 & 3
        if kind == 0:
            return index | data, _NONE
        return index, _NONE if kind == 2 and word >> 30 == 3 else data
    if word & 0x3B200C00 == 0x38200000 and not vector:
        # LDADD, SWP and their like.
        return _set(word, 5, 16), data
    if vector and word & 0x3F000000 in (0x0C000000, 0x0D000000):
        # Structures; bit 23 adds a register to the base afterwards.
        return _set(word, 5, 16) if word >> 23 & 1 else _set(word, 5), _NONE
    return _set(word, 0, 5, 10, 16), _NONE


def _exclusive(word: int) -> tuple[frozenset[int], frozenset[int]]:
    """ "Load/store exclusive register" and its neighbours, by bits 23 (o2), 22 (L) and 21 (o1)."""
    ordered, load, one = word >> 23 & 1, word >> 22 & 1, word >> 21 & 1
    if one and (ordered or not word >> 31):
        # CAS takes these; CASP also the registers that follow two of them.
        return _set(word, 0, 5, 16) if ordered else _ALL, _NONE
    data = _set(word, 0, 10) if one else _set(word, 0)
    if load:
        return _set(word, 5), data
    return _set(word, 5) | data, _NONE if ordered else _set(word, 16)


def _register(word: int) -> tuple[frozenset[int], frozenset[int]]:
    """C4.1 "Data processing - register"."""
    if word & 0x1F000000 == 0x1B000000:
        return _set(word, 5, 10, 16), _set(word, 0)
    if word & 0x1FE00000 == 0x1A400000:
        # CCMP and CCMN; with bit 11 the second operand is a number.
        return _set(word, 5) if word & 0x800 else _set(word, 5, 16), _NONE
    if word & 0x5FE00000 == 0x5AC00000:
        return _set(word, 5), _set(word, 0)
    if word & 0x1FE00000 == 0x1A000000 and word & 0x7C00:
        # RMIF, SETF8 and SETF16 write flags alone.
        return _set(word, 5), _NONE
    return _set(word, 5, 16), _set(word, 0)


def _vector(word: int) -> tuple[frozenset[int], frozenset[int]]:
    """C4.1 "Data processing - scalar floating-point and Advanced SIMD": what moves to and fro."""
    if word & 0x5F20FC00 == 0x1E200000:
        # SCVTF, UCVTF and FMOV to a vector register; the others are from one.
        to_vector = word >> 16 & 7 in (2, 3, 7)
        return (_set(word, 5), _NONE) if to_vector else (_NONE, _set(word, 0))
    if word & 0x5F200000 == 0x1E000000:
        to_vector = word >> 16 & 7 in (2, 3)
        return (_set(word, 5), _NONE) if to_vector else (_NONE, _set(word, 0))
    if word & 0x9FE08400 == 0x0E000400:
        # DUP and INS from a general-purpose register; SMOV and UMOV to one.
        kind = word >> 11 & 15
        if word >> 29 & 1 == 0:
            if kind in (1, 3):
                return _set(word, 5), _NONE
            if kind in (5, 7):
                return _NONE, _set(word, 0)
    return _NONE, _NONE
