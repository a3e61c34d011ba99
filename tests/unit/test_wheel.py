"""The quick wheel, on a tiny official one: what changes, what stays, and that RECORD is right."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from sm12x.core import declared
from sm12x.core.errors import BadFileError, BuildFailedError
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.assemble import torch_ops, wheel
from sm12x.wheel.compile.native import NativeModule, NativeRecord
from sm12x.wheel.source.patched import SourceFile, SourceRecord

OFFICIAL = "demo-1.2.0-1-cp38-abi3-manylinux_2_24_x86_64.whl"
VERSION = "1.2.0+sm12x.0123abcd.quick"
INFO, OUR_INFO = "demo-1.2.0.dist-info", f"demo-{VERSION}.dist-info"
VERSION_PY = """\
version: str

__version__ = version = '1.2.0'
__version_tuple__ = version_tuple = (1, 2, 0)

__commit_id__ = commit_id = 'gabc'
"""
MEMBERS = {
    "demo/__init__.py": b"",
    "demo/_version.py": VERSION_PY.encode(),
    "demo/core.py": b"old\n",
    "demo/gone.py": b"gone\n",
    "demo/one.abi3.so": b"\x7fELF official one" * 100,
    "demo/two.abi3.so": b"\x7fELF official two" * 1000,
    f"{INFO}/METADATA": b"Metadata-Version: 2.4\nName: demo\nVersion: 1.2.0\n\nVersion: in text\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nTag: cp38-abi3-linux_x86_64\n\n",
    f"{INFO}/top_level.txt": b"demo\n",
}


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def official(tmp_path: Path) -> wheel.Official:
    path = tmp_path / OFFICIAL
    rows = [(name, f"sha256={_urlsafe(data)}", str(len(data))) for name, data in MEMBERS.items()]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, (f"{INFO}/RECORD", "", "")])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in MEMBERS.items():
            archive.writestr(name, data)
        archive.writestr(f"{INFO}/RECORD", text.getvalue())
    return wheel.inspect(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "core.py").write_bytes(b"new\n")
    (folder / "demo" / "added.py").write_bytes(b"added\n")
    return folder


@pytest.fixture
def native_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "native"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "one.abi3.so").write_bytes(b"\x7fELF ours")
    return folder


def _record(*files: SourceFile) -> SourceRecord:
    return SourceRecord(
        base_version="1.2.0", sdist_sha256="", stack_id="0123abcd", states={}, files=files
    )


CORE = SourceFile(path="demo/core.py", base_sha256=_sha(b"old\n"), sha256=_sha(b"new\n"))
ADDED = SourceFile(path="demo/added.py", base_sha256="", sha256=_sha(b"added\n"))
GONE = SourceFile(path="demo/gone.py", base_sha256=_sha(b"gone\n"), sha256="")
NATIVE = NativeRecord(
    base_version="1.2.0",
    inputs="",
    arch_list="12.0a",
    cmake_archs="12.0a",
    compiler="c++",
    nvcc="13.0",
    modules=(NativeModule(target="one", path="demo/one.abi3.so", sha256="", size=8, glibc="2.17"),),
)
LEDGER = ledgers.Ledger(
    base_version="1.2.0",
    sdist="demo-1.2.0.tar.gz",
    sdist_sha256="1" * 64,
    official_wheel=OFFICIAL,
    official_wheel_sha256="2" * 64,
    stack_id="0123abcd",
    patches=(
        ledgers.PatchEntry(
            name="0001-x.patch",
            subject="x",
            upstream="none (why)",
            drop_when="never",
            witness="tests/witness/test_x.py",
            sha256="3" * 64,
            state="applied",
            native="compiled",
        ),
    ),
    mode="quick",
    machine="x86_64",
    python="3.13",
    arch_list="12.0a",
    cmake_archs="12.0a",
    compiler="c++",
    nvcc="13.0",
    files=(),
    libraries=(
        ledgers.LibraryEntry(
            path="demo/two.abi3.so",
            sha256="4" * 64,
            size=3,
            official_size=4,
            origin="compiled",
            reason="",
            cubins={"12.0": 3},
            ptx={"8.0": 1},
            sm120="native",
            sm121="ptx",
            ops=("demo::a", "demo::b"),
            lost=("demo::c",),
        ),
    ),
    lock_sha256="5" * 64,
    dependencies={"torch": "2.11.0"},
)


def _build(official: wheel.Official, source: Path, native_folder: Path, out: Path) -> Path:
    record = _record(CORE, ADDED, GONE)
    changed = wheel.changes(official, source, record, native_folder, NATIVE, VERSION)
    made = dataclasses.replace(LEDGER, files=tuple(change.entry() for change in changed))
    target = out / wheel.name(official, "1.2.0", VERSION, NATIVE)
    wheel.write(official, target, changed, made)
    return target


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_the_wheel_holds_what_it_should(
    official: wheel.Official, source: Path, native_folder: Path, tmp_path: Path
) -> None:
    target = _build(official, source, native_folder, tmp_path / "out")
    assert target.name == f"demo-{VERSION}-cp38-abi3-manylinux_2_24_x86_64.whl"
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        found = {info.filename: archive.read(info) for info in archive.infolist()}
        assert archive.getinfo("demo/one.abi3.so").external_attr >> 16 == 0o100755
    assert set(found) == {
        "demo/__init__.py",
        "demo/_version.py",
        "demo/added.py",
        "demo/core.py",
        "demo/one.abi3.so",
        "demo/two.abi3.so",
        f"{OUR_INFO}/METADATA",
        f"{OUR_INFO}/WHEEL",
        f"{OUR_INFO}/top_level.txt",
        f"{OUR_INFO}/{ledgers.NAME}",
        f"{OUR_INFO}/RECORD",
    }
    assert found["demo/core.py"] == b"new\n"
    assert found["demo/one.abi3.so"] == b"\x7fELF ours"
    assert found["demo/two.abi3.so"] == MEMBERS["demo/two.abi3.so"]
    assert (
        b"\nVersion: 1.2.0+sm12x.0123abcd.quick\n\nVersion: in text\n"
        in found[f"{OUR_INFO}/METADATA"]
    )
    assert b"Tag: cp38-abi3-manylinux_2_24_x86_64\n" in found[f"{OUR_INFO}/WHEEL"]
    namespace: dict[str, object] = {}
    exec(found["demo/_version.py"].decode(), namespace)  # noqa: S102 - it is ours
    assert namespace["__version__"] == VERSION
    assert namespace["version_tuple"] == (1, 2, 0, "sm12x.0123abcd.quick")


def test_record_has_every_member_with_its_hash(
    official: wheel.Official, source: Path, native_folder: Path, tmp_path: Path
) -> None:
    target = _build(official, source, native_folder, tmp_path / "out")
    with zipfile.ZipFile(target) as archive:
        names = archive.namelist()
        rows = list(csv.reader(io.StringIO(archive.read(f"{OUR_INFO}/RECORD").decode())))
        assert [row[0] for row in rows] == names
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            assert (digest, size) == (f"sha256={_urlsafe(data)}", str(len(data))), name
    assert rows[-1] == [f"{OUR_INFO}/RECORD", "", ""]


def test_the_ledger_in_the_wheel_names_what_changed(
    official: wheel.Official, source: Path, native_folder: Path, tmp_path: Path
) -> None:
    target = _build(official, source, native_folder, tmp_path / "out")
    with zipfile.ZipFile(target) as archive:
        made = ledgers.parse(archive.read(f"{OUR_INFO}/{ledgers.NAME}").decode(), target)
        for entry in made.files:
            if entry.sha256:
                assert _sha(archive.read(entry.path)) == entry.sha256
    assert {entry.path: entry.origin for entry in made.files} == {
        "demo/_version.py": "generated",
        "demo/added.py": "patched",
        "demo/core.py": "patched",
        "demo/gone.py": "removed",
        "demo/one.abi3.so": "compiled",
    }


def test_two_wheels_are_the_same_bytes(
    official: wheel.Official, source: Path, native_folder: Path, tmp_path: Path
) -> None:
    first = _build(official, source, native_folder, tmp_path / "first")
    second = _build(official, source, native_folder, tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (dataclasses.replace(CORE, base_sha256="0" * 64), "core.py has another text in"),
        (dataclasses.replace(CORE, path="demo/none.py"), "none.py is not in"),
        (dataclasses.replace(CORE, base_sha256=""), "is new in the stack and already in"),
        (dataclasses.replace(CORE, path="setup.py"), "setup.py, which the official wheel"),
    ],
)
def test_a_patch_that_the_official_wheel_cannot_carry_is_refused(
    official: wheel.Official, source: Path, native_folder: Path, file: SourceFile, said: str
) -> None:
    with pytest.raises(BuildFailedError, match=said):
        wheel.changes(official, source, _record(file), native_folder, NATIVE, VERSION)


def test_tests_and_native_sources_need_not_be_in_the_wheel(
    official: wheel.Official, source: Path, native_folder: Path
) -> None:
    record = _record(
        dataclasses.replace(CORE, path="tests/test_x.py"),
        dataclasses.replace(CORE, path="csrc/one.cpp"),
    )
    changed = wheel.changes(official, source, record, native_folder, NATIVE, VERSION)
    assert [change.path for change in changed] == ["demo/_version.py", "demo/one.abi3.so"]


@pytest.mark.parametrize(
    ("tag", "glibc", "ours"),
    [
        ("manylinux_2_24_x86_64", [], "manylinux_2_24_x86_64"),
        ("manylinux_2_24_x86_64", ["2.2.5"], "manylinux_2_24_x86_64"),
        ("manylinux_2_24_x86_64", ["2.17", "2.38"], "manylinux_2_38_x86_64"),
        ("manylinux_2_9_aarch64", ["2.17"], "manylinux_2_17_aarch64"),
        ("linux_x86_64", ["2.38"], "linux_x86_64"),
    ],
)
def test_the_platform_is_as_new_as_the_modules_need(tag: str, glibc: list[str], ours: str) -> None:
    assert wheel.platform_for(tag, glibc) == ours


def test_another_version_module_is_refused() -> None:
    with pytest.raises(BuildFailedError):
        wheel.version_module("__version__ = '1.2.0'\n", VERSION)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    for name in (OFFICIAL, "other.whl"):
        (tmp_path / name).write_bytes(b"no zip")
        with pytest.raises(BadFileError, match=str(tmp_path)):
            wheel.inspect(tmp_path / name)


def test_a_ledger_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    declared.write_json(path, LEDGER)
    assert ledgers.read(path) == LEDGER
    more = dataclasses.replace(
        LEDGER,
        extras=(
            ledgers.ExtraEntry(
                name="x", requirement="X_y==1", license="Apache-2.0", modules=("x",)
            ),
        ),
        sources=(
            ledgers.SourceEntry(name="a", pin="v1.2", version="v1.1"),
            ledgers.SourceEntry(name="b", pin="v1.2", version="v1.2"),
            ledgers.SourceEntry(name="c", pin="abcdef0", version=""),
        ),
    )
    declared.write_json(path, more)
    assert ledgers.read(path) == more
    assert more.extras[0].package == "x-y"
    assert (LEDGER.replaced, more.replaced) == ((), ("a v1.1 in place of v1.2",))
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 1'))
    with pytest.raises(BadFileError, match="schema"):
        ledgers.read(path)


@pytest.mark.parametrize(
    ("path", "loads"),
    [
        ("vllm/_C.abi3.so", True),
        ("x/_C.cpython-313-x86_64-linux-gnu.so", True),
        ("x/_C.cpython-310-x86_64-linux-gnu.so", False),
        ("x/_C.cpython-313-aarch64-linux-gnu.so", True),
        ("x/libcuda.so.1", True),
        # A program.
        ("vllm/vllm-rs", False),
    ],
)
def test_libraries_of_another_python_are_left_out(path: str, loads: bool) -> None:
    assert torch_ops.loads_on(path, "3.13") is loads


OPS = torch_ops.Registered(
    ops=("_C::a", "_C::b", "_C::c", "_C::d", "_q::e", "_q::f"), names=("init",)
)


def test_a_module_must_offer_what_the_official_one_does() -> None:
    more = dataclasses.replace(OPS, ops=(*OPS.ops, "_C::new"))
    assert torch_ops.lost("m.so", more, OPS, ()) == ()
    less = dataclasses.replace(OPS, ops=("_C::a", "_q::e", "_q::f"))
    with pytest.raises(BuildFailedError, match=r"3 of .* 6 .*_C::b, _C::c, _C::d"):
        torch_ops.lost("m.so", less, OPS, ())
    with pytest.raises(BuildFailedError, match="init"):
        torch_ops.lost("m.so", dataclasses.replace(OPS, names=()), OPS, ())


def test_what_is_for_other_gpus_may_be_lost_and_nothing_else() -> None:
    allowed = ("_q::e", "_q::f")
    less = dataclasses.replace(OPS, ops=("_C::a", "_C::b", "_C::c", "_C::d"))
    assert torch_ops.lost("m.so", less, OPS, allowed) == ("_q::e", "_q::f")
    less = dataclasses.replace(OPS, ops=("_C::a", "_C::b", "_C::c"))
    with pytest.raises(BuildFailedError, match="_C::d"):
        torch_ops.lost("m.so", less, OPS, allowed)


def test_an_op_that_was_only_read_has_no_namespace() -> None:
    allowed = ("_q::e", "_q::f")
    read = torch_ops.Registered(ops=("a", "e", "f"), names=(), by="read")
    assert torch_ops.lost("m.so", dataclasses.replace(read, ops=("a",)), read, allowed) == (
        "e",
        "f",
    )
    with pytest.raises(BuildFailedError, match=r"ops: a\b"):
        torch_ops.lost("m.so", dataclasses.replace(read, ops=("f",)), read, allowed)
