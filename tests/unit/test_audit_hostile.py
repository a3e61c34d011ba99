"""Files made to mislead an audit, or to bring it down. The reports and errors are what is asked."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import zstandard
from click.testing import CliRunner
from tests.unit.test_audit_read import (
    CUBIN,
    DATA,
    FAMILY,
    KERNELS,
    PTX,
    SPECIFIC,
    ZSTD,
    archived,
    container,
    entry,
    library,
    stub,
    tar,
)

from sm12x.audit import elf, fatbin, policy, scan
from sm12x.audit import library as audit_library
from sm12x.audit.model import SM120, UNKNOWN, LibraryAudit
from sm12x.commands import audit as verb
from sm12x.core import files, unpack
from sm12x.core.errors import BadFileError, NoSpaceError, Sm12xError
from sm12x.wheel import ledger
from sm12x.wheel.ledger import NAME

LZ4 = fatbin.LZ4
# More in a longer run: SM12X_FUZZ=20000.
ROUNDS = int(os.environ.get("SM12X_FUZZ", "30"))
SEEDS = sorted(path for path in DATA.iterdir() if path.suffix in
               (".so", ".a", ".cubin", ".fatbin", ".ptx"))  # fmt: skip
ALL = policy.Policy(
    schema=1,
    name="all",
    rules=(policy.Rule(match=("*",), units=("native", "ptx", "lto", "none"), reason="all"),),
)


def one(path: Path) -> LibraryAudit:
    (found,) = scan.scan(path).libraries
    return found


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Damaged in one of the ways that files are, or are made to be."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(made))
        kind = chance.randrange(6)
        if kind == 0:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[at : at + 4] = chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
        elif kind == 2:
            made[at : at + 8] = chance.choice((0, 1 << 63, (1 << 64) - 1, len(made))).to_bytes(
                8, "little"
            )
        elif kind == 3:
            del made[at : at + chance.randrange(1, 64)]
        elif kind == 4:
            start = chance.randrange(len(made))
            made[at:at] = made[start : start + chance.randrange(1, 256)]
        else:
            del made[max(at, 1) :]
        if not made:
            made = bytearray(b"\0")
    return bytes(made)


def pieces(path: Path) -> list[bytes]:
    """The fat binaries of a file, or the one cubin that it is, as bytes."""
    data, found = path.read_bytes(), []
    head = struct.pack("<IHH", fatbin.MAGIC, 1, 16)
    at = data.find(head)
    while at != -1:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        found.append(data[at : at + 16 + size])
        at = data.find(head, at + 16 + size)
    return found or [data]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_a_damaged_file_is_reported_or_refused(seed: Path, tmp_path: Path) -> None:
    """Never a traceback; and code that is there is in the report, or the file is unknown."""
    chance = random.Random(seed.name)  # noqa: S311 - reproducible, not secret
    whole, known = seed.read_bytes(), pieces(seed)
    path = tmp_path / seed.name
    for _ in range(ROUNDS):
        data = mutated(whole, chance)
        path.write_bytes(data)
        try:
            found = scan.scan(path)
        except Sm12xError:
            continue
        (library,) = found.libraries
        there = sum(piece in data for piece in known)
        read = len(library.units) + len(library.relocatable) + len(library.embedded)
        assert library.unknown or read >= there
        if library.unknown:
            assert not policy.judge(found, ALL).passed
            assert library.sm120 == library.sm121 == UNKNOWN


@pytest.mark.parametrize("name", ["kernels.so", "unlinked.so"])
def test_no_damage_to_the_headers_makes_a_library_empty(name: str) -> None:
    """Bytes of the ELF header and the section headers, in turn: code is there all the same."""
    whole = (DATA / name).read_bytes()
    (headers,) = struct.unpack_from("<Q", whole, 40)
    for at in (*range(4, 64), *range(headers, len(whole), 31)):
        for value in (0xFF, whole[at] ^ 1):
            found = elf.read(whole[:at] + bytes([value]) + whole[at + 1 :]).found
            read = len(found.units) + len(found.relocatable) + len(found.embedded)
            assert found.faults or read >= len(pieces(DATA / name)), hex(at)


def test_no_cut_makes_a_library_empty(tmp_path: Path) -> None:
    whole = KERNELS.read_bytes()
    path = tmp_path / "cut.so"
    for size in range(0, len(whole), 331):
        path.write_bytes(whole[:size])
        (found,) = scan.scan(tmp_path).libraries
        assert found.sm120 == UNKNOWN, size


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, (1 << 64) - 1),
        struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, 1 << 63) + b"\0" * 64,
        struct.pack("<IHHQ", fatbin.MAGIC, 1, 0xFFFF, 0),
        container(struct.pack("<HHIQ48x", CUBIN, 0x101, 64, (1 << 64) - 64)),
        container(struct.pack("<HHIQ48x", CUBIN, 0x101, 0xFFFFFFFF, 0)),
        container(struct.pack("<HHIQ48x", 256, 0x101, 64, 0)),
        container(struct.pack("<HHIQ48x", 256, 0x101, 0x48, 0) + b"\xff" * 8),
        container(entry(CUBIN, 120, SPECIFIC | FAMILY)),
    ],
)
def test_lengths_that_overflow_are_faults(tmp_path: Path, data: bytes) -> None:
    for name, text in (("a.fatbin", data), ("a.so", library({".nv_fatbin": data}))):
        (tmp_path / name).write_bytes(text)
        assert one(tmp_path / name).sm120 == UNKNOWN


def bomb_zstd(whole: int) -> bytes:
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    block = b"\0" * (1 << 20)
    return b"".join(packer.compress(block) for _ in range(whole >> 20)) + packer.flush()


@pytest.mark.parametrize("whole", [700, 16384, 1 << 40])
def test_code_that_unpacks_without_end_is_not_unpacked(tmp_path: Path, whole: int) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(
        library(
            {".nv_fatbin": container(entry(CUBIN, 90, ZSTD, bomb_zstd(256 << 20), whole=whole))}
        )
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert one(path).sm120 == "none"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_pieces_without_number_are_a_fault_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fatbin, "MAX_ENTRIES", 100)
    for data in (
        container() * 1000,
        container(*[struct.pack("<HHIQ48x", PTX, 0x101, 64, 0)] * 1000),
        stub() * 200,
    ):
        for name in (".nv_fatbin", ".data"):
            (tmp_path / "a.so").write_bytes(library({name: data}))
            found = one(tmp_path / "a.so")
            assert found.sm120 == UNKNOWN
            assert sum(len(unit.entries) + 1 for unit in found.loaded) < 500


@pytest.mark.parametrize("flags", [2, 6])
def test_fat_binaries_in_each_other_are_not_walked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """Each entry's payload begins like a container that holds all that follows."""
    monkeypatch.setattr(fatbin, "MAX_ENTRIES", 2000)
    walked = 0
    real = fatbin._entry

    def counted(*words: object) -> object:
        nonlocal walked
        walked += 1
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(fatbin, "_entry", counted)
    number = 3000
    data = b"".join(
        struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, (number - index) * 80 - 16)
        + entry(PTX, 80, 0, b"\0" * 4)[:56]
        + b"\0" * 8
        for index in range(number)
    )
    found = elf.read(library({".data": data + b"\1" * 40}, flags=flags)).found
    assert found.faults
    assert walked < 10_000


