"""Store-exclusives of AArch64 code: whose status is read, whose is not, and files that mislead.

The words are what GNU as makes of the instructions beside them.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import jsonschema
import pytest
from tests.unit.test_audit_read import archived, library

from sm12x import layout
from sm12x.audit import elf, exclusives, policy, render, report, scan
from sm12x.audit.exclusives import CodeRange, ExclusiveStores
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core import declared

EM_AARCH64 = 183
EXECUTABLE = 6
LOAD = 0x885FFC20  # ldaxr w0, [x1]
STORE = 0x8809FC24  # stlxr w9, w4, [x1]
RETURN = 0xD65F03C0
NOP = 0xD503201F
# What NCCL 2.28.9 does, but for the addresses: the loop goes round when the values differ, and
# does not when the store failed.
NCCL = (
    LOAD,
    0x6B02001F,  # cmp w0, w2
    0x54000041,  # b.ne over the store
    STORE,
    0x6B00005F,  # cmp w2, w0
    0x54FFFF61,  # b.ne to the load
    RETURN,
)
CORRECTED = (*NCCL[:4], 0x35FFFF89, *NCCL[4:5], 0x54FFFF41, RETURN)  # cbnz w9 after the store


def words(*code: int) -> bytes:
    return struct.pack(f"<{len(code)}I", *code)


def stores(*code: int) -> ExclusiveStores:
    data = words(*code)
    return exclusives.scan(data, [CodeRange(offset=0, size=len(data), address=0x1000)])


def built(*code: int, name: str = ".text") -> bytes:
    return library({name: words(*code)}, machine=EM_AARCH64, flags=EXECUTABLE)


def audited(tmp_path: Path, data: bytes, name: str = "libnccl.so.2") -> Audit:
    (tmp_path / name).write_bytes(data)
    return scan.scan(tmp_path / name)


def test_a_compare_and_swap_that_does_not_retry_is_found() -> None:
    assert stores(*NCCL) == ExclusiveStores(total=1, untested=("0x100c",))
    assert stores(*CORRECTED) == ExclusiveStores(total=1, untested=())


@pytest.mark.parametrize(
    "reading",
    [
        0x35FFFF49,  # cbnz w9
        0x34FFFF29,  # cbz w9
        0x3707FF09,  # tbnz w9, #0
        0x2A0903E3,  # mov w3, w9
        0x2A0903E9,  # mov w9, w9
        0xB90003E9,  # str w9, [sp]
        0x290027E9,  # stp w9, w9, [sp]
        0x12000123,  # and w3, w9, #1
        0x4A090043,  # eor w3, w2, w9
        0x1A820123,  # csel w3, w9, w2, eq
        0x1A890520,  # cinc w0, w9, ne
        0x1E620120,  # scvtf d0, w9
        0x4E040D20,  # dup v0.4s, w9
        0x1B022420,  # madd w0, w1, w2, w9
        0x7A400920,  # ccmp w9, #0, #0, eq
        0xB8694823,  # ldr w3, [x1, w9, uxtw]
        0x72800029,  # movk w9, #1
        0x33000049,  # bfxil w9, w2, #0, #1
        0x88A97C41,  # cas w9, w1, [x2]
        0xD61F0100,  # br x8: to code that is not known
        0x14000000,  # b to itself: an address that the linker fills in
        0x140FFFFF,  # b out of the section
    ],
)
def test_whatever_may_read_the_status_tests_it(reading: int) -> None:
    assert stores(LOAD, STORE, NOP, reading, RETURN).untested == ()


@pytest.mark.parametrize(
    "overwriting",
    [
        0x52800009,  # mov w9, #0
        0x90000009,  # adrp x9, 0
        0xB94003E9,  # ldr w9, [sp]
        0x29402BE9,  # ldp w9, w10, [sp]
        0xD53B4209,  # mrs x9, nzcv
        0x1E260009,  # fmov w9, s0
        0x0E043C09,  # umov w9, v0.s[0]
        0xB8220029,  # ldadd w2, w9, [x1]
        0x97FFFFE0,  # bl: w9 is the callee's
        0xD63F0100,  # blr x8
        0xD4200020,  # brk
        0x00000000,  # udf
    ],
)
def test_a_status_that_is_overwritten_first_is_not_tested(overwriting: int) -> None:
    test = 0x35FFFF49  # cbnz w9
    assert stores(LOAD, STORE, overwriting, test, RETURN).untested == ("0x1004",)


@pytest.mark.parametrize(
    ("load", "store"),
    [
        (0x085F7C20, 0x08097C24),  # stxrb
        (0x485F7C20, 0x48097C24),  # stxrh
        (0xC85F7C20, 0xC8097C24),  # stxr of 64 bits
        (0xC87F8820, 0xC8299424),  # stlxp
        (0x887F0820, 0x88291424),  # stxp
        (LOAD, 0x881FFC24),  # stlxr wzr: thrown away
    ],
)
def test_every_form_is_looked_at(load: int, store: int) -> None:
    assert stores(load, store, RETURN) == ExclusiveStores(total=1, untested=("0x1004",))


def test_a_status_that_a_caller_or_callee_may_read_is_tested() -> None:
    # w0 is returned; w20 is the function's own and still there after a call.
    assert stores(0x885FFC22, 0x8800FC24, RETURN).untested == ()
    assert stores(LOAD, 0x8814FC24, 0x97FFFFE0, 0x35FFFF94, RETURN).untested == ()


def test_one_path_that_tests_is_enough_and_loops_end() -> None:
    # b.ne over a ret, to the test
    assert stores(LOAD, STORE, 0x54000041, RETURN, 0x35FFFF89, RETURN).untested == ()
    # b back and forth for ever, without a test
    assert stores(LOAD, STORE, 0x14000002, 0x17FFFFFF, 0x17FFFFFF).untested == ("0x1004",)


def test_data_that_looks_like_a_store_is_none() -> None:
    assert stores(NOP, STORE, RETURN) == exclusives.NO_STORES
    # the load is of another size, of another base, or too far away
    assert stores(0xC85F7C20, STORE, RETURN).total == 0
    assert stores(0x885FFC60, STORE, RETURN).total == 0
    assert stores(LOAD, *[NOP] * 64, STORE, RETURN).total == 0
    assert stores(LOAD, *[NOP] * 63, STORE, RETURN).total == 1


def test_random_words_raise_nothing() -> None:
    chance = random.Random(9)  # noqa: S311
    for _ in range(200):
        code = [chance.getrandbits(32) for _ in range(64)]
        for at in range(0, 64, 4):
            code[at : at + 2] = LOAD, STORE
        found = stores(*code)
        assert len(found.untested) <= found.total


def test_ranges_that_overlap_or_leave_the_file_are_read_once() -> None:
    data = words(*NCCL) * 2
    size = len(data)
    ranges = [
        CodeRange(offset=0, size=1 << 63, address=0),
        CodeRange(offset=4, size=size, address=0x9000),
        CodeRange(offset=size - 2, size=2, address=0),
        CodeRange(offset=1 << 62, size=1 << 62, address=0),
        CodeRange(offset=8, size=0, address=0),
    ]
    assert exclusives.scan(data, ranges).untested == ("0xc", "0x28")
    assert exclusives.scan(data, ranges[1:]).untested == ("0x9024",)


@pytest.mark.parametrize("unit", [(LOAD, STORE), (STORE,), (LOAD,)], ids=["pair", "store", "load"])
def test_code_without_end_to_follow_is_a_fault_and_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: tuple[int, ...]
) -> None:
    monkeypatch.setattr(exclusives, "MAX_STEPS", 1000)
    (found,) = audited(tmp_path, built(*unit * 1001)).libraries
    assert found.faults
    assert found.stores == exclusives.NO_STORES
    assert found.sm120 == "unknown"


def test_only_instructions_of_aarch64_are_looked_at() -> None:
    code = {".text": words(*NCCL)}
    assert elf.read(library(code, machine=EM_AARCH64, flags=EXECUTABLE)).stores.total == 1
    assert elf.read(library(code, machine=EM_AARCH64, flags=2)).stores.total == 0
    assert elf.read(library(code, machine=62, flags=EXECUTABLE)).stores.total == 0


def test_no_cut_or_damage_raises() -> None:
    whole = built(*NCCL)
    for size in range(len(whole)):
        elf.read(whole[:size])
    chance = random.Random(10)  # noqa: S311
    for _ in range(300):
        made = bytearray(whole)
        for _ in range(3):
            at = chance.randrange(16, len(made) - 8)
            made[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 63)))
        elf.read(bytes(made))


def test_an_archive_names_its_member(tmp_path: Path) -> None:
    made = library({".text": words(*NCCL)}, machine=EM_AARCH64, kind=1, flags=EXECUTABLE)
    found = audited(tmp_path, archived({"a.o": made, "proxy.o": made}), "libnccl_static.a")
    assert found.libraries[0].stores.untested == ("a.o:0xc", "proxy.o:0xc")


def rules(**more: object) -> policy.Policy:
    everything = policy.Rule(match=("*",), units=("native",))
    return policy.Policy(schema=1, name="p", rules=(everything,), **more)  # type: ignore[arg-type]


def test_the_policy_says_how_many_are_accepted(tmp_path: Path) -> None:
    found = audited(tmp_path, built(*NCCL))
    strict = policy.ExclusiveRule(match=("*",), why="it deadlocks")
    lenient = policy.ExclusiveRule(match=("libnccl*",), why="never called", untested_at_most=1)

    (offender,) = policy.judge(found, rules(exclusives=(strict,))).offenders
    assert (offender.path.endswith("libnccl.so.2"), offender.device) == (True, "")
    assert "1 of 1" in offender.message
    assert offender.message.endswith("it deadlocks")
    # the first that matches counts
    assert policy.judge(found, rules(exclusives=(lenient, strict))).passed
    assert not policy.judge(found, rules(exclusives=(strict, lenient))).passed
    assert policy.judge(found, rules()).passed
    assert policy.judge(audited(tmp_path, built(*CORRECTED)), rules(exclusives=(strict,))).passed


@pytest.mark.parametrize(
    "path",
    [layout.data() / "policies/default.toml", *layout.patches().glob("*/audit-policy.toml")],
    ids=lambda path: path.parent.name,
)
def test_every_policy_that_ships_accepts_none(path: Path) -> None:
    lost = LibraryAudit(
        path="nvidia/nccl/lib/libnccl.so.2", sha256="", size=1, machine="aarch64",
        stores=ExclusiveStores(total=210, untested=("0x9391c",)),
    )  # fmt: skip
    found = policy.judge(Audit(subject="s", kind="image", libraries=(lost,)), policy.load(path))
    mine = [each for each in found.offenders if each.path == lost.path]
    assert len(mine) == 1
    assert "NVIDIA/nccl#2353" in mine[0].message


def test_text_and_json_name_the_places(tmp_path: Path) -> None:
    found = audited(tmp_path, built(*NCCL))
    document = json.loads(declared.to_json(report.document(found)))
    schema = json.loads((layout.data() / "schemas/audit-1.json").read_text())
    jsonschema.validate(document, schema)
    (entry,) = document["libraries"]
    assert entry["store_exclusives"] == {"total": 1, "untested": ["0xc"]}
    # A line breaks where the path of the folder is long.
    assert "1 of 1, at 0xc" in " ".join(render.text(found).split())

    corrected = audited(tmp_path, built(*CORRECTED))
    document = json.loads(declared.to_json(report.document(corrected)))
    (entry,) = document["libraries"]
    assert entry["store_exclusives"] == {"total": 1, "untested": []}
    assert "0xc" not in render.text(corrected)

    # What was written is read again, and a file without any does not name them.
    path = tmp_path / "audit.json"
    for one in (found, corrected):
        declared.write_json(path, report.document(one))
        assert report.read(path, next_step="") == report.document(one)
    none = json.loads(declared.to_json(report.document(audited(tmp_path, built(NOP, RETURN)))))
    jsonschema.validate(none, schema)
    assert "store_exclusives" not in none["libraries"][0]
