"""What tests.gpu.payload takes of a lock, and where tests.gpu.native puts what it compiled."""

from __future__ import annotations

import runpy
import sys
import zipfile
from pathlib import Path

import pytest
from tests.gpu import native, payload

from sm12x.core import index
from sm12x.stack.model import base as bases
from sm12x.stack.worktree import tree as source_tree
from sm12x.wheel.assemble import torch_ops
from sm12x.wheel.compile import native as compiling
from sm12x.wheel.source import patched, third_party

ALLOCATOR = "csrc/cumem_allocator.cpp"
HAVE = ["NumPy", "torch", "tilelang", "apache_tvm_ffi"]


def names(requirements: list[str]) -> set[str]:
    return {one.partition("==")[0] for one in requirements}


@pytest.mark.parametrize("version", bases.versions())
def test_what_a_host_is_given(version: str) -> None:
    base = bases.load(version)
    closure, extras = payload.wanted(base, HAVE)
    assert "numpy" not in names(closure)
    assert names(extras) == {extra.package for extra in base.extras}
    assert not names(extras) & names(closure)
    # What the host has in a version that does not do.
    assert "apache-tvm-ffi" in names(closure)


def test_a_host_with_another_torch_is_given_what_fits_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = bases.load("0.33.0")
    closure, extras = payload.wanted(base, HAVE)
    assert {"torch", "triton", "nvidia-nccl-cu13", "nvidia-cutlass-dsl"} <= names(closure)
    assert names(extras) == {"b12x"}
    monkeypatch.setattr(payload, "HOST_TORCH", base.toolchain.torch)
    closure, _ = payload.wanted(base, HAVE)
    assert not {"torch", "nvidia-nccl-cu13"} & names(closure)


def test_packages_that_a_pth_file_names_are_found_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, f"{tmp_path}"])
    (tmp_path / "dsl" / "packages").mkdir(parents=True)
    (tmp_path / "dsl.pth").write_text("dsl/packages\n")
    (tmp_path / "sitecustomize.py").write_text(payload.SITE)
    runpy.run_path(f"{tmp_path / 'sitecustomize.py'}")
    assert f"{tmp_path / 'dsl' / 'packages'}" in sys.path


def test_a_compiled_module_replaces_the_bundle_s_in_a_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases.load("0.33.0")
    (module,) = (one for one in base.modules if one.target == "_vllm_fa2_C")
    official = tmp_path / "stack" / module.path
    official.parent.mkdir(parents=True)
    official.write_bytes(b"official")
    (tmp_path / "stack" / "kept.py").write_text("kept")
    (tmp_path / "third-party" / "flash-attention").mkdir(parents=True)
    (tmp_path / "third-party" / "qutlass").mkdir()
    asked: dict[str, object] = {}

    def build(
        base: bases.Base, source: Path, out: Path, choice: object, *rest: object, **_: object
    ) -> compiling.NativeRecord:
        asked.update(source=source, sources=base.modules[0].sources)
        (out / module.path).parent.mkdir(parents=True)
        (out / module.path).write_bytes(b"compiled")
        return compiling.NativeRecord(
            base_version=base.version, inputs="", arch_list="", cmake_archs="", compiler="",
            nvcc="", modules=(),
        )  # fmt: skip

    monkeypatch.setattr(compiling, "build", build)
    ops = {b"official": ("bwd", "fwd"), b"compiled": ("fwd",)}
    monkeypatch.setattr(
        torch_ops,
        "read",
        lambda path: torch_ops.Registered(ops=ops[path.read_bytes()], names=()),
    )
    report = native.compile_into(
        tmp_path, base, [module.target], "9.0a;12.0a;12.1a", Path("/usr/local/cuda")
    )
    assert report.modules == {module.path: native.ModuleOps(ops=("fwd",), lost=("bwd",))}
    assert asked == {"source": tmp_path / "source", "sources": ("flash-attention", "qutlass")}
    assert (tmp_path / "native" / module.path).read_bytes() == b"compiled"
    assert (tmp_path / "native" / "kept.py").samefile(tmp_path / "stack" / "kept.py")
    assert official.read_bytes() == b"official"