def headers_of(data: bytes, number: int) -> bytes:
    """The library with its second section header ``number`` times, as that many sections."""
    (headers,) = struct.unpack_from("<Q", data, 40)
    first, second, *rest = [data[at : at + 64] for at in range(headers, len(data), 64)]
    made = bytearray(data[:headers] + first + second * number + b"".join(rest))
    struct.pack_into("<HH", made, 60, 1 + number + len(rest), number + len(rest))
    return bytes(made)


def test_sections_over_the_same_bytes_are_a_fault_and_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked = 0
    real = fatbin._entry

    def counted(*words: object) -> object:
        nonlocal walked
        walked += 1
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(fatbin, "_entry", counted)
    data = library({".nv_fatbin": container(*[entry(CUBIN, 120)] * 100)})
    assert not elf.read(data).found.faults
    walked = 0
    found = elf.read(headers_of(data, 2000)).found
    assert walked == 100
    assert len(found.units) == 1
    assert 0 < len(found.faults) <= fatbin.MAX_FAULTS
    assert found.faults[0] == ".nv_fatbin at 0x40 overlaps another section of code"


def test_the_limit_on_pieces_is_for_a_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin, "MAX_ENTRIES", 150)
    data = container(*[entry(CUBIN, 120)] * 100)
    both = elf.read(library({".nv_fatbin": data, "__nv_relfatbin": data})).found
    assert sum(len(unit.entries) for unit in (*both.units, *both.relocatable)) <= 150
    assert any("more than 150 pieces" in fault for fault in both.faults)
    member = library({".nv_fatbin": data})
    packed = audit_library.audit("a.a", archived({f"{n}.o": member for n in range(9)}))
    assert packed is not None
    assert len(packed.units) == 2
    assert packed.faults == ("more than 150 pieces of code: the members from 2.o on were not read",)


