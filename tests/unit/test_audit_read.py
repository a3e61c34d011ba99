"""Reading fat binaries, ELF files, wheels, folders and image archives."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import zstandard

from sm12x.audit import elf, fatbin, scan, sections
from sm12x.audit.model import SM120, SM121, Audit, LibraryAudit
from sm12x.core.errors import BadFileError

DATA = Path(__file__).parent / "data"
KERNELS = DATA / "kernels.so"
SPECIFIC, FAMILY, ZSTD, LZ4 = fatbin.SPECIFIC, fatbin.FAMILY, fatbin.ZSTD, fatbin.LZ4
CUBIN, PTX, LTO = 2, 1, 8


def entry(kind: int, number: int, flags: int = 0, payload: bytes = b"", *, whole: int = 0) -> bytes:
    """One entry as fatbinary writes it, with a 64-byte header. ``whole`` is its unpacked size."""
    body = payload or (b"\x7fELF" if kind == CUBIN else b"//\n\0") + b"\0" * 4
    body += b"\0" * (-len(body) % 8)
    head = struct.pack("<HHIQ12xIII Q 8x Q", kind, 0x101, 64, len(body), number, 0, 0, flags, whole)
    return head + body


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def library(
    sections: Mapping[str, bytes], *, machine: int = 62, kind: int = 3, flags: int = 2
) -> bytes:
    """An ELF file of these sections and nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = [*sections.values(), names]
    offset, headers, body = 64, [b"\0" * 64], b""
    for name, content in zip((*sections, ".shstrtab"), contents, strict=True):
        content += b"\0" * (-len(content) % 8)
        label = names.index(b"\0" + name.encode() + b"\0") + 1
        section = 3 if name == ".shstrtab" else 1
        headers.append(
            struct.pack("<IIQQQQIIQQ", label, section, flags, 0, offset, len(content), 0, 0, 8, 0)
        )
        body += content
        offset += len(content)
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack(
        "<HHIQQQIHHHHHH", kind, machine, 1, 0, 0, offset, 0, 64, 0, 0, 64, len(headers),
        len(headers) - 1,
    )  # fmt: skip
    return header + body + b"".join(headers)


