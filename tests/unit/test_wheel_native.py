"""What is compiled, how much of it at a time, and what the build's copy of the source keeps."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from sm12x.core import cudaarch
from sm12x.core.errors import BadFileError, BuildFailedError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Module
from sm12x.wheel import selection
from sm12x.wheel.compile import cmake, compiling, native
from sm12x.wheel.toolchain import cuda_home


def _module(target: str, *inputs: str, peak_gib: float = 1.0) -> Module:
    return Module(
        target=target,
        path=f"vllm/{target}.abi3.so",
        inputs=inputs,
        sources=(),
        cpu_seconds=1,
        peak_gib=peak_gib,
    )


@pytest.fixture
def base() -> Base:
    loaded = bases.load(bases.versions()[0])
    modules = (
        _module("allocator", "csrc/alloc.cpp", "csrc/*.h"),
        _module("moe", "csrc/moe/**", "csrc/*.h", "csrc/**/*.cuh"),
    )
    return dataclasses.replace(loaded, modules=modules)


@pytest.mark.parametrize(
    ("paths", "targets"),
    [
        ([], []),
        (["vllm/envs.py", "tests/test_x.py"], []),
        (["csrc/alloc.cpp"], ["allocator"]),
        (["csrc/moe/topk.cu"], ["moe"]),
        (["csrc/moe/deep/down/topk.cu", "csrc/alloc.cpp"], ["allocator", "moe"]),
        (["csrc/dispatch.h"], ["allocator", "moe"]),
        (["csrc/a/b/c.cuh"], ["moe"]),
    ],
)
def test_a_module_is_compiled_if_one_of_its_sources_changed(
    base: Base, paths: list[str], targets: list[str]
) -> None:
    assert [module.target for module in selection.touched(base, paths)] == targets


@pytest.mark.parametrize("path", ["csrc/other.cu", "csrc/deep/alloc.cpp", "cmake/x.cmake"])
def test_a_native_file_of_no_module_is_an_error(base: Base, path: str) -> None:
    with pytest.raises(BuildFailedError, match=path):
        selection.touched(base, [path])


@pytest.mark.parametrize("version", bases.versions())
def test_each_module_is_made_of_sources_the_base_declares(version: str) -> None:
    loaded = bases.load(version)
    declared = {source.name for source in loaded.sources}
    assert all(declared >= set(module.sources) for module in loaded.modules)
    assert len({module.path for module in loaded.modules}) == len(loaded.modules)


@pytest.mark.parametrize("version", bases.versions())
def test_the_allocator_is_compiled_alone(version: str) -> None:
    """Quick mode takes minutes because no other module has the allocator's source."""
    found = selection.touched(bases.load(version), ["csrc/cumem_allocator.cpp"])
    assert [module.target for module in found] == ["cumem_allocator"]


def _tree(folder: Path) -> Path:
    (folder / "csrc").mkdir(parents=True)
    (folder / "cmake").mkdir()
    (folder / "CMakeLists.txt").write_text("project(x)\n")
    (folder / "csrc" / "a.cu").write_text("a\n")
    (folder / "csrc" / "b.cu").write_text("b\n")
    return folder


def test_the_copy_touches_only_what_differs_and_keeps_what_cmake_made(tmp_path: Path) -> None:
    source, copy = _tree(tmp_path / "src"), tmp_path / "work" / "src"
    cmake.sync(source, copy)
    (copy / "csrc" / "generated.cu").write_text("kernel\n")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    (source / "csrc" / "a.cu").write_text("A\n")
    (source / "csrc" / "b.cu").unlink()

    cmake.sync(source, copy)

    assert (copy / "csrc" / "a.cu").read_text() == "A\n"
    assert not (copy / "csrc" / "b.cu").exists()
    assert (copy / "csrc" / "generated.cu").exists()
    assert (copy / "CMakeLists.txt").stat().st_mtime == 1
    assert (copy / "csrc" / "a.cu").stat().st_mtime > 1