def test_a_section_that_unpacks_without_end_is_not_unpacked(tmp_path: Path) -> None:
    """SHF_COMPRESSED, which pyelftools would follow, on the names and on the symbols."""
    packed = struct.pack("<IIQQ", 1, 0, 1 << 40, 1) + zlib.compress(b"\0" * (1 << 26))
    for name in (".shstrtab", ".dynstr", ".dynsym", ".nv_fatbin"):
        data = bytearray(
            library(
                {".dynstr": b"\0__cudaRegisterLinkedBinary_x\0", ".dynsym": packed, name: packed}
            )
            if name != ".shstrtab"
            else library({".nv_fatbin": container(entry(CUBIN, 120))})
        )
        (headers,) = struct.unpack_from("<Q", data, 40)
        (number,) = struct.unpack_from("<H", data, 60)
        for index in range(1, number):
            struct.pack_into("<Q", data, headers + 64 * index + 8, 0x802)
        path = tmp_path / "a.so"
        path.write_bytes(data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        scan.scan(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


# ---- wheels


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def claims(path: Path, size: int) -> Path:
    """A wheel of one library, whose central directory says that it unpacks to ``size`` bytes."""
    made = bytearray(wheel(path, {"a.so": KERNELS.read_bytes()}).read_bytes())
    at = made.rindex(b"PK\x01\x02") + 24
    made[at : at + 4] = struct.pack("<I", size)
    path.write_bytes(made)
    return path


def test_a_wheel_that_claims_to_unpack_to_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"a\.whl claims to unpack to 4\.0 GiB"):
        scan.scan(claims(tmp_path / "a.whl", 0xFFFFFFF0))


def test_members_that_share_their_bytes_count_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The central directory names one member many times over: small, and 50 times as large."""
    monkeypatch.setattr(unpack, "_MOST_OF_ALL", 40 * KERNELS.stat().st_size)
    made = wheel(tmp_path / "a.whl", {"a.so": KERNELS.read_bytes()}).read_bytes()
    at, end = made.index(b"PK\x01\x02"), made.index(b"PK\x05\x06")
    record = made[at:end] * 50
    tail = bytearray(made[end:])
    struct.pack_into("<HHI", tail, 8, 50, 50, len(record))
    (tmp_path / "a.whl").write_bytes(made[:at] + record + tail)
    with pytest.raises(BadFileError, match="claims to unpack"):
        scan.scan(tmp_path / "a.whl")


@pytest.mark.parametrize("size", [1, 100, 18241, unpack.FREE])
def test_a_member_of_another_size_than_it_claims_is_unknown(tmp_path: Path, size: int) -> None:
    assert one(claims(tmp_path / "a.whl", size)).sm120 == UNKNOWN


def test_a_library_larger_than_the_temporary_folder_is_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_gib", lambda folder: 1e-6)
    with pytest.raises(NoSpaceError):
        scan.scan(wheel(tmp_path / "a.whl", {"a.so": KERNELS.read_bytes()}))
    (tmp_path / "a.tar").write_bytes(tar({"a.so": KERNELS.read_bytes()}))
    with pytest.raises(NoSpaceError):
        scan.scan(tmp_path / "a.tar")


def test_a_hole_in_a_tar_is_not_filled(tmp_path: Path) -> None:
    """A GNU sparse member of 8 TiB in a tar of a few kilobytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.so")
        info.size = 4
        info.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.name": "a.so",
            "GNU.sparse.size": str(8 << 40),
            "GNU.sparse.numblocks": "1",
            "GNU.sparse.map": "0,4",
        }
        archive.addfile(info, io.BytesIO(b"\x7fELF"))
    (tmp_path / "a.tar").write_bytes(out.getvalue())
    with pytest.raises(Sm12xError):
        scan.scan(tmp_path / "a.tar")