@pytest.mark.parametrize("is_given", [True, False])
def test_sources_are_packed_without_what_no_unit_includes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    base = bases.load("0.33.0")
    given = tmp_path / "checkout"
    for name in ("csrc/cutlass/include/x.h", "csrc/cutlass/docs/x.md", ".git/HEAD", "csrc/x.cu"):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).touch()

    def prepare(of: bases.Base, sdist: Path, out: Path) -> None:
        for name in (
            "CMakeLists.txt",
            "cmake/utils.cmake",
            ALLOCATOR,
            "csrc/y.cu",
            "vllm/config.py",
        ):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("patched")

    def unpack(archive: Path, folder: Path) -> None:
        (folder / "csrc").mkdir(parents=True)
        (folder / ALLOCATOR).write_text("released")

    def collect(of: bases.Base, **options: object) -> dict[str, third_party.FoundSource]:
        absent = third_party.FoundSource(name="qutlass", pin="1", folder=None)
        found = third_party.FoundSource(name="flash-attention", pin="2", folder=given)
        return {one.name: one for one in (absent, found)}

    monkeypatch.setattr(index, "fetch", lambda *names, **options: tmp_path / "sdist")
    monkeypatch.setattr(patched, "prepare", prepare)
    monkeypatch.setattr(third_party, "collect", collect)
    monkeypatch.setattr(source_tree, "unpack", unpack)
    tree = tmp_path / "tree"
    for name in ("stock", "stack"):
        payload.add_source(base, tree, name, native=is_given and name == "stack")
    if is_given:
        payload.add_third_party(base, {"flash-attention": given}, tree)
    packed = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    compiled = {
        "source/CMakeLists.txt",
        "source/cmake/utils.cmake",
        "source/csrc/y.cu",
        "third-party/flash-attention/csrc/cutlass/include/x.h",
        "third-party/flash-attention/csrc/x.cu",
        f"source/{ALLOCATOR}",
    }
    allocators = {f"stack/{ALLOCATOR}", f"stock/{ALLOCATOR}"}
    assert packed == (allocators | compiled if is_given else allocators)
    assert (tree / "stack" / ALLOCATOR).read_text() == "patched"
    assert (tree / "stock" / ALLOCATOR).read_text() == "released"


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_what_of_a_bundle_the_official_wheel_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = "vllm/edited.py"
    same = {"vllm/same.py": "same", "vllm/_C.abi3.so": "native"}
    ours = {edited: "patched", "vllm/added.py": "", "vllm-1+sm12x.dist-info/METADATA": ""}
    official = {edited: "released", "vllm-1.dist-info/METADATA": ""}
    installed: list[str] = []

    def install(requirements: list[str], folder: Path, python: str) -> None:
        installed.extend(requirements)
        (folder / "vllm_sleep_keep.py").touch()

    monkeypatch.setattr(payload, "install", install)
    tree = tmp_path / "tree"
    payload.add_stack(
        wheel(tmp_path / "ours.whl", {**same, **ours}),
        wheel(tmp_path / "official.whl", {**same, **official}),
        "3.12",
        tree,
    )
    packed = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    stack = {f"stack/{name}" for name in (*ours, "vllm_sleep_keep.py")}
    assert packed == stack | {"changed.txt", "removed.txt"}
    assert (tree / "stack" / edited).read_text() == "patched"
    assert (tree / "removed.txt").read_text().split() == ["vllm-1.dist-info/METADATA"]
    changed = {edited, "vllm/added.py", "vllm_sleep_keep.py"}
    assert {*(tree / "changed.txt").read_text().split()} == changed
    assert [Path(name).name for name in installed] == ["sleep-keep"]
