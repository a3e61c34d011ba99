"""The units of a build with real CMake, ninja and g++; third-party sources out of real git."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sm12x.core import lockfile
from sm12x.core.errors import BadFileError, BuildFailedError, FetchError, NoSpaceError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Module, ThirdPartySource, UnitCost
from sm12x.wheel.compile import cmake, compiling
from sm12x.wheel.source import third_party

BASE = bases.load(bases.versions()[0])

CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.26)
project(demo LANGUAGES CXX)
add_library(one MODULE csrc/a.cpp csrc/b.cpp)
add_library(two MODULE csrc/c.cpp)
"""
# Stands before the real compiler. For a file named in `killed` beside it, it dies as one that the
# kernel kills; while there is a `slow`, it takes its time.
COMPILER = """\
#!/bin/sh
here=$(dirname "$0")
for word; do
  case $word in
    *.cpp)
      name=$(basename "$word")
      [ ! -f "$here/slow" ] || sleep 1
      if grep -qs "^$name\\$" "$here/killed"; then
        [ -f "$here/always" ] || sed -i "/^$name\\$/d" "$here/killed"
        kill -9 $$
      fi
      ;;
  esac
done
exec /usr/bin/g++ "$@"
"""
MODULES = tuple(
    Module(target=target, path=f"{target}.so", inputs=(), sources=(), cpu_seconds=1, peak_gib=0.1)
    for target in ("one", "two")
)
COSTS = (
    UnitCost(match="c.cpp", cpu_seconds=30, peak_gib=0.1),
    UnitCost(match="b.cpp", cpu_seconds=20, peak_gib=0.1),
    UnitCost(match="", cpu_seconds=10, peak_gib=0.1),
)
DEMO = dataclasses.replace(BASE, modules=MODULES, sources=(), units=COSTS)


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment with cmake and ninja, out of the base's own lock."""
    folder = tmp_path_factory.mktemp("tools")
    lock = BASE.folder / f"build-{platform.machine()}.lock"
    (folder / "lock").write_text(lockfile.restrict(lock.read_text(), ["cmake", "ninja"]))
    uv = Path(sys.executable).parent / "uv"
    python = folder / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder / "venv"], check=True)
    words: list[str | Path] = [uv, "pip", "install", "-q", "--python", python, "--require-hashes"]
    subprocess.run([*words, "-r", folder / "lock"], check=True)
    return python


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "compiler"
    folder.mkdir()
    path = folder / "g++"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    # What is tried here is the compiler, not what a cache remembers of it.
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    return folder


@pytest.fixture
def settings(tools: Path, tmp_path: Path) -> cmake.Settings:
    source = tmp_path / "work" / "src"
    (source / "csrc").mkdir(parents=True)
    (source / "cmake").mkdir()
    (source / "CMakeLists.txt").write_text(CMAKE_LISTS)
    for name in "abc":
        (source / "csrc" / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
    return cmake.Settings(
        cuda_home=tmp_path / "none", work=tmp_path / "work", python=tools, archs=(), jobs=1
    )


def _compile(settings: cmake.Settings, said: list[str] | None = None) -> dict[str, int]:
    cmake.configure(DEMO, MODULES, settings, None)
    return compiling.compile_modules(
        DEMO, MODULES, settings, say=None if said is None else said.append
    )


def _results(settings: cmake.Settings) -> list[tuple[str, int]]:
    lines = (settings.work / compiling.RESULTS).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(Path(entry["unit"]).name.partition(".")[0], entry["status"]) for entry in found]


def test_each_unit_is_counted_and_measured(settings: cmake.Settings, compiler: Path) -> None:
    told: list[tuple[int, int, float | None]] = []
    cmake.configure(DEMO, MODULES, settings, None)

    def step(label: str, done: int, total: int, left: float | None = None) -> None:
        assert label == "compile"
        told.append((done, total, left))

    assert compiling.compile_modules(DEMO, MODULES, settings, on_step=step) == {"one": 2, "two": 1}
    assert sorted(_results(settings)) == [("a", 0), ("b", 0), ("c", 0)]
    steps = dict.fromkeys((done, total) for done, total, _ in told)
    assert list(steps) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    left = [seconds for _, _, seconds in told if seconds is not None]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    entry = json.loads((settings.work / compiling.RESULTS).read_text().splitlines()[0])
    assert 0.001 < entry["peak_gib"] < 1
    assert entry["cpu_seconds"] > 0


def test_units_compile_in_pools_by_memory(settings: cmake.Settings, compiler: Path) -> None:
    _compile(dataclasses.replace(settings, memory_gib=8))
    text = (settings.work / "build" / "pools.ninja").read_text()
    assert text.count("  pool = gib-3\n") == 3


def test_only_the_unit_that_changed_is_compiled_again(
    settings: cmake.Settings, compiler: Path
) -> None:
    _compile(settings)
    (settings.work / "src" / "csrc" / "b.cpp").write_text("int b() { return 2; }\n")
    _compile(settings)
    _compile(settings)
    names = [name for name, _ in _results(settings)]
    assert (sorted(names[:3]), names[3:]) == (["a", "b", "c"], ["b"])