# What 20 MiB of zeros take in each kind of packing; nothing of it may be unpacked to find that out.
ZEROS = b"\x7fELF" + b"\0" * (20 << 20)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is held in memory: each has to be refused before."""

    def fail(*_: object) -> NoReturn:
        raise AssertionError("a library was unpacked")

    monkeypatch.setattr(audit_library, "unpacked", fail)


@pytest.mark.usefixtures("unread")
def test_a_library_that_unpacks_to_a_thousand_times_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path / "a.whl", {"vllm/a.so": ZEROS})
    assert path.stat().st_size < len(ZEROS) / 900
    with pytest.raises(BadFileError) as refused:
        scan.scan(path)
    for fact in ("vllm/a.so", "20.0 MiB", "16.0 MiB", "25 times"):
        assert fact in refused.value.message
    assert "folder" in refused.value.next_step


@pytest.mark.parametrize("size", [unpack.FREE, 30 << 20])
def test_a_library_of_a_real_ratio_is_read(tmp_path: Path, size: int) -> None:
    """Zeros up to the free size; and beyond it what unpacks to 20 times, which no real one does."""
    data = bytearray(KERNELS.read_bytes()) + bytes(size - KERNELS.stat().st_size)
    if size > unpack.FREE:
        chance = random.Random(1)  # noqa: S311 - reproducible, not secret
        for at in range(1 << 20, size, 1 << 20):
            data[at : at + 50_000] = chance.randbytes(50_000)
    found = one(wheel(tmp_path / "a.whl", {"a.so": bytes(data)}))
    assert found.size == size
    assert found.sm120 == "native"


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", ["a.so", "x-1.dist-info/METADATA", f"x-1.dist-info/{NAME}"])
def test_a_packing_whose_blocks_are_unpacked_whole_is_not_opened(
    tmp_path: Path, kind: int, name: str
) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("k.so", KERNELS.read_bytes(), zipfile.ZIP_DEFLATED)
        archive.writestr(name, b"Name: vllm\n" * 1000)
    done = CliRunner().invoke(verb.command, [str(path), "--base", "0.33.0"])
    assert isinstance(done.exception, Sm12xError), done.exception
    assert "compression is of type" in f"{done.output}{done.exception}" or name.endswith("METADATA")


def test_a_ledger_and_metadata_of_any_size_are_not_read_whole(tmp_path: Path) -> None:
    path = wheel(
        tmp_path / "a.whl",
        {
            "vllm-1.dist-info/METADATA": b"Name: vllm\n" + b" " * (128 << 20),
            f"vllm-1.dist-info/{NAME}": b" " * (128 << 20),
            "a.so": KERNELS.read_bytes(),
        },
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadFileError):
        ledger.inside(path)
    assert verb._release(path) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 160 << 10


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, _zstd])
@pytest.mark.parametrize("outer", [False, True])
def test_a_library_in_a_packed_tar_is_bounded(
    tmp_path: Path, pack: Callable[[bytes], bytes], outer: bool
) -> None:
    layer = tar({"a.so": ZEROS})
    path = tmp_path / "image.tar"
    if outer:
        path.write_bytes(pack(layer))
    else:
        manifest = json.dumps([{"Layers": ["layer"]}]).encode()
        path.write_bytes(tar({"manifest.json": manifest, "layer": pack(layer)}))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(BadFileError, match=r"claims to unpack|cannot be read"):
        scan.scan(path)


def test_a_packed_layer_of_a_packed_image_counts_from_the_file(tmp_path: Path) -> None:
    layer = gzip.compress(tar({"a.so": KERNELS.read_bytes() + b"\0" * (40 << 20)}), 1)
    manifest = json.dumps([{"Layers": ["layer"]}]).encode()
    # 2 MiB of the layer's own that pack away, so that 40 MiB are not much from it alone.
    layer += gzip.compress(b"") * (2 << 20 >> 4)
    path = tmp_path / "image.tar.gz"
    path.write_bytes(gzip.compress(tar({"manifest.json": manifest, "layer": layer})))
    assert len(layer) * unpack.RATIO > 40 << 20 > path.stat().st_size * unpack.RATIO
    with pytest.raises(BadFileError, match=r"a\.so claims to unpack to 40\.0 MiB"):
        scan.scan(path)


@pytest.mark.parametrize("pack", [gzip.compress, _zstd])
def test_a_tar_that_goes_on_without_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(unpack, "_FREE_OF_ALL", 1 << 20)
    path = tmp_path / "image.tar"
    manifest = json.dumps([{"Layers": ["layer"]}]).encode()
    layer = pack(tar({"big.txt": bytes(32 << 20), "a.so": KERNELS.read_bytes()}))
    path.write_bytes(tar({"manifest.json": manifest, "layer": layer}))
    with pytest.raises(BadFileError, match=r"image\.tar: layer claims to unpack"):
        scan.scan(path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_many_bytes_is_not_read(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 64 << 20
    data = info.tobuf(tarfile.GNU_FORMAT) + bytes(64 << 20) + tar({"a.so": KERNELS.read_bytes()})
    path = tmp_path / "image.tar.gz"
    path.write_bytes(gzip.compress(data))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadFileError):
        scan.scan(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


def test_the_files_of_a_tar_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "_MOST_MEMBERS", 20)
    path = tmp_path / "image.tar"
    path.write_bytes(tar({f"{number}.txt": b"" for number in range(30)}))
    with pytest.raises(BadFileError, match="more than 20 files"):
        scan.scan(path)


@pytest.mark.parametrize("packed", [False, True])
def test_the_pieces_of_all_libraries_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(fatbin, "MAX_ENTRIES", 150)
    data = library({".nv_fatbin": container(*[entry(CUBIN, 120)] * 100)})
    members = {"a.so": data, "b.so": data}
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members))
    with pytest.raises(BadFileError, match="more than 150 pieces"):
        scan.scan(wheel(tmp_path / "a.whl", members) if packed else path)


class Opened(zipfile.ZipFile):
    """Counts how often an archive's directory is read, and each member opened."""

    directories = 0
    members = 0

    def _RealGetContents(self) -> None:  # noqa: N802 - zipfile's name
        Opened.directories += 1
        super()._RealGetContents()  # type: ignore[misc]

    def open(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        Opened.members += 1
        return super().open(*args, **kwargs)  # type: ignore[arg-type]


def test_a_wheel_of_many_members_is_read_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(tmp_path / "a.whl", {f"{number}.cubin": stub() for number in range(2000)})
    monkeypatch.setattr(zipfile, "ZipFile", Opened)
    assert len(scan.scan(path).libraries) == 2000
    assert Opened.directories <= 2
    assert Opened.members == 2000


@pytest.mark.parametrize("kind", ["wheel", "image", "oci", "member"])
def test_a_damaged_package_is_reported_or_refused(kind: str, tmp_path: Path) -> None:
    """Through the command, which has to write a report of whatever was found."""
    chance = random.Random(kind)  # noqa: S311 - reproducible, not secret
    members = {"a.so": (DATA / "concat.so").read_bytes(), "b/k.cubin": stub(), "c.a": b"!<arch>\n"}
    path = tmp_path / ("a.whl" if kind in ("wheel", "member") else "a.tar")
    index = json.dumps({"manifests": [{"digest": "sha256:1"}]}).encode()
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:2"}
    oci = {
        "oci-layout": b"{}",
        "index.json": index,
        "blobs/sha256/1": json.dumps({"layers": [layer]}).encode(),
        "blobs/sha256/2": tar(members),
    }
    for _ in range(ROUNDS):
        if kind == "member":
            wheel(path, {name: mutated(data, chance) for name, data in members.items()})
        elif kind == "wheel":
            path.write_bytes(mutated(wheel(path, members).read_bytes(), chance))
        else:
            path.write_bytes(mutated(tar(members if kind == "image" else oci), chance))
        done = CliRunner().invoke(verb.command, [str(path), *chance.choice(([], ["--json"]))])
        assert done.exit_code == 0 or isinstance(done.exception, Sm12xError), done.exception


def members_of(names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        yield name, KERNELS.read_bytes()


def test_strange_names_in_a_wheel_are_names(tmp_path: Path) -> None:
    names = ["../../etc/a.so", "/a.so", "a\nb.so", "\x1b[31m.so", "a" * 4000 + ".so", "é.so"]
    path = wheel(tmp_path / "a.whl", dict(members_of(names)))
    assert len(scan.scan(path).libraries) == len(names)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.whl"]
    # Absolute and relative paths have no folder in common.
    done = CliRunner().invoke(verb.command, [str(path)])
    assert done.exception is None or not isinstance(done.exception, ValueError)
    assert "/a.so" in done.output


# ---- archives


def test_an_index_that_names_itself_ends(tmp_path: Path) -> None:
    itself = json.dumps({"manifests": [{"digest": "sha256:1"}, {"digest": "sha256:2"}]}).encode()
    other = json.dumps({"manifests": [{"digest": "sha256:1"}]}).encode()
    path = tmp_path / "image.tar"
    files = {
        "oci-layout": b"{}",
        "index.json": itself,
        "blobs/sha256/1": itself,
        "blobs/sha256/2": other,
    }
    path.write_bytes(tar(files))
    with pytest.raises(BadFileError, match="0 images"):
        scan.scan(path)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"manifests": 3}', b'{"manifests": [{}]}', b'{"manifests": ["x"]}', b"null"],
)
def test_an_index_of_another_form_is_a_bad_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(tar({"oci-layout": b"{}", "index.json": content}))
    with pytest.raises(BadFileError):
        scan.scan(path)