def archived(members: Mapping[str, bytes]) -> bytes:
    """An `ar` archive as GNU ar writes it, of names under 16 bytes."""
    found = b"!<arch>\n"
    for name, data in members.items():
        found += f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(data):<10}`\n".encode()
        found += data + b"\n" * (len(data) % 2)
    return found


def read(tmp_path: Path, data: bytes) -> LibraryAudit:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    (found,) = scan.scan(path).libraries
    return found


def of(tmp_path: Path, *containers: bytes) -> LibraryAudit:
    return read(tmp_path, library({".nv_fatbin": b"".join(containers)}))


def test_a_library_made_by_nvcc_tells_12_0_from_12_0a_and_12_0f() -> None:
    (found,) = scan.scan(KERNELS).libraries
    assert found.cubins == {"9.0a": 1, "12.0": 1, "12.0a": 1, "12.0f": 1, "12.1a": 1}
    assert found.ptx == {"8.0": 1, "9.0a": 1, "12.0": 1}
    assert found.machine == "x86_64"
    assert (found.sm120, found.sm121) == ("native", "native")
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("entries", "on_120", "on_121"),
    [
        ([(CUBIN, 120, 0)], "native", "native"),
        ([(CUBIN, 120, FAMILY)], "native", "native"),
        ([(CUBIN, 120, SPECIFIC)], "native", "none"),
        ([(CUBIN, 121, 0)], "none", "native"),
        ([(CUBIN, 121, FAMILY)], "none", "native"),
        ([(CUBIN, 90, 0)], "none", "none"),
        ([(CUBIN, 100, FAMILY)], "none", "none"),
        ([(CUBIN, 80, 0), (PTX, 80, 0)], "ptx", "ptx"),
        ([(PTX, 90, SPECIFIC)], "none", "none"),
        ([(PTX, 100, FAMILY)], "none", "none"),
        ([(PTX, 120, SPECIFIC)], "ptx", "none"),
        ([(PTX, 120, FAMILY)], "ptx", "ptx"),
        ([(PTX, 121, 0)], "none", "ptx"),
        ([(CUBIN, 120, SPECIFIC), (PTX, 120, 0)], "native", "ptx"),
    ],
)
def test_what_runs_where(
    tmp_path: Path, entries: Sequence[tuple[int, int, int]], on_120: str, on_121: str
) -> None:
    found = of(tmp_path, container(*(entry(*each) for each in entries)))
    assert (found.sm120, found.sm121) == (on_120, on_121)


def test_a_library_whose_units_differ_is_mixed_and_counts_them(tmp_path: Path) -> None:
    native, ptx, neither = (
        container(entry(CUBIN, 120)),
        container(entry(CUBIN, 80), entry(PTX, 80)),
        container(entry(CUBIN, 90, SPECIFIC)),
    )
    found = of(tmp_path, native, ptx, ptx, neither)
    assert found.sm120 == "mixed"
    assert found.units_on(SM120) == {"native": 1, "ptx": 2, "none": 1, "unknown": 0}


def test_a_library_without_device_code_is_host_code(tmp_path: Path) -> None:
    found = read(tmp_path, library({".text": b"\xc3"}, machine=183))
    assert (found.sm120, found.sm121, found.machine) == ("host", "host", "aarch64")


def test_what_the_device_linker_took_in_is_not_counted_again(tmp_path: Path) -> None:
    linked = container(entry(CUBIN, 120))
    part = container(entry(CUBIN, 120), entry(PTX, 80))
    found = read(tmp_path, library({".nv_fatbin": linked, "__nv_relfatbin": part * 3}))
    assert (found.cubins, found.ptx) == ({"12.0": 1}, {})
    alone = read(tmp_path, library({"__nv_relfatbin": part * 3}))
    assert (alone.cubins, alone.ptx) == ({"12.0": 3}, {"8.0": 3})


@pytest.mark.parametrize("flags", [ZSTD, LZ4])
def test_compressed_entries_are_read_without_unpacking(tmp_path: Path, flags: int) -> None:
    payload = b"\x28\xb5\x2f\xfd rest" if flags == ZSTD else b"lz4 has no magic"
    found = of(tmp_path, container(entry(CUBIN, 120, flags | FAMILY, payload)))
    assert found.cubins == {"12.0f": 1}


def test_an_entry_tells_where_its_code_is() -> None:
    codes = [b"\x7fELF first", b"\x7fELF second, longer"]
    data = b"before.." + container(*(entry(CUBIN, 120, 0, code) for code in codes))
    (unit,) = fatbin.parse(data, 8, len(data) - 8).containers
    found = [data[each.offset : each.offset + each.size] for each in unit.entries]
    assert [code.rstrip(b"\0") for code in found] == codes


def test_zeros_between_containers_are_padding(tmp_path: Path) -> None:
    unit = container(entry(CUBIN, 120))
    assert of(tmp_path, unit, b"\0" * 24, unit).cubins == {"12.0": 2}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (container(entry(32, 120)), "code of kind 32"),
        (container(entry(CUBIN, 120, SPECIFIC | FAMILY)), "architecture 120"),
        (container(entry(CUBIN, 7)), "architecture 7"),
        (container(entry(CUBIN, 120, ZSTD)), "not zstd"),
        (container(entry(CUBIN, 120, 0, b"rubbish!")), "not a cubin"),
        (container(entry(CUBIN, 120))[:-16], "longer than its section"),
        (container(entry(CUBIN, 120))[:8], "cut off in its header"),
        (b"rubbish!" + container(entry(CUBIN, 120)), "not a fat binary"),
        (struct.pack("<IHHQ", fatbin.MAGIC, 9, 16, 0), "version 9"),
        (container(b"\2\0\1\1" + b"\xff" * 60), "does not fit"),
        (container(b"\2\0\1\1"), "cut off"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_unknown_and_said(tmp_path: Path, data: bytes, said: str) -> None:
    found = of(tmp_path, data)
    assert (found.sm120, found.sm121) == ("unknown", "unknown")
    assert said in "; ".join(found.unknown)


def test_reading_goes_on_after_a_damaged_container(tmp_path: Path) -> None:
    found = of(tmp_path, container(b"\2\0\1\1" + b"\xff" * 60), container(entry(CUBIN, 120)))
    assert found.cubins == {"12.0": 1}
    assert found.sm120 == "unknown"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x7fELF", "damaged"),
        (KERNELS.read_bytes()[:300], "damaged"),
        (b"not a library", "not an ELF file"),
        (b"", "empty"),
    ],
)
def test_a_damaged_library_is_unknown(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "lib.so").write_bytes(data)
    (found,) = scan.scan(tmp_path).libraries
    assert found.sm120 == "unknown"
    assert said in found.unknown[0]


def test_lto_ir_beside_a_cubin_changes_no_verdict(tmp_path: Path) -> None:
    (real,) = scan.scan(DATA / "lto.fatbin").libraries
    assert (real.cubins, real.lto, real.sm120) == ({"12.0": 1}, {"12.0": 1}, "native")
    assert real.unknown == ()
    made = of(tmp_path, container(entry(CUBIN, 90), entry(LTO, 90)), container(entry(LTO, 120)))
    assert (made.sm120, made.unknown) == ("lto", ())
    assert made.units_on(SM120)["lto"] == 2
    assert of(tmp_path, container(entry(LTO, 90, SPECIFIC))).sm120 == "none"


def test_an_entry_of_a_kind_not_known_is_its_units_trouble_alone(tmp_path: Path) -> None:
    found = of(tmp_path, container(entry(CUBIN, 120), entry(64, 0)), container(entry(CUBIN, 120)))
    assert (found.sm120, found.unknown) == ("native", ())
    other = of(tmp_path, container(entry(CUBIN, 90), entry(64, 0)), container(entry(CUBIN, 120)))
    assert other.units_on(SM120) == {"native": 1, "ptx": 0, "none": 0, "unknown": 1}


@pytest.mark.parametrize("name", ["concat.so", "concat.fatbin"])
def test_concatenated_cubins_are_counted_each(name: str) -> None:
    (found,) = scan.scan(DATA / name).libraries
    assert found.cubins == {"9.0": 1, "10.0a": 1, "12.0": 1}
    assert (found.ptx, found.unknown, found.sm120) == ({"12.0": 1}, (), "native")


@pytest.mark.parametrize("at", [0x40, 0x44, 0x48, 0x4C, 0x50, 0x8C])
def test_a_damaged_list_of_concatenated_cubins_is_unknown(tmp_path: Path, at: int) -> None:
    data = bytearray((DATA / "concat.fatbin").read_bytes())
    place = data.index(struct.pack("<HHI", 256, 0x101, 312)) + at
    data[place : place + 4] = b"\xff" * 4
    (tmp_path / "x.fatbin").write_bytes(data)
    (found,) = scan.scan(tmp_path / "x.fatbin").libraries
    assert found.sm120 == "unknown"


def test_the_stub_of_the_device_linker_is_no_unit(tmp_path: Path) -> None:
    (real,) = scan.scan(DATA / "stub.so").libraries
    assert (real.sm120, real.cubins, real.unknown) == ("host", {"7.5": 1}, ())
    made = of(tmp_path, container(), container(entry(CUBIN, 120)))
    assert made.units_on(SM120) == {"native": 1, "ptx": 0, "none": 0, "unknown": 0}
    assert of(tmp_path, container()).sm120 == "host"


def stub() -> bytes:
    """The cubin in stub.so."""
    data = (DATA / "stub.so").read_bytes()
    (unit,) = sections.audit("stub.so", data).units
    return data[unit.entries[0].offset :][: unit.entries[0].size]


@pytest.mark.parametrize(("flags", "pack"), [(0, bytes), (ZSTD, zstandard.compress)])
def test_a_stub_is_known_packed_or_not(
    tmp_path: Path, flags: int, pack: Callable[[bytes], bytes]
) -> None:
    whole = stub()
    packed = entry(CUBIN, 75, flags, pack(whole), whole=len(whole) if flags else 0)
    assert of(tmp_path, container(packed)).sm120 == "host"
    kernel = (DATA / "k121f.cubin").read_bytes()
    packed = entry(CUBIN, 121, flags, pack(kernel), whole=len(kernel) if flags else 0)
    assert of(tmp_path, container(packed)).sm120 == "none"


def test_kernels_whose_link_for_the_device_came_out_empty_are_counted(tmp_path: Path) -> None:
    part = container(entry(CUBIN, 90))
    found = read(tmp_path, library({".nv_fatbin": container(), "__nv_relfatbin": part}))
    assert found.sm120 == "none"


@pytest.mark.parametrize("name", [".data", ".ldata", ".cask_resource", ".rodata", ".strange"])
def test_fat_binaries_are_read_in_whatever_section_they_are(tmp_path: Path, name: str) -> None:
    held = container(entry(CUBIN, 120)) + b"words" * 3 + container(entry(CUBIN, 90))
    found = read(tmp_path, library({name: b"abc" + held}))
    assert found.cubins == {"9.0": 1, "12.0": 1}
    assert found.embedded_on(SM120) == {"native": 1, "ptx": 0, "none": 1, "unknown": 0}
    assert sections.audit("x", library({name: b"abc" + held})).cubins == found.cubins


def test_a_bare_cubin_in_a_library_is_read(tmp_path: Path) -> None:
    held = (DATA / "k120a.cubin").read_bytes()
    found = read(tmp_path, library({".rodata": b"xyz" + held + b"xyz"}))
    assert (found.cubins, found.sm120, found.sm121) == ({"12.0a": 1}, "native", "none")
    assert read(tmp_path, library({".rodata": held[: len(held) // 2]})).sm120 == "unknown"


def test_a_damaged_fat_binary_in_another_section_is_unknown_but_a_constant_is_not(
    tmp_path: Path,
) -> None:
    whole = container(entry(CUBIN, 120))
    assert read(tmp_path, library({".ldata": whole[:-8]})).sm120 == "unknown"
    # A program that writes fat binaries has the first bytes of one in its instructions.
    assert read(tmp_path, library({".text": whole[:16]}, flags=6)).sm120 == "host"
    assert read(tmp_path, library({".data": fatbin.MAGIC_BYTES * 5})).sm120 == "host"


def test_a_library_that_was_not_linked_for_the_device_cannot_be_loaded(tmp_path: Path) -> None:
    (found,) = scan.scan(DATA / "unlinked.so").libraries
    assert "2 symbols __cudaRegisterLinkedBinary_" in found.unloadable
    assert (found.sm120, found.units_on(SM120)["none"]) == ("none", 2)
    (whole,) = scan.scan(KERNELS).libraries
    assert whole.unloadable == ""


@pytest.mark.parametrize(
    ("name", "cubins", "ptx"),
    [
        ("k120a.cubin", {"12.0a": 1}, {}),
        ("k121f.cubin", {"12.1": 1}, {}),
        ("k90a.ptx", {}, {"9.0a": 1}),
        ("libk.a", {"12.0": 2}, {"12.0": 2}),
    ],
)
def test_files_of_code_are_read(name: str, cubins: object, ptx: object) -> None:
    (found,) = scan.scan(DATA / name).libraries
    assert (found.cubins, found.ptx, found.unknown) == (cubins, ptx, ())


@pytest.mark.parametrize(
    ("abi", "flags", "target"),
    [(7, 0x5A055A, "9.0"), (7, 0x5A0D5A, "9.0a"), (8, 0x6007802, "12.0"), (8, 0x600670A, "10.3a")],
)
def test_a_cubin_says_its_target(abi: int, flags: int, target: str) -> None:
    data = bytearray(stub())
    data[8] = abi
    data[48:52] = struct.pack("<I", flags)
    (found,) = fatbin.cubin(bytes(data)).entries
    assert str(found.arch) == target


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.cubin", b"no code"),
        ("a.cubin", stub()[:200]),
        ("a.fatbin", b"no code"),
        ("a.fatbin", container(entry(CUBIN, 120))[:-4]),
        ("a.ptx", b"// .version 8.0\n// .target sm_80\n"),
        ("a.ptx", b""),
        ("a.o", b"BC\xc0\xde bitcode"),
        ("a.a", b"no code"),
        ("a.a", b"!<thin>\n"),
        ("a.a", archived({"k.cubin": stub()[:200]})),
        ("a.a", archived({"k.o": library({".text": b"\xc3"}, kind=1)})[:-30]),
        ("a.a", archived({"k.o": b""})[:50]),
        ("a.a", archived({"a.a": archived({"a.a": archived({"k.o": b""})})})),
    ],
)
def test_what_is_named_as_code_and_cannot_be_read_is_unknown(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    for place in (tmp_path, tmp_path / name):
        (found,) = scan.scan(place).libraries
        assert found.sm120 == found.sm121 == "unknown"


@pytest.mark.parametrize("index", [0, 1, 2, 9, 0xFFFF])
def test_a_damaged_index_of_the_section_names_is_unknown(tmp_path: Path, index: int) -> None:
    data = bytearray(library({".nv_fatbin": container(entry(CUBIN, 120)), ".data": b"\0" * 64}))
    data[62:64] = struct.pack("<H", index)
    found = read(tmp_path, bytes(data))
    assert found.sm120 == "unknown"
    assert sections.audit("x", bytes(data)).sm120 == "unknown"


def test_more_fat_binaries_registered_than_found_is_unknown(tmp_path: Path) -> None:
    sections = {".nv_fatbin": container(entry(CUBIN, 120)), ".nvFatBinSegment": b"\0" * 48}
    assert (
        "2 fat binaries are registered, 1 were found" in read(tmp_path, library(sections)).unknown
    )


def test_a_library_without_section_headers_is_unknown(tmp_path: Path) -> None:
    data = bytearray(KERNELS.read_bytes())
    data[60:64] = b"\0" * 4  # e_shnum, e_shstrndx
    data[40:48] = b"\0" * 8  # e_shoff
    assert "section headers" in read(tmp_path, bytes(data)).unknown[0]


def test_damage_anywhere_never_raises() -> None:
    chance = random.Random(12)  # noqa: S311 - reproducible, not secret
    whole = KERNELS.read_bytes()
    small = library({".nv_fatbin": container(entry(CUBIN, 120), entry(PTX, 80))})
    for number in range(300):
        data = bytearray(whole if number % 4 == 0 else small)
        for _ in range(chance.randint(1, 12)):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        elf.read(bytes(data[: chance.randint(4, len(data))] if number % 3 == 0 else data))
    for _ in range(200):
        noise = fatbin.MAGIC_BYTES + chance.randbytes(chance.randint(0, 200))
        fatbin.parse(noise * 3, 0, len(noise) * 3)


def test_a_wheel_and_a_folder_hold_the_same_libraries(tmp_path: Path) -> None:
    tree = {
        "pkg/_C.abi3.so": KERNELS.read_bytes(),
        "pkg/tool": library({".text": b"\xc3"}),
        "pkg/part.o": library({".text": b"\xc3"}, kind=1),
        "pkg/libhost.a": archived({"part.o": library({".text": b"\xc3"}, kind=1)}),
        "pkg/libm.so": b"/* GNU ld script */ GROUP ( libm.so.6 )",
        "pkg/code.py": b"pass",
        "pkg/kernel.cubin": (DATA / "k120a.cubin").read_bytes(),
        "pkg/data.bin": (DATA / "concat.fatbin").read_bytes(),
        "pkg/libk.a": (DATA / "libk.a").read_bytes(),
        "pkg/unit.o": library({".nv_fatbin": container(entry(CUBIN, 120))}, kind=1),
        "pkg/text.ptx": (DATA / "k90a.ptx").read_bytes(),
        "pkg/other.ptx": b"a photograph",
    }
    folder, wheel = tmp_path / "tree", tmp_path / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in tree.items():
            archive.writestr(name, data)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    (folder / "pkg/link.so").symlink_to("_C.abi3.so")
    (folder / "pkg/loop.so").symlink_to("loop.so")
    (folder / "pkg/up").symlink_to("..")
    os.mkfifo(folder / "pkg/pipe.so")
    found = scan.scan(wheel)
    assert {each.path: each.sm120 for each in found.libraries} == {
        "pkg/_C.abi3.so": "native",
        "pkg/data.bin": "native",
        "pkg/kernel.cubin": "native",
        "pkg/libk.a": "native",
        "pkg/other.ptx": "unknown",
        "pkg/text.ptx": "none",
        "pkg/tool": "host",
        "pkg/unit.o": "native",
    }
    assert found.kind == "wheel"
    assert scan.scan(folder).libraries == found.libraries


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.so")
    with pytest.raises(BadFileError, match="regular file"):
        scan.scan(tmp_path / "pipe.so")


def test_a_damaged_member_of_a_wheel_is_unknown(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.so", KERNELS.read_bytes())
    data = bytearray(wheel.read_bytes())
    data[5000] ^= 0xFF
    wheel.write_bytes(data)
    (found,) = scan.scan(wheel).libraries
    assert found.sm120 == "unknown"
    assert "cannot be unpacked" in found.unknown[0]


def tar(files: Mapping[str, bytes | None], *, links: Mapping[str, str] | None = None) -> bytes:
    """A tar of these files; None makes a folder. ``links`` are hard links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            archive.addfile(info, io.BytesIO(data or b""))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.LNKTYPE, target
            archive.addfile(info)
    return out.getvalue()


def image(tmp_path: Path, data: bytes) -> Audit:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    return scan.scan(path)


def saved(*layers: bytes) -> bytes:
    names = [f"layer{number}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    return tar({**dict(zip(names, layers, strict=True)), "manifest.json": manifest})


LIB = KERNELS.read_bytes()
HOST = library({".text": b"\xc3"})


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_later_layers_replace_and_remove(tmp_path: Path, pack: type[bytes]) -> None:
    lower = tar(
        {"a/x.so": LIB, "a/y.so": LIB, "b/z.so": LIB, "c/d/w.so": LIB, "e.so": LIB, "f/v.so": LIB}
    )
    upper = tar(
        {
            "a/.wh.x.so": b"",
            "b/.wh..wh..opq": b"",
            "b/new.so": LIB,
            ".wh.c": b"",
            "a/y.so": HOST,
            "e.so": None,
            "f": b"a file now",
        }
    )
    found = image(tmp_path, saved(pack(lower), pack(upper)))
    assert {each.path: each.sm120 for each in found.libraries} == {
        "a/y.so": "host",
        "b/new.so": "native",
    }
    assert found.kind == "image"


def test_an_oci_archive_is_read_through_its_index(tmp_path: Path) -> None:
    kind = "application/vnd.oci.image.layer.v1.tar"
    layer = {"mediaType": kind, "digest": "sha256:1"}
    manifest = json.dumps({"layers": [layer]}).encode()
    statement = json.dumps(
        {"layers": [{"mediaType": "application/vnd.in-toto+json", "digest": "sha256:2"}]}
    ).encode()
    inner = json.dumps({"manifests": [{"digest": "sha256:3"}, {"digest": "sha256:4"}]}).encode()
    found = image(
        tmp_path,
        tar(
            {
                "oci-layout": b"{}",
                "index.json": json.dumps({"manifests": [{"digest": "sha256:5"}]}).encode(),
                "blobs/sha256/5": inner,
                "blobs/sha256/3": manifest,
                "blobs/sha256/4": statement,
                "blobs/sha256/1": tar({"opt/k.so": LIB}),
            }
        ),
    )
    assert [each.path for each in found.libraries] == ["opt/k.so"]


def test_an_exported_file_system_is_read_with_its_hard_links(tmp_path: Path) -> None:
    found = image(tmp_path, tar({"./opt/k.so": LIB}, links={"./opt/twin.so": "./opt/k.so"}))
    assert [each.path for each in found.libraries] == ["opt/k.so", "opt/twin.so"]
    assert found["opt/twin.so"].sm121 == found["opt/k.so"].verdict(SM121) == "native"


@pytest.mark.parametrize(
    "data",
    [
        saved(tar({"a.so": LIB})[:9000]),
        saved(gzip.compress(tar({"a.so": LIB}))[:4000]),
        tar({"manifest.json": b'[{"Layers": ["nowhere.tar"]}]'}),
        tar({"manifest.json": b'[{"Layers": []}, {"Layers": []}]'}),
        tar({"manifest.json": b"{"}),
        tar({"oci-layout": b"{}", "index.json": b'{"manifests": []}'}),
    ],
)
def test_a_damaged_image_is_a_bad_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadFileError):
        image(tmp_path, data)


def test_what_is_no_library_folder_wheel_or_image_is_a_bad_file(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(BadFileError, match="neither"):
        scan.scan(text)
    with pytest.raises(BadFileError, match="does not exist"):
        scan.scan(tmp_path / "missing.whl")