def test_what_cmake_itself_reads_may_have_changed(settings: cmake.Settings, compiler: Path) -> None:
    _compile(settings)
    # The older is what CMake made: a source from the future stays newer than what is made anew.
    earlier = (settings.work / "src" / "CMakeLists.txt").stat().st_mtime - 5
    os.utime(settings.work / "build" / "build.ninja", (earlier, earlier))
    told: list[int] = []

    def step(label: str, done: int, total: int, left: float | None = None) -> None:
        told.append(done)

    assert compiling.compile_modules(DEMO, MODULES, settings, on_step=step) == {"one": 2, "two": 1}
    # CMake has run again, and nothing is left to compile.
    assert told[0] == 3


def test_after_a_compiler_that_the_kernel_kills_one_unit_runs_at_a_time(
    settings: cmake.Settings, compiler: Path
) -> None:
    (compiler / "killed").write_text("b.cpp\n")
    said: list[str] = []
    assert _compile(dataclasses.replace(settings, jobs=3), said) == {"one": 2, "two": 1}
    assert len(said) == 1
    assert "csrc/b.cpp" in said[0]
    assert [entry for entry in _results(settings) if entry[0] == "b"] == [("b", 137), ("b", 0)]


def test_a_compiler_that_is_killed_alone_too_ends_the_build(
    settings: cmake.Settings, compiler: Path
) -> None:
    (compiler / "killed").write_text("b.cpp\n")
    (compiler / "always").touch()
    with pytest.raises(NoSpaceError, match=r"csrc/b\.cpp for lack of memory"):
        _compile(settings)


def test_a_unit_that_fails_is_named_and_none_is_started_after_it(
    settings: cmake.Settings, compiler: Path
) -> None:
    (settings.work / "src" / "csrc" / "c.cpp").write_text("int c() { return nonsense; }\n")
    said: list[str] = []
    with pytest.raises(BuildFailedError, match=r"csrc/c\.cpp, a unit of two") as caught:
        _compile(settings, said)
    assert "nonsense" in str(caught.value)
    # The log lies where nobody gets at it if this is a container: with the command that made it.
    assert any("-c " in line and "c.cpp" in line for line in said)
    assert ("c", 1) in _results(settings)
    (settings.work / "src" / "csrc" / "c.cpp").write_text("int c() { return 1; }\n")
    assert _compile(settings) == {"one": 2, "two": 1}


def test_a_full_disk_is_told_from_other_failures(settings: cmake.Settings, compiler: Path) -> None:
    text = '#error "cannot write: No space left on device"\n'
    (settings.work / "src" / "csrc" / "c.cpp").write_text(text)
    with pytest.raises(NoSpaceError, match=r"csrc/c\.cpp.* \d+\.\d GiB"):
        _compile(settings)


def test_too_little_memory_is_said_before_anything_is_compiled(
    settings: cmake.Settings, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 4.0)
    large = dataclasses.replace(DEMO, units=(UnitCost(match="b.cpp", cpu_seconds=1, peak_gib=8.9),))
    cmake.configure(large, MODULES, settings, None)
    with pytest.raises(NoSpaceError, match=r"csrc/b\.cpp.* 8\.9 GiB.* 4\.0 GiB"):
        compiling.compile_modules(large, MODULES, settings)
    assert not (settings.work / compiling.RESULTS).exists()


# Whoever runs the tests in the background of a shell has SIGINT ignored, and so would this.
DRIVER = """\
import pickle, signal, sys
from sm12x.wheel.compile import compiling
signal.signal(signal.SIGINT, signal.default_int_handler)
compiling.compile_modules(*pickle.load(open(sys.argv[1], "rb")))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_was_ended_goes_on_where_it_stopped(
    settings: cmake.Settings, compiler: Path, tmp_path: Path, number: signal.Signals
) -> None:
    cmake.configure(DEMO, MODULES, settings, None)
    (compiler / "slow").touch()
    plan = tmp_path / "plan"
    plan.write_bytes(pickle.dumps((DEMO, MODULES, settings)))
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, plan], stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 60
    # Until ninja knows that the first has been compiled.
    log = settings.work / "build" / ".ninja_log"
    while not (log.is_file() and ".cpp.o" in log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    driver.send_signal(number)
    assert driver.wait(timeout=20) != 0
    # Nothing of it goes on: what runs is ended, or ends, and ninja starts no other.
    while _processes(settings.work) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _processes(settings.work)
    first = [name for name, _ in _results(settings)]
    assert len(first) in (1, 2)
    (compiler / "slow").unlink()
    _compile(settings)
    # The one that was running may be compiled again; the one before is not.
    later = [name for name, _ in _results(settings)][len(first) :]
    assert first[0] not in later
    assert {*first, *later} == {"a", "b", "c"}


def _processes(folder: Path) -> list[str]:
    """The command lines of processes that work in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            there = path.with_name("cwd").readlink()
        except OSError:
            continue
        if there.is_relative_to(folder):
            found.append(line)
    return found