def test_links_of_a_tar_that_name_each_other_end(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    links = {"a.so": "b.so", "b.so": "a.so", "c.so": "c.so", "d.so": "../../../etc/passwd"}
    path.write_bytes(tar({"k.so": KERNELS.read_bytes()}, links=links))
    assert [each.path for each in scan.scan(path).libraries] == ["k.so"]


def test_an_archive_of_many_members_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm12x.audit import library as libraries

    monkeypatch.setattr(libraries, "_MAX_MEMBERS", 50)
    (tmp_path / "a.a").write_bytes(archived({f"{number}.cubin": stub() for number in range(60)}))
    found = one(tmp_path / "a.a")
    assert found.sm120 == UNKNOWN
    assert len(found.units) == 50


def test_long_names_and_odd_members_of_an_archive(tmp_path: Path) -> None:
    cubin = (DATA / "k120a.cubin").read_bytes()
    gnu = b"!<arch>\n" + archived({"/": b"a_name_of_more_than_15.cubin/\n"})[8:]
    gnu = gnu.replace(b"//" + b" " * 14, b"//" + b" " * 14)
    gnu += archived({"/0": cubin})[8:].replace(b"/0/", b"/0 ")
    bsd = archived({"#1/20": b"a_name_of_BSD.cubin\0" + cubin}).replace(b"#1/20/", b"#1/20 ")
    for data in (gnu, bsd):
        (tmp_path / "a.a").write_bytes(data)
        assert one(tmp_path / "a.a").cubins == {"12.0a": 1}


# ---- folders


def test_a_folder_that_cannot_be_listed_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.so").write_bytes(KERNELS.read_bytes())
    real: Callable[[str], object] = os.scandir

    def refuses(path: str) -> object:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuses)
    found = scan.scan(tmp_path)
    assert {each.path: each.sm120 for each in found.libraries} == {
        "a.so": "native",
        "shut": UNKNOWN,
    }


