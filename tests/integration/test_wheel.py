"""The steps of a build with the real compilers, the real cuda.h and the real official wheel."""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import hashlib
import io
import json
import platform
import shlex
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit import test_wheel as tiny

from sm12x import layout
from sm12x.core import index, lockfile
from sm12x.core.errors import BadFileError, BuildFailedError, HashMismatchError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Module
from sm12x.wheel import ledger as ledgers
from sm12x.wheel import selection
from sm12x.wheel.assemble import wheel
from sm12x.wheel.compile import cmake, launcher, native
from sm12x.wheel.source import patched
from sm12x.wheel.toolchain import arch, cuda_home, libcuda_stub

BASE = bases.load("0.33.0")
MACHINE = platform.machine()
NO_DEVICE, NOT_INITIALIZED, NOT_FOUND = 100, 3, 500


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


@pytest.fixture(scope="session")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment with nvcc, cmake and ninja, out of the base's own lock."""
    folder = tmp_path_factory.mktemp("toolkit")
    lock = BASE.folder / f"build-{MACHINE}.lock"
    names = ["nvidia-cuda-nvcc", "nvidia-cuda-cccl", "cmake", "ninja"]
    (folder / "lock").write_text(lockfile.restrict(lock.read_text(), names))
    uv = Path(sys.executable).parent / "uv"
    environment = folder / "venv"
    run(uv, "venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    run(uv, "pip", "install", "-q", "--python", python, "--require-hashes", "-r", folder / "lock")
    return environment


@pytest.fixture(scope="session")
def cuda(toolkit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "home"
    # Compiles and links a program with libcuda and libcudart as its last step.
    cuda_home.assemble(cmake.purelib(toolkit / "bin" / "python"), out)
    return out


def test_the_assembled_toolkit_compiles_outside_its_packages(cuda: Path, tmp_path: Path) -> None:
    program = tmp_path / "kernel.cu"
    program.write_text("__global__ void k(float *x) { *x = 1; }\n")
    for target in ("sm_120a", "sm_121a", "sm_120f"):
        nvcc = cuda / "bin" / "nvcc"
        run(nvcc, f"-arch={target}", "-cubin", program, "-o", tmp_path / target)
    assert cuda_home.nvcc_version(cuda).startswith("13.0.")


def test_a_toolkit_is_made_anew_but_nothing_else_is_replaced(
    toolkit: Path, cuda: Path, tmp_path: Path
) -> None:
    packages = cmake.purelib(toolkit / "bin" / "python")
    cuda_home.assemble(packages, cuda, probe=False)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(BadFileError, match=str(tmp_path)):
        cuda_home.assemble(packages, tmp_path, probe=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_stand_in_is_loaded_as_libcuda_and_refuses(cuda: Path, tmp_path: Path) -> None:
    out = tmp_path / libcuda_stub.SONAME
    api = libcuda_stub.build(cuda / "include", out)
    driver = ctypes.CDLL(str(out))
    missing = [name for name in api.symbols if not hasattr(driver, name)]
    assert not missing
    assert {"cuMemAlloc_v2", "cuLaunchKernel_ptsz", "cuGetProcAddress_v2"} <= set(api.symbols)
    assert driver.cuInit(0) == NO_DEVICE
    assert driver.cuMemCreate(None, 0, None, 0) == NOT_INITIALIZED
    text = ctypes.c_char_p()
    assert driver.cuGetErrorString(NO_DEVICE, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_NO_DEVICE"
    assert driver.cuGetErrorName(98765, ctypes.byref(text)) != 0
    version = ctypes.c_int()
    assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value == api.version
    function = ctypes.c_void_p()
    for name in ("cuInit", "cuMemAlloc", "cuGetProcAddress"):
        assert driver.cuGetProcAddress(name.encode(), ctypes.byref(function), 13000, 0) == 0
        assert function.value
    assert driver.cuGetProcAddress(b"cuNone", ctypes.byref(function), 13000, 0) == NOT_FOUND


def test_two_stand_ins_are_the_same_bytes(cuda: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        libcuda_stub.build(cuda / "include", tmp_path / name / libcuda_stub.SONAME)
    first, second = ((tmp_path / name / libcuda_stub.SONAME).read_bytes() for name in ("a", "b"))
    assert first == second


# A release in small: one module, built and installed by CMake as the real one's are.
CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.26)
project(demo LANGUAGES CXX)
message(STATUS "CUDA supported target architectures: 12.0a")
add_library(demo MODULE csrc/demo.cpp)
set_target_properties(demo PROPERTIES PREFIX "" SUFFIX ".abi3.so" INSTALL_RPATH "${DEMO_RPATH}")
install(TARGETS demo LIBRARY DESTINATION vllm COMPONENT demo)
"""
DEMO = 'extern "C" const char *where() { return __FILE__; }\n'
MODULE = Module(
    target="demo",
    path="vllm/demo.abi3.so",
    inputs=("csrc/*",),
    sources=(),
    cpu_seconds=1,
    peak_gib=0.1,
)
DEMO_BASE = dataclasses.replace(BASE, modules=(MODULE,))

Build = Callable[..., native.NativeRecord]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    for name in ("csrc", "cmake"):
        (folder / name).mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(CMAKE_LISTS)
    (folder / "csrc" / "demo.cpp").write_text(DEMO)
    return folder


@pytest.fixture
def build(toolkit: Path, cuda: Path) -> Build:
    def compile_in(
        tree: Path, out: Path, modules: tuple[Module, ...] = (MODULE,)
    ) -> native.NativeRecord:
        settings = cmake.Settings(
            cuda_home=cuda,
            work=out.with_name(f"{out.name}.work"),
            python=toolkit / "bin" / "python",
            archs=arch.validate("12.0a;12.1a", default=""),
        )
        choice = selection.ModuleChoice(modules=modules, kept=())
        return native.build(DEMO_BASE, tree, out, choice, settings)

    return compile_in


def test_a_module_is_the_same_bytes_wherever_it_was_built(
    tree: Path, build: Build, tmp_path: Path
) -> None:
    record = build(tree, tmp_path / "a")
    assert build(tree, tmp_path / "much" / "deeper" / "b") == record
    first = (tmp_path / "a" / MODULE.path).read_bytes()
    assert (tmp_path / "much" / "deeper" / "b" / MODULE.path).read_bytes() == first
    assert b"/vllm/csrc/demo.cpp" in first
    assert str(tmp_path).encode() not in first
    assert record.cmake_archs == "12.0a"
    assert native.read(tmp_path / "a") == record


LOCAL_KERNEL = """
namespace { __global__ void k(float *x) { *x = __LINE__; } }
KIND const char *f(float *x) { k<<<1, 1>>>(x); return __FILE__; }
"""
# Marlin's units are like the second: no function of theirs has a name of its own in the program.
CUDA_UNITS = {
    "a function": LOCAL_KERNEL.replace("KIND", ""),
    "templates": LOCAL_KERNEL.replace("KIND", "template <int N>")
    + "template const char *f<1>(float *);\n",
}


@pytest.mark.parametrize("kind", CUDA_UNITS)
def test_a_cuda_unit_is_the_same_bytes_wherever_it_was_compiled(
    cuda: Path, tmp_path: Path, kind: str
) -> None:
    """nvcc names local kernels after their source's path and, in some units, its process id."""
    text = CUDA_UNITS[kind]
    objects = []
    for folder in (tmp_path / "a", tmp_path / "much" / "deeper" / "b"):
        folder.mkdir(parents=True)
        (folder / "k.cu").write_text(text)
        before = [sys.executable, "-I", "-S", launcher.__file__]
        words: list[str | Path] = [cuda / "bin" / "nvcc", "-arch=sm_120a"]
        words += ["-Xcompiler=-fPIC", f"-Xcompiler=-ffile-prefix-map={folder}=/vllm", "-x", "cu"]
        run(*before, *words, "-c", folder / "k.cu", "-o", folder / "k.o")
        run("g++", "-shared", "-s", "-o", folder / "k.so", folder / "k.o")
        objects.append((folder / "k.so").read_bytes())
    assert objects[0] == objects[1]
    assert b"/vllm/k.cu" in objects[0]


def test_a_second_run_compiles_only_what_changed(tree: Path, build: Build, tmp_path: Path) -> None:
    out = tmp_path / "native"
    build(tree, out)
    log = out.with_name("native.work") / "logs" / "ninja.log"
    compiled = log.read_text().count("Building CXX object")
    build(tree, out)
    assert log.read_text().count("Building CXX object") == compiled == 1
    (tree / "csrc" / "demo.cpp").write_text(DEMO + "int more;\n")
    build(tree, out)
    assert log.read_text().count("Building CXX object") == 2


def test_a_compile_error_names_module_lines_and_command(
    tree: Path, build: Build, tmp_path: Path
) -> None:
    out = tmp_path / "native"
    build(tree, out)
    (tree / "csrc" / "demo.cpp").write_text("int x = nonsense;\n")
    with pytest.raises(BuildFailedError) as caught:
        build(tree, out)
    said = str(caught.value)
    assert "csrc/demo.cpp, a unit of demo, could not be compiled; its last lines:" in said
    assert "nonsense" in said
    assert f"read {out}.work/logs/ninja.log; repeat it alone with `" in said
    # The command does what it says, without us.
    alone = said.rpartition("repeat it alone with `")[2].partition("`")[0]
    assert shlex.split(alone)[1:] == [
        "-C",
        f"{out}.work/build",
        "CMakeFiles/demo.dir/csrc/demo.cpp.o",
    ]
    done = subprocess.run(shlex.split(alone), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nonsense" in done.stdout
    # What was there before is what it was.
    assert native.read(out).modules


def test_nothing_to_compile_leaves_a_record_and_no_module(
    tree: Path, build: Build, tmp_path: Path
) -> None:
    out = tmp_path / "native"
    build(tree, out)
    assert build(tree, out, ()).modules == ()
    assert [path.name for path in out.rglob("*") if path.is_file()] == [native.RECORD]


def test_a_wrong_architecture_is_one_line_and_nothing_is_made(tree: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sm12x", "build", "native", "--base", BASE.version]
    words += ["--source", str(tree), "--cuda-home", str(tree), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*words, "--arch-list", "12.1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 10
    assert "use 12.1a" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="session")
def sdist() -> Path:
    return index.fetch("vllm", BASE.sdist.name, BASE.sdist.sha256, cache=layout.cache())


@pytest.fixture
def stacked(tmp_path: Path, sdist: Path, monkeypatch: pytest.MonkeyPatch) -> Base:
    """The real base with a stack of one patch, of a file that is Python and one that is native."""
    root = tmp_path / "root"
    folder = root / "patches" / BASE.version
    folder.mkdir(parents=True)
    for path in BASE.folder.iterdir():
        if path.suffix in (".toml", ".lock"):
            (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("SM12X_ROOT", str(root))
    _write_patch(tmp_path, sdist, folder)
    (folder / "series").write_text("0001-Try-it.patch\n")
    return bases.load(BASE.version)


def _write_patch(tmp_path: Path, sdist: Path, folder: Path) -> None:
    """Made of the sdist's own text, by git, so that it always applies."""
    repository = tmp_path / "repository"
    repository.mkdir()
    edited = ("csrc/cumem_allocator.cpp", "vllm/device_allocator/cumem.py")
    top = BASE.sdist.name.removesuffix(".tar.gz")
    members = [f"{top}/{name}" for name in edited]
    run("tar", "-xzf", sdist, "-C", repository, "--strip-components=1", *members)

    def git(*words: str) -> None:
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", repository, *who, *words], check=True, capture_output=True)

    git("init")
    git("add", "-A")
    git("commit", "-m", "base")
    for name in edited:
        path = repository / name
        path.write_text(path.read_text() + ("// end\n" if name.endswith("cpp") else "# end\n"))
    (repository / "vllm" / "added.py").write_text("X = 1\n")
    git("add", "-A")
    trailers = "Upstream: none (a test)\nDrop-when: never\nWitness: tests/x.py"
    git("commit", "-m", f"Try it\n\nA patch that a test makes.\n\n{trailers}")
    git("format-patch", "-1", "--zero-commit", "--no-signature", "-N", "-o", str(folder))


def test_the_source_is_patched_once_and_recorded(
    stacked: Base, sdist: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tree"
    record, done = patched.prepare(stacked, sdist, out)
    assert done
    assert [file.path for file in record.files] == [
        "csrc/cumem_allocator.cpp",
        "vllm/added.py",
        "vllm/device_allocator/cumem.py",
    ]
    touched = patched.read_touched(out)
    assert touched.targets == ("cumem_allocator",)
    assert [file.path for file in touched.files] == ["csrc/cumem_allocator.cpp"]
    patched.verify(out, record.files)
    assert patched.prepare(stacked, sdist, out) == (record, False)

    (out / "vllm" / "added.py").write_text("X = 2\n")
    with pytest.raises(BadFileError, match=r"added\.py"):
        patched.verify(out, record.files)
    # Edited, so it is made again.
    assert patched.prepare(stacked, sdist, out) == (record, True)
    assert not list(tmp_path.glob(".tree.*"))


def test_only_the_pinned_sdist_is_unpacked(stacked: Base, tmp_path: Path) -> None:
    other = tmp_path / BASE.sdist.name
    other.write_bytes(b"other")
    with pytest.raises(HashMismatchError, match="f4c33c25"):
        patched.prepare(stacked, other, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_folder_of_the_users_is_not_replaced(stacked: Base, sdist: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").write_text("x")
    with pytest.raises(BadFileError, match="has no record of this command"):
        patched.prepare(stacked, sdist, tmp_path / "tree")
    assert (tmp_path / "tree" / "mine").is_file()


def test_the_real_official_wheel_patched_twice_is_the_same_and_whole(
    stacked: Base, sdist: Path, tmp_path: Path
) -> None:
    pinned = BASE.wheels[MACHINE]
    official = wheel.inspect(index.fetch("vllm", pinned.name, pinned.sha256, cache=layout.cache()))
    out = tmp_path / "tree"
    record, _ = patched.prepare(stacked, sdist, out)
    nothing = dataclasses.replace(tiny.NATIVE, modules=())
    version = ledgers.wheel_version(BASE.version, record.stack_id, tiny.LEDGER.mode)
    changed = wheel.changes(official, out, record, out, nothing, version)
    made = dataclasses.replace(
        tiny.LEDGER,
        base_version=BASE.version,
        stack_id=record.stack_id,
        files=tuple(change.entry() for change in changed),
    )
    paths = [
        tmp_path / folder / wheel.name(official, BASE.version, version, nothing)
        for folder in ("a", "b")
    ]
    for path in paths:
        wheel.write(official, path, changed, made)
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert len(digests) == 1
    assert paths[0].name == f"vllm-{version}-cp38-abi3-manylinux_2_28_{MACHINE}.whl"
    with zipfile.ZipFile(paths[0]) as archive:
        rows = list(
            csv.reader(io.StringIO(archive.read(f"vllm-{version}.dist-info/RECORD").decode()))
        )
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, _ in rows[:-1]:
            found = hashlib.sha256(archive.read(name)).digest()
            assert digest == f"sha256={urlsafe_b64encode(found).rstrip(b'=').decode()}", name
    # An installer takes it, and what it installed says the stack id.
    uv = Path(sys.executable).parent / "uv"
    target = tmp_path / "installed"
    words = (uv, "pip", "install", "-q", "--no-deps", "--python-version", BASE.python)
    run(*words, "--target", target, paths[0])
    assert f"'{version}'" in (target / "vllm" / "_version.py").read_text()
    ledger = target / f"vllm-{version}.dist-info" / "sm12x-ledger.json"
    assert json.loads(ledger.read_text())["stack_id"] == record.stack_id
