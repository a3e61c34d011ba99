"""In which mode a bundle is built: who decides, what is said first, what is looked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sm12x.core import cudaarch, machine
from sm12x.core.errors import BadArchitectureError, BadFileError, NoSpaceError, UsageError
from sm12x.image.bundle import context, modes
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base
from sm12x.wheel import selection
from sm12x.wheel.compile import cmake
from sm12x.wheel.selection import Decision
from sm12x.wheel.source import third_party
from sm12x.wheel.source.third_party import FoundSource

BASE = bases.load("0.33.0")
ALL = frozenset(source.name for source in BASE.sources)
GIVEN = frozenset({"cutlass"})


def _found(name: str, folder: Path | None) -> FoundSource:
    reason = "" if folder else "its host is not reachable"
    return FoundSource(name=name, pin="v1", folder=folder, reason=reason)


@pytest.mark.parametrize(
    ("full_with", "looked", "mode"),
    [
        # Full whatever is found, and quick whatever is found: nothing has to be looked for.
        ([ALL, GIVEN], 0, "full"),
        ([], 0, "quick"),
        # Without qutlass its module is kept, and what is left is soon compiled.
        ([GIVEN], 1, "full"),
        ([ALL], 1, "quick"),
    ],
)
def test_sources_are_looked_for_only_where_they_decide(
    full_with: list[frozenset[str]],
    looked: int,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def decide(base: Base, *, available: set[str], **given: object) -> Decision:
        assert given == {"cores": 2, "memory_gib": 20.0, "mode": "auto"}
        chosen = "full" if available in full_with else "quick"
        return Decision(mode=chosen, reason="a reason")

    calls: list[None] = []

    def collect() -> dict[str, FoundSource]:
        calls.append(None)
        return {"cutlass": _found("cutlass", tmp_path), "qutlass": _found("qutlass", None)}

    monkeypatch.setattr(selection, "decide", decide)
    request = modes.ModeRequest(wanted="auto", given={"cutlass": tmp_path})
    made = modes.decide(BASE, request, cores=2, memory_gib=20.0, collect=collect)
    assert (made.mode, len(calls)) == (mode, looked)


@pytest.mark.parametrize(
    ("word", "said"),
    [("ful", "use full"), ("Quick", "use quick"), ("x", "use quick, full or auto")],
)
def test_another_mode_is_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        modes.parse_request(BASE, word, ())


def test_given_sources(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert modes.parse_given(BASE, [f"qutlass={tmp_path}"]) == {"qutlass": tmp_path}
    for word, kind in (
        ("qutlass", UsageError),
        ("qutlas=.", UsageError),
        (f"qutlass={tmp_path}/none", BadFileError),
    ):
        with pytest.raises(kind):
            modes.parse_given(BASE, [word])


def test_sources_are_staged_without_their_history_and_named_by_their_content(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkout"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("x")
    (folder / "include").mkdir()
    (folder / "include" / "a.h").write_text("a")
    (folder / "b.h").symlink_to("include/a.h")
    collected = {"cutlass": _found("cutlass", folder), "qutlass": _found("qutlass", None)}
    staged = modes.staged(collected)
    assert list(staged) == ["third_party/cutlass/b.h", "third_party/cutlass/include/a.h"]
    made = context.Context(files={}, large=staged, folders=("links", "third_party"))
    first = made.digest()
    (folder / "include" / "a.h").write_text("b")
    assert made.digest() != first

    made.write(tmp_path / "context")
    assert (tmp_path / "context" / "third_party" / "cutlass" / "b.h").read_text() == "b"
    context.Context(files={}, large={}, folders=("third_party",)).write(tmp_path / "quick")
    assert not any((tmp_path / "quick" / "third_party").iterdir())


def test_what_is_compiled_and_what_is_kept() -> None:
    quick = modes.choose(BASE, "quick", ())
    assert [module.target for module in quick.modules] == ["cumem_allocator", "spinloop", "fs_io_C"]
    full = modes.choose(BASE, "full", ["cutlass"])
    assert "_moe_C_stable_libtorch" in [module.target for module in full.modules]
    assert ("_qutlass_C", ("qutlass",)) in [(kept.target, kept.missing) for kept in full.kept]


@pytest.mark.parametrize(
    ("mode", "arch_list", "devices"),
    [
        ("quick", "12.0a", ["12.0", "12.1"]),
        ("full", "12.0a", ["12.0"]),
        ("full", "12.0a;12.1a;9.0a", ["12.0", "12.1"]),
        ("full", "12.0f", ["12.0", "12.1"]),
    ],
)
def test_a_full_build_is_audited_for_what_it_was_made_for(
    mode: str, arch_list: str, devices: list[str]
) -> None:
    assert modes.devices(mode, arch_list) == devices


def test_a_work_folder_is_named_by_what_a_compiler_must_not_mix() -> None:
    plain = modes.BuildMode(name="full", choice=modes.choose(BASE, "quick", ()))
    other = dataclasses.replace(plain, third_party_sha256="1")
    keys = {
        how.key(BASE, machine, arch_list)
        for how in (plain, other)
        for machine in ("x86_64", "aarch64")
        for arch_list in ("12.0a", "12.0f")
    }
    assert len(keys) == 8
    assert plain.key(BASE, "x86_64", "12.0a") in keys


class Said:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, label: str, *, live: bool = True) -> AbstractContextManager[Any]:
        self.lines.append(f"{label} ...")
        return nullcontext(self.say)


def _settle(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any
) -> tuple[modes.BuildMode, Said]:
    def collect(base: Base, *, say: Callable[[str], None], **_: Any) -> dict[str, FoundSource]:
        say("cutlass: a checkout")
        return {"cutlass": _found("cutlass", folder), "qutlass": _found("qutlass", None)}

    monkeypatch.setattr(third_party, "collect", collect)
    monkeypatch.setattr(bases, "versions", lambda: [BASE.version, "9.9.9"])
    values = {"wanted": "full", "given": {}, **fields}
    made = values.pop("made", "")
    if memory := values.pop("memory", None):
        monkeypatch.setattr(cmake, "free_memory_gib", lambda: memory)
    said = Said()
    targets = cudaarch.parse_list(values.pop("arch_list", "12.0a"))
    request = modes.ModeRequest(**values)
    how = modes.settle(BASE, request, targets, made, report=said)
    return how, said


def test_what_a_full_build_says_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 64.0)
    (tmp_path / "a.h").write_text("a")
    how, said = _settle(monkeypatch, tmp_path)
    assert said.lines[:4] == [
        "build mode full: as asked for; quick mode: make bundle BUILD=quick",
        "there is a newer base: make bundle BASE=9.9.9",
        "third-party sources ...",
        "cutlass: a checkout",
    ]
    kept = "vllm/_qutlass_C.abi3.so stays the official one (qutlass: its host is not reachable)"
    assert kept in said.lines
    assert said.lines[-1] == "name the folder of a missing source with --source NAME=DIR"
    assert list(how.third_party) == ["third_party/cutlass/a.h"]


def test_a_full_bundle_that_is_there_is_not_given_up_for_want_of_memory_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 4.0)
    monkeypatch.setattr(machine, "cores", lambda: 64)
    monkeypatch.setattr(modes, "all_memory_gib", lambda: 256.0)
    assert _settle(monkeypatch, tmp_path, wanted="auto")[0].name == "quick"
    assert _settle(monkeypatch, tmp_path, wanted="auto", made="full")[0].name == "full"
    with pytest.raises(NoSpaceError, match=r"needs \d+\.\d GiB of memory, 4\.0 GiB are free"):
        _settle(monkeypatch, tmp_path)


def test_generic_12_0_is_for_quick_mode_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 64.0)
    with pytest.raises(BadArchitectureError, match="leaves Marlin to PTX"):
        _settle(monkeypatch, tmp_path, arch_list="9.0a;12.0")
    assert _settle(monkeypatch, tmp_path, arch_list="12.0", wanted="quick")[0].name == "quick"


def test_links_in_a_given_source_are_followed(tmp_path: Path) -> None:
    there, given = tmp_path / "there", tmp_path / "given"
    for folder in (there / "include", given / ".git"):
        folder.mkdir(parents=True)
        (folder / "a.h").write_text("a")
    (there / "include" / "up").symlink_to(there)
    (given / "include").symlink_to(there / "include")
    sources = {"x": _found("x", given)}
    assert modes.staged(sources) == {"third_party/x/include/a.h": there / "include" / "a.h"}


def test_patch_levels_are_of_folders_that_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.h").write_text("a")
    words = [f"cutlass={tmp_path}", f"qutlass={tmp_path}"]
    made = modes.parse_request(BASE, "full", words, patch_levels=["cutlass"])
    assert made.patch_levels == ("cutlass",)
    assert modes.parse_request(BASE, "full", words).patch_levels == ()
    for names, given, said in (
        (["cutlass"], words[1:], "--accept-patch-level cutlass is for a folder that is given"),
        (["qutlass"], words, "qutlass of .* is pinned to a commit"),
        (["cutlas"], words, "no third-party source 'cutlas'"),
    ):
        with pytest.raises(UsageError, match=said):
            modes.parse_request(BASE, "full", given, patch_levels=names)
    # What was asked for reaches those who look for sources and those who compile.
    seen: list[object] = []

    def collect(*_: object, patch_levels: tuple[str, ...], **__: object) -> dict[str, FoundSource]:
        seen.append(patch_levels)
        return {"cutlass": _found("cutlass", tmp_path)}

    _settle(monkeypatch, tmp_path, memory=64.0)
    monkeypatch.setattr(third_party, "collect", collect)
    how = modes.settle(BASE, made, cudaarch.parse_list("12.0a"), "", report=Said())
    assert (seen, how.patch_levels) == ([("cutlass",)], ("cutlass",))


def test_quick_mode_says_what_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"cutlass": tmp_path}
    how, said = _settle(monkeypatch, tmp_path, wanted="quick", given=given)
    assert (how.name, how.third_party) == ("quick", {})
    assert how.offer is not None
    paths = [path for step in how.offer.steps for path in step.modules]
    assert "vllm/_moe_C_stable_libtorch.abi3.so" in paths
    assert "vllm/cumem_allocator.abi3.so" not in paths
    assert _settle(monkeypatch, tmp_path, memory=64.0)[0].offer is None
    assert "unused" in said.lines[-1]