def test_names_that_cannot_be_written_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in (b"\xff.so", b"a\nb.so", b"\x1b[31m.so", "\u2028.so".encode()):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(KERNELS.read_bytes())
    output = tmp_path / "report.txt"
    for words in ([], ["--json"], ["--output", str(output)]):
        done = CliRunner().invoke(verb.command, [str(folder), *words])
        assert done.exit_code == 0, done.exception
    text = output.read_text(encoding="utf-8")
    for escaped in ("\\xff.so", "a\\x0ab.so", "\\x1b[31m.so", "\\u2028.so"):
        assert escaped in text


def test_a_file_that_is_gone_when_it_is_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(KERNELS.read_bytes())
    plan = scan.plan(tmp_path)
    (tmp_path / "a.so").unlink()
    (found,) = scan.run(plan).libraries
    assert found.verdict(SM120) == UNKNOWN


def _zip(at: int, value: int) -> bytes:
    """A zip whose central directory has ``value`` at ``at`` of its only entry."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("\xe9.so", b"")
    data = bytearray(made.getvalue())
    data[data.index(b"PK\x01\x02") + at] = value
    return bytes(data)


def _tar() -> bytes:
    """A tar whose first name is said to have 2**63 bytes."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 63
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(20 * tarfile.BLOCKSIZE)


@pytest.mark.parametrize("data", [_zip(6, 84), _zip(46, 0xFF), _tar()])
def test_a_header_that_cannot_be_is_a_bad_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(data)
    with pytest.raises(BadFileError, match=str(path)):
        scan.run(scan.plan(path))
