"""The wheel for aarch64 (GB10), made on x86_64: the real release, compilers, packages and wheel.

Takes the Debian package g++-aarch64-linux-gnu, and fails without it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.audit import scan
from sm12x.core import files, index, lockfile, pipconfig
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.wheel import selection
from sm12x.wheel.assemble import torch_ops
from sm12x.wheel.compile import cmake, native
from sm12x.wheel.toolchain import cross

# In each worker that runs one of these tests its fixtures take a minute.
pytestmark = pytest.mark.xdist_group("aarch64")

BASE = bases.load("0.33.0")
MACHINE = "aarch64"
ALLOCATOR = "vllm/cumem_allocator.abi3.so"
# What configuring the release and asking its official modules takes of this machine's build lock.
HOST_PACKAGES = ["torch", "nvidia-cuda-nvcc", "nvidia-cuda-cccl", "cmake", "ninja", "jinja2"]


def sm12x(*words: str | Path, code: int = 0) -> str:
    """Run `sm12x build`; returns what it printed, errors where it is to fail with ``code``."""
    argv = [sys.executable, "-m", "sm12x", "build", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def fetch(machine: str) -> Path:
    pinned = BASE.wheels[machine]
    return index.fetch("vllm", pinned.name, pinned.sha256, cache=layout.cache())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aarch64")


@pytest.fixture(scope="module")
def python(folder: Path) -> Path:
    """A Python of this machine with torch, nvcc, cmake and ninja."""
    text = lockfile.restrict(BASE.build_lock_path("x86_64").read_text(), HOST_PACKAGES)
    # Only torch's compiler imports networkx, whose locked version is for newer Pythons.
    pins = [pin.text for pin in lockfile.parse(text).pins if pin.name != "networkx"]
    (folder / "host.lock").write_text("".join(pins))
    uv = pipconfig.find_uv()
    found = folder / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    install = (uv, "pip", "install", "--quiet", "--python", found, "--no-deps", "--require-hashes")
    subprocess.run([*install, "--requirement", folder / "host.lock"], check=True)
    return found


@pytest.fixture(scope="module")
def packages(folder: Path) -> Path:
    made = folder / "packages"
    sm12x("packages", "--base", BASE.version, "--machine", MACHINE, "--out", made)
    return made


@pytest.fixture(scope="module")
def cuda_home(folder: Path, python: Path, packages: Path) -> Path:
    """A toolkit of this machine that compiles and links for the other: tried as its last step."""
    made = folder / "cuda"
    words = ("--machine", MACHINE, "--target-packages", packages, "--out", made)
    sm12x("toolchain", "--site-packages", cmake.purelib(python), *words)
    return made


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    sdist = index.fetch("vllm", BASE.sdist.name, BASE.sdist.sha256, cache=layout.cache())
    sm12x("source", "--base", BASE.version, "--sdist", sdist, "--out", folder / "src")
    let_gcc_12_configure(folder / "src")
    return folder / "src"


def let_gcc_12_configure(tree: Path) -> None:
    """The release refuses GCC before 13, for libraries of third parties that are not compiled here.

    The builder has a newer one; a machine that runs these tests may not.
    """
    lists = tree / "CMakeLists.txt"
    before, text = files.sha256(lists), lists.read_text()
    assert text.count('VERSION_LESS "13")') == 1
    lists.write_text(text.replace('VERSION_LESS "13")', 'VERSION_LESS "12")'))
    for name in ("src.json", "src.native.json"):
        record = tree.with_name(name)
        record.write_text(record.read_text().replace(before, files.sha256(lists)))


@pytest.fixture(scope="module")
def modules(folder: Path, python: Path, cuda_home: Path, source: Path) -> Path:
    made = folder / "native"
    words = ("--machine", MACHINE, "--cuda-home", cuda_home, "--python", python, "--out", made)
    sm12x("native", "--base", BASE.version, "--source", source, *words)
    return made


@pytest.fixture(scope="module")
def wheel(folder: Path, python: Path, source: Path, modules: Path) -> Path:
    words = ["--base", BASE.version, "--machine", MACHINE, "--official", str(fetch(MACHINE))]
    words += ["--source", str(source), "--native", str(modules), "--python", str(python)]
    sm12x("wheel", *words, "--out", folder / "dist")
    (made,) = (folder / "dist").glob("*.whl")
    return made


def test_the_release_is_compiled_for_the_other_machine(modules: Path, folder: Path) -> None:
    record = native.read(modules)
    touched = selection.for_stack(BASE, series.load(BASE))
    assert [module.target for module in record.modules] == [
        module.target for module in touched if module.quick
    ]
    assert record.compiler.startswith("aarch64-linux-gnu-g++ ")
    for module in record.modules:
        path = modules / module.path
        found = native.dynamic(path)
        assert found.machine == MACHINE
        assert found.runpath == ""
        if module.path == ALLOCATOR:
            assert {"libcuda.so.1", "libtorch.so"} <= set(found.needed)
        assert str(folder).encode() not in path.read_bytes()


def test_the_wheel_is_the_official_one_but_for_what_was_compiled_and_patched(
    wheel: Path, modules: Path
) -> None:
    theirs, ours = scan.scan(fetch(MACHINE)), scan.scan(wheel)
    compiled = {module.path for module in native.read(modules).modules}
    assert ALLOCATOR in compiled
    assert [entry.path for entry in ours.libraries] == [entry.path for entry in theirs.libraries]
    for entry in ours.libraries:
        official = theirs[entry.path]
        assert entry.machine == MACHINE
        assert (entry.sha256 != official.sha256) == (entry.path in compiled)
        assert not entry.unknown
        assert (entry.cubins, entry.ptx) == (official.cubins, official.ptx)
        assert (entry.sm120, entry.sm121) == (official.sm120, official.sm121)
    words = [sys.executable, "-m", "sm12x", "audit", "--base", BASE.version, str(wheel)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "passed" in done.stdout) == (0, True), done.stdout


def test_the_ledger_says_how_it_knows_the_ops(wheel: Path) -> None:
    made = json.loads((wheel.parent / "ledger.json").read_text())
    assert (made["machine"], made["mode"]) == (MACHINE, "quick")
    assert wheel.name == f"vllm-{wheel.name.split('-')[1]}-cp38-abi3-manylinux_2_28_{MACHINE}.whl"
    entries = {entry["path"]: entry for entry in made["libraries"]}
    assert {entry["ops_by"] for entry in entries.values()} == {"read", ""}
    assert "silu_and_mul" in entries["vllm/_C_stable_libtorch.abi3.so"]["ops"]
    assert entries[ALLOCATOR]["origin"] == "compiled"
    with zipfile.ZipFile(wheel) as archive:
        info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
        rows = list(csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, _ in rows[:-1]:
            found = hashlib.sha256(archive.read(name)).digest()
            assert digest == f"sha256={urlsafe_b64encode(found).rstrip(b'=').decode()}", name


def test_the_allocator_has_the_functions_and_symbols_of_the_official_one(
    modules: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(fetch(MACHINE)) as archive:
        official = Path(archive.extract(ALLOCATOR, tmp_path))
    ours, theirs = torch_ops.read(modules / ALLOCATOR), torch_ops.read(official)
    assert {"init_module", "python_create_and_map"} <= set(theirs.names)
    assert set(ours.names) >= set(theirs.names)


def test_what_is_read_out_of_a_library_is_what_loading_it_finds(
    python: Path, tmp_path: Path
) -> None:
    """On this machine's wheel, where both ways work: nothing but what is there, and most of it."""
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with zipfile.ZipFile(fetch("x86_64")) as archive:
        paths = [name for name in archive.namelist() if name.endswith(".abi3.so")]
        paths = [name for name in paths if torch_ops.loads_on(name, running)]
        for name in paths:
            archive.extract(name, tmp_path)
    loaded = torch_ops.find(tmp_path, paths, python=python, purelib=cmake.purelib(python))
    total = 0
    for path in paths:
        found = torch_ops.read(tmp_path / path)
        known = {name.partition("::")[2] for name in loaded[path].ops}
        assert set(found.ops) <= known, path
        assert found.names == loaded[path].names, path
        total += len(found.ops)
    assert total > 0.9 * sum(len(entry.ops) for entry in loaded.values())