def git(folder: Path, *words: str) -> str:
    who = [
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    done = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThirdPartySource:
    """A source in a repository with a submodule, where the user's git is told to look for it."""
    for name in ("part", "thing"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / f"{name}.h").write_text("#define THING_MAJOR 3\r\n")
    git(tmp_path / "part", "add", "-A")
    git(tmp_path / "part", "commit", "-q", "-m", "part")
    git(tmp_path / "thing", "submodule", "add", "-q", str(tmp_path / "part"), "sub/part")
    modules = tmp_path / "thing" / ".gitmodules"
    modules.write_text(modules.read_text().replace(str(tmp_path), "https://git.invalid"))
    git(tmp_path / "thing", "add", "-A")
    git(tmp_path / "thing", "commit", "-q", "-m", "thing")
    commit = git(tmp_path / "thing", "rev-parse", "HEAD")
    # Not the newest one: nobody may fetch a branch and call it the pin.
    (tmp_path / "thing" / "thing.h").write_text("later\n")
    git(tmp_path / "thing", "commit", "-q", "-a", "-m", "later")
    home = tmp_path / "home"
    home.mkdir()
    config = f'[url "file://{tmp_path}/"]\n insteadOf = https://git.invalid/\n'
    (home / ".gitconfig").write_text(f'{config}[protocol "file"]\n allow = always\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    return ThirdPartySource(
        name="thing",
        pin="v3",
        override="THING_SRC_DIR",
        stand_in=(),
        git="https://git.invalid/thing",
        commit=commit,
        submodules=("sub/part",),
        version_file="sub/part/part.h",
        defines=("THING_MAJOR",),
    )


def _with(source: ThirdPartySource) -> Base:
    module = dataclasses.replace(BASE.modules[0], sources=(source.name,))
    return dataclasses.replace(BASE, modules=(module,), sources=(source,))


def test_a_source_is_one_commit_of_a_repository_with_its_submodules(
    source: ThirdPartySource, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    found = third_party.collect(_with(source), cache=cache)["thing"]
    assert (found.reason, found.origin) == ("", "git")
    assert found.folder is not None
    names = [path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*")]
    assert sorted(names) == [".gitmodules", "sub", "sub/part", "sub/part/part.h", "thing.h"]
    assert (found.folder / "thing.h").read_bytes() == b"#define THING_MAJOR 3\r\n"
    # From here on no repository is needed.
    (tmp_path / "home" / ".gitconfig").unlink()
    assert third_party.collect(_with(source), cache=cache)["thing"] == found


def test_a_commit_or_a_host_that_is_not_there_is_said_quickly(
    source: ThirdPartySource, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"0{12}"):
        third_party.fetch(source.git, "0" * 40, (), tmp_path / "a")
    away = dataclasses.replace(source, git="https://nowhere.invalid/thing.git")
    found = third_party.collect(_with(away), cache=tmp_path / "cache")["thing"]
    assert found.folder is None
    assert away.git in found.reason
    assert time.monotonic() - start < third_party.PROBE_TIMEOUT
    assert not list((tmp_path / "cache").glob("third_party/*"))


def test_a_given_checkout_is_the_pinned_commit_or_refused(
    source: ThirdPartySource, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    git(tmp_path, "clone", "-q", "--recurse-submodules", "https://git.invalid/thing", str(mine))
    head = git(mine, "rev-parse", "HEAD")
    given = {"thing": mine}
    with pytest.raises(BadFileError, match=f"{head}.*{source.commit}"):
        third_party.collect(_with(source), cache=tmp_path / "cache", given=given)
    git(mine, "checkout", "-q", source.commit)
    said: list[str] = []
    found = third_party.collect(
        _with(source), cache=tmp_path / "cache", given=given, say=said.append
    )["thing"]
    assert (found.folder, found.origin, said) == (mine, "given", [])
    (mine / "thing.h").write_text("mine\n")
    third_party.collect(_with(source), cache=tmp_path / "cache", given=given, say=said.append)
    (line,) = said
    assert str(mine) in line
    assert "thing.h" in line


def test_a_checkout_of_another_patch_level_may_be_of_another_commit(
    source: ThirdPartySource, tmp_path: Path
) -> None:
    dotted = dataclasses.replace(source, pin="v3.1", defines=("THING_MAJOR", "THING_PATCH"))
    older = tmp_path / "older"
    (older / "sub" / "part").mkdir(parents=True)
    header = older / source.version_file
    header.write_text("#define THING_MAJOR 3\n#define THING_PATCH 0\n")
    git(older, "init", "-q")
    git(older, "add", "-A")
    git(older, "commit", "-q", "-m", "older")
    lenient: dict[str, Any] = {
        "cache": tmp_path / "cache",
        "given": {"thing": older},
        "patch_levels": ("thing",),
    }
    assert third_party.collect(_with(dotted), **lenient)["thing"].folder == older
    # Of the pinned version it has to be the pinned commit.
    header.write_text("#define THING_MAJOR 3\n#define THING_PATCH 1\n")
    with pytest.raises(BadFileError, match=source.commit):
        third_party.collect(_with(dotted), **lenient)