def test_a_description_that_does_not_configure_costs_nothing_that_was_compiled(
    tmp_path: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def run(words: object, variables: object, log: Path, what: str, on_line: object) -> None:
        calls.append(log)
        if "typo" in (tmp_path / "src" / "CMakeLists.txt").read_text():
            raise BuildFailedError(what, next_step="")

    monkeypatch.setattr(cmake, "run", run)
    monkeypatch.setattr(cmake, "tool", lambda name, python: Path(name))
    monkeypatch.setattr(cmake, "purelib", lambda python: tmp_path)
    settings = cmake.Settings(cuda_home=tmp_path, work=tmp_path, python=tmp_path, archs=())
    _tree(tmp_path / "src")
    compiled = tmp_path / "build" / "a.o"

    cmake.configure(base, (), settings, None)
    compiled.parent.mkdir()
    compiled.write_text("")
    for text, fine in (("typo", False), ("typo", False), ("corrected", True)):
        (tmp_path / "src" / "CMakeLists.txt").write_text(text)
        with nullcontext() if fine else pytest.raises(BuildFailedError):
            cmake.configure(base, (), settings, None)
        assert compiled.exists()
    cmake.configure(base, (), settings, None)
    assert len(calls) == 4
    # Another compiler is another matter.
    cmake.configure(base, (), dataclasses.replace(settings, cuda_home=tmp_path / "b"), None)
    assert not compiled.exists()


@pytest.mark.parametrize(
    ("asked", "taken", "lost"),
    [
        ("12.0a;12.1a", "12.0a;12.1a", ""),
        ("12.0a;12.1a", "12.0a", "12.1a"),
        ("12.0a", "12.0f", ""),
        ("9.0a;12.0f", "12.0f", "9.0a"),
        ("12.0a", "", "12.0a"),
        ("12.0a", "whatever", ""),
    ],
)
def test_what_cmake_leaves_out_is_said_before_anything_is_compiled(
    base: Base, tmp_path: Path, asked: str, taken: str, lost: str
) -> None:
    settings = cmake.Settings(
        cuda_home=tmp_path, work=tmp_path, python=tmp_path, archs=cudaarch.parse_list(asked)
    )
    slow = tuple(module for module in base.modules if not module.quick)
    expected = pytest.raises(BuildFailedError, match=lost or None)
    with expected if lost else nullcontext():
        native._require_all(base, slow, settings, taken)
    host = tuple(dataclasses.replace(module, quick=True) for module in slow)
    native._require_all(base, host, settings, taken)


def test_the_hash_of_the_inputs_sees_names_and_contents(tmp_path: Path) -> None:
    source = _tree(tmp_path / "src")
    first = cmake.inputs_hash(source)
    (source / "vllm.py").write_text("not compiled\n")
    assert cmake.inputs_hash(source) == first
    (source / "csrc" / "a.cu").rename(source / "csrc" / "c.cu")
    assert cmake.inputs_hash(source) != first


def test_cmake_gets_a_real_source_only_where_it_is_compiled(tmp_path: Path, base: Base) -> None:
    source = base.sources[0]
    user = dataclasses.replace(_module("m"), sources=(source.name,))
    real, made = tmp_path / "real", tmp_path / "made"
    assert cmake.available(base, None) == cmake.available(base, real) == frozenset()
    _tree(real / source.name)
    assert cmake.available(base, real) == {source.name}
    assert cmake.third_party(source, [user], real, made) == real / source.name
    for modules, folder in (([_module("n")], real), ([user], None)):
        stand_in = cmake.third_party(source, modules, folder, made)
        assert stand_in == made / source.name
        assert (stand_in / "README").is_file()


def _choice(base: Base) -> Base:
    first, second = (source.name for source in base.sources[:2])
    modules = (
        dataclasses.replace(_module("light"), quick=True),
        dataclasses.replace(_module("one"), sources=(first,)),
        dataclasses.replace(_module("two"), sources=(first, second)),
    )
    return dataclasses.replace(base, modules=modules)


def test_quick_mode_compiles_what_is_touched_and_cheap(base: Base) -> None:
    found = selection.choose(_choice(base), {"light", "two"}, mode="quick")
    assert [module.target for module in found.modules] == ["light"]
    assert [(kept.target, kept.missing) for kept in found.kept] == [("two", ())]
    assert "quick mode does not compile it" in found.kept[0].reason


def test_full_mode_keeps_a_module_that_would_lose_ops(base: Base) -> None:
    first, second = (source.name for source in base.sources[:2])
    several = _choice(base)
    found = selection.choose(several, (), mode="full", available={first})
    assert [module.target for module in found.modules] == ["light", "one"]
    assert [(kept.target, kept.missing) for kept in found.kept] == [("two", (second,))]
    assert second in found.kept[0].reason


@pytest.mark.parametrize("version", bases.versions())
def test_quick_mode_stays_quick(version: str) -> None:
    """A patch of the architecture lists touches every module; quick mode must not follow it."""
    loaded = bases.load(version)
    touched = [module.target for module in selection.touched(loaded, ["CMakeLists.txt"])]
    found = selection.choose(loaded, touched, mode="quick")
    assert sum(module.cpu_seconds for module in found.modules) < 60


def test_a_source_of_another_version_is_not_compiled(base: Base, tmp_path: Path) -> None:
    (one,) = (source for source in base.sources if source.version_file)
    header = tmp_path / "sources" / one.name / one.version_file
    header.parent.mkdir(parents=True)
    header.write_text("".join(f"#define {name} 9\n" for name in one.defines))
    modules = (dataclasses.replace(base.modules[0], sources=(one.name,)),)
    settings = cmake.Settings(
        cuda_home=tmp_path,
        work=tmp_path / "work",
        python=tmp_path,
        archs=cudaarch.parse_list("12.0a"),
        third_party=tmp_path / "sources",
    )
    choice = selection.ModuleChoice(modules=modules, kept=())
    with pytest.raises(BadFileError, match=rf"{one.name} v9\.9\.9.* {one.pin}"):
        native.build(base, _tree(tmp_path / "src"), tmp_path / "out", choice, settings, mode="full")
    assert not (tmp_path / "out").exists()


def test_a_record_names_the_version_of_each_source_that_was_compiled(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = (source for source in base.sources if source.version_file)
    other, unused = [source for source in base.sources if not source.version_file][:2]
    numbers = [*one.pin.removeprefix("v").split(".")[:-1], "99"]
    header = tmp_path / "sources" / one.name / one.version_file
    header.parent.mkdir(parents=True)
    header.write_text(
        "".join(f"#define {name} {n}\n" for name, n in zip(one.defines, numbers, strict=True))
    )
    for source in (other, unused):
        _tree(tmp_path / "sources" / source.name)
    modules = (dataclasses.replace(base.modules[0], sources=(one.name, other.name)),)
    settings = cmake.Settings(
        cuda_home=tmp_path,
        work=tmp_path / "work",
        python=tmp_path,
        archs=cudaarch.parse_list("12.0a"),
        third_party=tmp_path / "sources",
    )
    choice = selection.ModuleChoice(modules=modules, kept=())
    made = native.NativeModule(target="x", path="x.so", sha256="", size=1, glibc="")
    for where, name, value in (
        (cmake, "sync", None),
        (cmake, "configure", "12.0a"),
        (cmake, "install_module", None),
        (compiling, "compile_modules", {}),
        (cuda_home, "nvcc_version", "13.0"),
        (native, "_describe", made),
        (native, "_compiler_version", "c++"),
        (native, "_publish", None),
    ):
        monkeypatch.setattr(where, name, lambda *_, value=value, **__: value)
    tree = _tree(tmp_path / "src")
    out = tmp_path / "out"
    with pytest.raises(BadFileError, match=r"\.99\b"):
        native.build(base, tree, out, choice, settings, patch_levels=(other.name,))
    record = native.build(base, tree, out, choice, settings, patch_levels=(one.name,))
    names = [entry.name for entry in base.sources if entry.name in (one.name, other.name)]
    assert [entry.name for entry in record.sources] == names
    assert {entry.name: (entry.pin, entry.version) for entry in record.sources} == {
        one.name: (one.pin, f"v{'.'.join(numbers)}"),
        other.name: (other.pin, ""),
    }