def test_a_toolkit_of_one_machine_is_not_taken_for_another(
    cuda_home: Path, python: Path, source: Path, tmp_path: Path
) -> None:
    words = ["--base", BASE.version, "--source", str(source), "--out", str(tmp_path / "out")]
    words += ["--cuda-home", str(cuda_home), "--python", str(python)]
    said = sm12x("native", *words, code=4)
    assert "compiles for aarch64, not for x86_64" in said
    assert len(said.splitlines()) == 1
    purelib = cmake.purelib(python)
    words = ["--site-packages", str(purelib), "--machine", MACHINE, "--out", str(tmp_path / "out")]
    said = sm12x("toolchain", *words, code=2)
    assert "links with packages for aarch64, and none are named" in said
    assert not (tmp_path / "out").exists()


def test_without_the_cross_compiler_its_package_is_named(
    python: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath.replace("/usr/bin", "").replace("/bin", ""))
    words = ("--machine", MACHINE, "--target-packages", packages, "--out", tmp_path / "out")
    said = sm12x("toolchain", "--site-packages", cmake.purelib(python), *words, code=14)
    assert "apt-get install g++-aarch64-linux-gnu" in said
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_only_what_is_linked_with_is_unpacked(packages: Path) -> None:
    names = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    assert names == {name.replace("-", "_") for name in cross.PACKAGES}
