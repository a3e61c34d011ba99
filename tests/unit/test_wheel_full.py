"""The full build: order and memory of the units, its estimate, third-party sources, messages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError, NoSpaceError, UsageError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, ThirdPartySource, UnitCost
from sm12x.wheel import selection
from sm12x.wheel.compile import compiling, launcher, schedule
from sm12x.wheel.compile.compiling import Unit
from sm12x.wheel.source import third_party


def _unit(name: str, seconds: float, gib: float) -> Unit:
    return Unit(name=name, source=name, target="m", cpu_seconds=seconds, peak_gib=gib)


def test_pools_hold_what_fits_in_the_memory_together() -> None:
    # GIVEN many small units and some large ones
    units = [_unit(f"s{n}", 60, 0.5) for n in range(100)]
    units += [_unit(f"l{n}", 200, 8.9) for n in range(10)] + [_unit("m", 10, 3)]
    depths, pool_of = compiling.pools(units, 60)
    # THEN what may run at a time takes no more than there is, and each kind has its turn
    peak = {pool_of[unit.name]: unit.peak_gib for unit in units}
    assert sum(depth * peak[name] for name, depth in depths.items()) <= 60
    assert min(depths.values()) >= 1
    assert depths[pool_of["l0"]] > 3
    assert {*pool_of} == {unit.name for unit in units}


@pytest.mark.parametrize(("memory", "depth"), [(10, 1), (8, 1), (19, 2)])
def test_units_that_do_not_fit_beside_each_other_share_one_pool(memory: float, depth: int) -> None:
    units = [_unit("a", 1, 8), _unit("b", 1, 7.9), _unit("c", 1, 3.9), _unit("d", 1, 8.1)]
    assert {*compiling.pools(units, memory)[0].values()} == {depth}
    assert compiling.pools([], memory) == ({}, {})


@pytest.mark.parametrize(
    ("units", "cores", "memory", "seconds"),
    [
        ([], 2, 24, 0),
        ([(60, 3)] * 4, 2, 24, 120),
        ([(60, 3)] * 4, 64, 24, 60),
        ([(60, 9)] * 4, 64, 20, 120),
        ([(100, 3), (10, 3), (10, 3)], 2, 24, 100),
    ],
)
def test_the_plan_takes_as_long_as_cores_and_memory_allow(
    units: list[tuple[float, float]], cores: int, memory: float, seconds: float
) -> None:
    assert schedule.makespan(units, cores=cores, memory_gib=memory) == seconds


@pytest.fixture
def base() -> Base:
    # What FlashInfer's modules take on top is not part of what these tests count.
    return dataclasses.replace(bases.load(bases.default()), flashinfer=())


def test_the_first_entry_that_matches_a_path_says_what_it_costs(base: Base) -> None:
    costs = (
        UnitCost(match="deep/*kernel_*.cu", cpu_seconds=150, peak_gib=4),
        UnitCost(match="", cpu_seconds=50, peak_gib=2),
    )
    known = dataclasses.replace(base, units=costs)
    assert schedule.cost(known, "csrc/deep/er/sm80_kernel_a.cu") == (150, 4)
    assert schedule.cost(known, "csrc/a.cu") == (50, 2)
    silent = dataclasses.replace(base, units=())
    assert schedule.cost(silent, "a.cpp", at_most_gib=0.1) == (schedule.DEFAULT_SECONDS, 0.1)


@pytest.mark.parametrize("version", bases.versions())
def test_no_unit_needs_more_memory_than_its_module_says(version: str) -> None:
    loaded = bases.load(version)
    assert max((cost.peak_gib for cost in loaded.units), default=0) <= max(
        module.peak_gib for module in loaded.modules
    )


def _costly(base: Base, seconds: float) -> Base:
    """One module that is cheap, and one that takes so long, of the first source."""
    cheap, *_, other = base.modules
    name = base.sources[0].name
    costly = dataclasses.replace(
        other, sources=(name,), cpu_seconds=seconds, peak_gib=8.9, quick=False
    )
    cheap = dataclasses.replace(cheap, sources=(), cpu_seconds=1, peak_gib=0.1, quick=True)
    return dataclasses.replace(base, modules=(cheap, costly))


def _decide(
    base: Base, wanted: str, *, cores: int = 2, memory: float = 22, there: bool = True
) -> selection.Decision:
    available = {base.sources[0].name} if there else set()
    return selection.decide(base, cores=cores, memory_gib=memory, available=available, mode=wanted)


def test_auto_builds_all_where_that_is_quick_enough(base: Base) -> None:
    costly = _costly(base, 8000)
    slow = _decide(costly, "auto")
    assert slow.mode == "quick"
    assert "would take about 6" in slow.reason
    assert "on 2 cores with 22 GiB free; auto takes it where that is under 20" in slow.reason
    fast = _decide(costly, "auto", cores=16, memory=64)
    assert fast.mode == "full"
    assert 8 < selection.full_minutes(costly, costly.modules, cores=16, memory_gib=64) < 20
    # Between the limit of today and the 45 minutes it once was.
    assert _decide(costly, "auto", cores=6, memory=64).mode == "quick"
    # More cores do not help where the memory is for two units.
    assert _decide(costly, "auto", cores=64, memory=10).mode == "quick"


@pytest.mark.parametrize(
    "name", ["Makefile", "docs/build-modes.md", "scripts/sm12x/commands/bundle.py"]
)
def test_the_limit_of_auto_is_the_same_wherever_it_is_told(name: str) -> None:
    text = " ".join((layout.root() / name).read_text().replace('"', "").split())
    assert f"under {selection.LIMIT_MINUTES:.0f} minutes on this machine" in text


def test_what_full_would_add_to_a_quick_bundle(base: Base) -> None:
    cheap, costly = _costly(base, 8000).modules
    name = base.sources[0].name
    offered = selection.offer(
        dataclasses.replace(base, modules=(cheap, costly)), cores=2, memory_gib=22, sure={name}
    )
    assert offered is not None
    (step,) = offered.steps
    assert (step.modules, step.sources, offered.against) == ((costly.path,), (), "")
    assert 60 < step.minutes < 80
    assert "on 2 cores with 22 GiB free" in offered.figures
    # What is not there for sure comes second, with all that was before it in its time.
    first = dataclasses.replace(costly, path="vllm/first.so", sources=())
    known = dataclasses.replace(base.sources[0], git="https://h.test/x")
    both = dataclasses.replace(
        base, modules=(cheap, first, costly), sources=(known, *base.sources[1:])
    )
    offered = selection.offer(both, cores=2, memory_gib=4, sure=())
    assert offered is not None
    assert [(step.modules, step.sources, step.given_only) for step in offered.steps] == [
        (("vllm/first.so",), (), ()),
        ((costly.path,), (name,), ()),
    ]
    bare = dataclasses.replace(base.sources[0], git="")
    found = selection.offer(
        dataclasses.replace(both, sources=(bare, *base.sources[1:])),
        cores=2,
        memory_gib=22,
        sure=(),
    )
    assert found is not None
    assert found.steps[1].given_only == (name,)
    assert offered.steps[1].minutes > 1.8 * offered.steps[0].minutes
    assert "needs 8.9 GiB of memory" in offered.against
    alone = dataclasses.replace(base, modules=(cheap,))
    assert selection.offer(alone, cores=2, memory_gib=22, sure={name}) is None


def test_auto_never_builds_all_of_a_release_that_has_something_against_it(base: Base) -> None:
    costly = _costly(base, 10)
    assert _decide(costly, "auto").mode == "full"
    tools = dataclasses.replace(costly.toolchain, not_full="12.1a is dropped")
    against = dataclasses.replace(costly, toolchain=tools)
    assert _decide(against, "auto").mode == "quick"
    assert _decide(against, "auto").reason == "12.1a is dropped"
    asked = _decide(against, "full")
    assert (asked.mode, asked.reason) == ("full", "as asked for, though 12.1a is dropped")


def test_auto_is_quick_without_what_most_code_is_made_of(base: Base) -> None:
    costly = _costly(base, 10)
    name = base.sources[0].name
    cheap, other = costly.modules
    both = dataclasses.replace(other, path="vllm/both.so", target="both", sources=("b", name))
    tools = dataclasses.replace(costly.toolchain, auto_needs=("b",))
    made = dataclasses.replace(
        costly,
        modules=(cheap, other, both),
        sources=(*base.sources, dataclasses.replace(base.sources[0], name="b")),
        toolchain=tools,
    )
    quick = _decide(made, "auto")
    assert (quick.mode, quick.reason) == (
        "quick", "a full build would not compile most of the code: both lacks b"
    )  # fmt: skip
    assert _decide(made, "full").mode == "full"
    all_there = selection.decide(made, cores=2, memory_gib=22, available={name, "b"}, mode="auto")
    assert all_there.mode == "full"


def test_auto_is_quick_where_memory_or_sources_are_not_there(base: Base) -> None:
    costly = _costly(base, 1000)
    poor = _decide(costly, "auto", memory=4)
    assert (poor.mode, "8.9 GiB of memory, 4.0 GiB are free" in poor.reason) == ("quick", True)
    bare = _decide(costly, "auto", there=False)
    assert bare.mode == "quick"
    assert f"lacks {base.sources[0].name}" in bare.reason


def test_what_is_asked_for_is_done_but_not_without_memory(base: Base) -> None:
    costly = _costly(base, 100_000)
    assert _decide(costly, "quick").mode == "quick"
    assert _decide(costly, "full").mode == "full"
    assert selection.full_minutes(costly, costly.modules, cores=2, memory_gib=22) > 500
    with pytest.raises(NoSpaceError, match=r"8\.9 GiB.* 4\.0 GiB"):
        _decide(costly, "full", memory=4)


COMMIT = "abc" + "0" * 37
VERSION = "#define THING_MAJOR 4\n#define THING_MINOR 4\n  # define THING_PATCH 2\n"


@pytest.fixture
def thing(base: Base, monkeypatch: pytest.MonkeyPatch) -> Base:
    """A base with one source, which git gives."""

    def fetch(url: str, commit: str, submodules: tuple[str, ...], folder: Path) -> None:
        assert (url, commit, submodules) == ("https://h.test/thing", COMMIT, ())
        _folder(folder, VERSION)
        (folder / "e.h").write_text("e")

    monkeypatch.setattr(third_party, "fetch", fetch)
    source = ThirdPartySource(
        name="thing",
        pin="v4.4.2",
        override="THING_SRC_DIR",
        stand_in=(),
        git="https://h.test/thing",
        commit=COMMIT,
        version_file="include/version.h",
        defines=("THING_MAJOR", "THING_MINOR", "THING_PATCH"),
    )
    module = dataclasses.replace(base.modules[0], sources=("thing",))
    return dataclasses.replace(base, modules=(module,), sources=(source,))


def test_a_source_is_fetched_once(
    thing: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cache = tmp_path / "cache"
    found = third_party.collect(thing, cache=cache, say=said.append)["thing"]
    assert found.folder is not None
    names = [path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*.*")]
    assert sorted(names) == ["e.h", "include/version.h"]
    assert found.sha256 == third_party.content_hash(found.folder)
    # Collected anew, its files must not look changed to ninja.
    assert {path.stat().st_mtime for path in found.folder.rglob("*.h")} == {946684800}
    assert len(said) == 1
    with monkeypatch.context() as patched:
        patched.setattr(third_party, "fetch", None)
        assert third_party.collect(thing, cache=cache)["thing"] == found
    # Edited in the cache: made anew.
    (found.folder / "e.h").write_text("mine")
    again = third_party.collect(thing, cache=cache, say=said.append)["thing"]
    assert again == found
    assert str(found.folder) in said[1]
    assert not list(cache.glob("third_party/.*"))


def test_a_source_that_is_nowhere_has_a_reason_and_leaves_nothing(
    thing: Base, tmp_path: Path
) -> None:
    bare = dataclasses.replace(thing.sources[0], git="", commit="")
    nowhere = dataclasses.replace(thing, sources=(bare,))
    found = third_party.collect(nowhere, cache=tmp_path / "cache")["thing"]
    assert (found.folder, found.reason) == (None, "no repository is known")
    assert not list((tmp_path / "cache").glob("third_party/*"))


def test_a_source_that_nothing_is_compiled_of_is_not_looked_for(
    thing: Base, tmp_path: Path
) -> None:
    unused = dataclasses.replace(thing, modules=())
    assert third_party.collect(unused, cache=tmp_path) == {}


def _folder(path: Path, text: str) -> Path:
    (path / "include").mkdir(parents=True)
    (path / "include" / "version.h").write_text(text)
    return path


def test_a_given_folder_must_be_of_the_pinned_version(thing: Base, tmp_path: Path) -> None:
    right = _folder(tmp_path / "right", VERSION)
    found = third_party.collect(thing, cache=tmp_path, given={"thing": right})["thing"]
    assert (found.folder, found.origin) == (right, "given")
    wrong = _folder(tmp_path / "wrong", VERSION.replace("MINOR 4", "MINOR 2"))
    with pytest.raises(BadFileError, match=r"v4\.2\.2.* v4\.4\.2"):
        third_party.collect(thing, cache=tmp_path, given={"thing": wrong})
    other = _folder(tmp_path / "other", "#pragma once\n")
    with pytest.raises(BadFileError, match="THING_MAJOR"):
        third_party.collect(thing, cache=tmp_path, given={"thing": other})
    with pytest.raises(BadFileError, match=r"include/version\.h"):
        third_party.collect(thing, cache=tmp_path, given={"thing": tmp_path})
    with pytest.raises(BadFileError):
        third_party.collect(thing, cache=tmp_path, given={"thing": tmp_path / "none"})


@pytest.mark.parametrize(
    ("minor", "patch", "near"), [(4, 0, True), (4, 3, True), (3, 2, False), (40, 2, False)]
)
def test_another_patch_level_is_taken_where_that_is_asked_for_alone(
    thing: Base, tmp_path: Path, minor: int, patch: int, near: bool
) -> None:
    text = VERSION.replace("MINOR 4", f"MINOR {minor}").replace("PATCH 2", f"PATCH {patch}")
    given = {"thing": _folder(tmp_path / "given", text)}
    version = f"v4.{minor}.{patch}"
    with pytest.raises(BadFileError, match=rf"{version}.* v4\.4\.2") as refused:
        third_party.collect(thing, cache=tmp_path, given=given)
    assert ("--accept-patch-level thing" in refused.value.next_step) is near
    said: list[str] = []
    lenient: dict[str, Any] = {
        "cache": tmp_path,
        "given": given,
        "patch_levels": ("thing",),
        "say": said.append,
    }
    if not near:
        with pytest.raises(BadFileError, match=rf"{version}.* v4\.4\.2"):
            third_party.collect(thing, **lenient)
        return
    found = third_party.collect(thing, **lenient)["thing"]
    assert (found.folder, found.pin) == (given["thing"], "v4.4.2")
    (line,) = said
    assert all(fact in line for fact in (str(given["thing"]), version, "v4.4.2"))
    # Another source's leave is not this one's.
    with pytest.raises(BadFileError, match=version):
        third_party.collect(thing, cache=tmp_path, given=given, patch_levels=("other",))


def test_what_was_fetched_may_not_be_of_another_patch_level(thing: Base, tmp_path: Path) -> None:
    source = dataclasses.replace(thing.sources[0], pin="v4.4.3")
    later = dataclasses.replace(thing, sources=(source,))
    with pytest.raises(BadFileError, match=r"v4\.4\.2.* v4\.4\.3"):
        third_party.collect(later, cache=tmp_path / "cache", patch_levels=("thing",))
    assert not list((tmp_path / "cache").glob("third_party/*"))


@pytest.mark.parametrize("version", bases.versions())
def test_only_sources_that_say_their_version_have_patch_levels(version: str) -> None:
    base = bases.load(version)
    assert selection.require_patch_levels(base, ("cutlass", "cutlass")) == ("cutlass",)
    for name in ("qutlass", "flash-attention", "cutlas"):
        with pytest.raises(UsageError, match=name):
            selection.require_patch_levels(base, ("cutlass", name))


def test_a_given_folder_must_have_its_submodules(thing: Base, tmp_path: Path) -> None:
    source = dataclasses.replace(thing.sources[0], submodules=("csrc/inner",))
    deep = dataclasses.replace(thing, sources=(source,))
    given = _folder(tmp_path / "given", VERSION)
    (given / "csrc" / "inner").mkdir(parents=True)
    with pytest.raises(BadFileError, match="csrc/inner"):
        third_party.collect(deep, cache=tmp_path, given={"thing": given})
    (given / "csrc" / "inner" / "a.h").write_text("")
    assert third_party.collect(deep, cache=tmp_path, given={"thing": given})["thing"].folder


def test_a_given_folder_must_have_what_configuring_asks_for(thing: Base, tmp_path: Path) -> None:
    source = dataclasses.replace(thing.sources[0], stand_in=("csrc/api.cpp", "vendored/a.h"))
    asked = dataclasses.replace(thing, sources=(source,))
    given = _folder(tmp_path / "given", VERSION)
    with pytest.raises(BadFileError, match=r"csrc/api\.cpp"):
        third_party.collect(asked, cache=tmp_path, given={"thing": given})
    # The other one may be found elsewhere.
    (given / "csrc").mkdir()
    (given / "csrc" / "api.cpp").write_text("")
    assert third_party.collect(asked, cache=tmp_path, given={"thing": given})["thing"].folder


@pytest.mark.parametrize("version", bases.versions())
def test_every_compiled_source_is_pinned_in_full(version: str) -> None:
    for source in bases.load(version).sources:
        assert not source.git or len(source.commit) == 40
        assert source.commit.startswith(source.pin) or not source.commit
        assert bool(source.version_file) == bool(source.defines)


def test_nvcc_is_told_a_name_of_the_source_that_is_good_in_any_folder() -> None:
    maps = ["-Xcompiler=-ffile-prefix-map=/w/build=/build"]
    maps += ["-Xcompiler=-ffile-prefix-map=/w/src=/vllm"]
    words = ["ccache", "nvcc", *maps, "-x", "cu", "-c", "/w/src/csrc/a.cu", "-o", "a.o"]
    fixed = "/vllm/csrc/a.cu"
    expected = [*words, "-Xcudafe", f"--orig_src_path_name={fixed}", f"-frandom-seed={fixed}"]
    assert launcher.with_fixed_name(words) == expected
    elsewhere = [word.replace("/w/src/csrc", "/other") for word in words]
    assert launcher.with_fixed_name(elsewhere) == elsewhere
    host = ["g++", *maps, "-c", "/w/src/csrc/a.cpp", "-o", "a.o"]
    assert launcher.with_fixed_name(host) == host
