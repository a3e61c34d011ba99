"""What is told to compilers and CMake to build for another machine, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sm12x.core.errors import BadArchitectureError, BadFileError, ToolMissingError
from sm12x.stack.model import base as bases
from sm12x.wheel.toolchain import cross


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def target(tmp_path: Path) -> cross.Target:
    packages = tmp_path / "packages"
    (packages / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (packages / "torch" / "share" / "cmake" / "Torch").mkdir(parents=True)
    return cross.Target(machine="aarch64", packages=packages)


@pytest.mark.parametrize(
    ("machine", "here", "crossing"),
    [("x86_64", "x86_64", False), ("aarch64", "aarch64", False), ("aarch64", "x86_64", True)],
)
def test_a_build_for_another_machine_crosses(machine: str, here: str, crossing: bool) -> None:
    assert cross.needed(machine, here=here) is crossing


@pytest.mark.parametrize(
    ("machine", "here"), [("x86_64", "aarch64"), ("riscv64", "x86_64"), ("aarch64", "riscv64")]
)
def test_what_no_toolkit_compiles_for_is_refused(machine: str, here: str) -> None:
    with pytest.raises(BadArchitectureError, match=f"{machine}.*{here}"):
        cross.needed(machine, here=here)


def test_a_missing_compiler_is_named_with_its_package(
    target: cross.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissingError) as caught:
        target.compiler()
    assert "aarch64-linux-gnu-g++" in caught.value.message
    assert "apt-get install g++-aarch64-linux-gnu" in caught.value.next_step


def test_a_toolkit_remembers_what_it_compiles_for(target: cross.Target, tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    home.mkdir()
    assert cross.find(home, "x86_64") is None
    with pytest.raises(BadFileError, match=r"x86_64.*aarch64"):
        cross.find(home, "aarch64")
    cross.write_marker(target, home)
    assert cross.find(home, "aarch64") == target
    assert (home / "targets" / "sbsa-linux").resolve() == home
    with pytest.raises(BadFileError, match=r"aarch64.*x86_64"):
        cross.find(home, "x86_64")
    (home / cross.MARKER).write_text("{}")
    with pytest.raises(BadFileError, match=cross.MARKER):
        cross.find(home, "aarch64")


def test_packages_that_are_not_unpacked_are_named(target: cross.Target) -> None:
    assert cross.libraries(target, "cu13") == target.packages / "nvidia" / "cu13" / "lib"
    with pytest.raises(BadFileError, match="nvidia/cu14/lib") as caught:
        cross.libraries(target, "cu14")
    assert "sm12x build packages --machine aarch64" in caught.value.next_step


def test_cmake_is_given_the_other_machines_compilers_and_torch(
    target: cross.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("gcc", "g++"):
        (tools / f"aarch64-linux-gnu-{name}").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tools))
    found = cross.definitions(target, tmp_path)
    file = tmp_path / "toolchain-aarch64.cmake"
    assert found[0] == f"-DCMAKE_TOOLCHAIN_FILE={file}"
    assert f"-DTorch_DIR={target.packages}/torch/share/cmake/Torch" in found
    text = file.read_text()
    assert "set(CMAKE_SYSTEM_PROCESSOR aarch64)" in text
    assert f"set(CMAKE_CXX_COMPILER {tools}/aarch64-linux-gnu-g++)" in text
    assert f"set(CMAKE_CUDA_HOST_COMPILER {tools}/aarch64-linux-gnu-g++)" in text
    # Written anew, it would make CMake start over.
    file.chmod(0o444)
    before = file.stat()
    assert cross.definitions(target, tmp_path) == found
    assert file.stat() == before


def test_debians_python_headers_serve_another_machine(
    target: cross.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = tmp_path / "include"
    for name in ("python3.13", "x86_64-linux-gnu/python3.13"):
        (include / name).mkdir(parents=True)
    header = include / "python3.13" / "pyconfig.h"
    names = ("x86_64-linux-gnu", "aarch64-linux-gnu")
    header.write_text("".join(f"#  include <{name}/python3.13/pyconfig.h>\n" for name in names))
    (include / "x86_64-linux-gnu" / "python3.13" / "pyconfig.h").write_text("#define HERE\n")

    def answer(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=f"{header}\n", stderr="")

    monkeypatch.setattr("sm12x.core.process.run", answer)
    found = cross.flags(target, Path("python"), tmp_path / "work")
    assert f"-I{tmp_path}/work/python" in found
    copy = tmp_path / "work" / "python" / "aarch64-linux-gnu" / "python3.13" / "pyconfig.h"
    assert copy.read_text() == "#define HERE\n"
    # Any other Python has one file for itself.
    header.write_text("#define HERE\n")
    found = cross.flags(target, Path("python"), tmp_path / "work")
    assert found == [f"-ffile-prefix-map={target.packages}=/site-packages"]


@pytest.mark.parametrize("version", bases.versions())
def test_the_lock_of_another_machine_has_what_is_linked_with(version: str) -> None:
    base = bases.load(version)
    for machine in (name for name in base.wheels if name != "x86_64"):
        text = cross.lock(base, machine)
        assert [line for line in text.splitlines() if "==" in line and line[0] not in "# "] == [
            line
            for line in base.build_lock_path(machine).read_text().splitlines()
            if line.split("==")[0] in cross.PACKAGES
        ]
        assert "--hash=sha256:" in text


def test_unpacked_packages_are_found_again_and_nothing_else_is_replaced(tmp_path: Path) -> None:
    base = bases.load(bases.versions()[0])
    out = tmp_path / "target"
    out.mkdir()
    (out / "target.lock").write_text(cross.lock(base, "aarch64"))
    # No process is started: conftest would fail it.
    assert cross.unpack(base, "aarch64", out, uv="uv") is False
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    with pytest.raises(BadFileError, match=str(mine)):
        cross.unpack(base, "aarch64", mine, uv="uv")
    assert json.dumps([path.name for path in mine.iterdir()]) == '["file"]'
