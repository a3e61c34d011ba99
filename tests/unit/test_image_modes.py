"""In which mode a bundle is built: who decides, what is said first, what is looked for."""

from __future__ import annotations

import dataclasses
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

    monkeypatch.setattr(selection, "decide", decide)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    how, said = _decide(
        monkeypatch, tmp_path, wanted="auto", given={"cutlass": tmp_path}, memory=20.0
    )
    # A full build needs the sources in any case.
    assert (how.name, said.sources) == (mode, looked or mode == "full")


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
    plain = modes.BuildMode(name="full", choice=selection.choose(BASE, (), mode="quick"))
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
    """A reporter that keeps what it was told; ``sources`` says whether any were looked for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sources = False

    def say(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, label: str, *, live: bool = True) -> AbstractContextManager[Any]:
        return nullcontext(self.say)


def _decide(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any
) -> tuple[modes.BuildMode, Said]:
    said = Said()

    def collect(base: Base, **_: Any) -> dict[str, FoundSource]:
        said.sources = True
        return {"cutlass": _found("cutlass", folder), "qutlass": _found("qutlass", None)}

    monkeypatch.setattr(third_party, "collect", collect)
    if memory := fields.get("memory"):
        monkeypatch.setattr(cmake, "free_memory_gib", lambda: memory)
    how = modes.decide(
        *(BASE, fields.get("wanted", "full"), fields.get("given", {}), ()),
        cudaarch.parse_list(fields.get("arch_list", "12.0a")),
        fields.get("earlier", ""),
        report=said,
    )
    return how, said


def test_what_a_full_build_says_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.h").write_text("a")
    how, said = _decide(monkeypatch, tmp_path, memory=64.0)
    assert "BUILD=quick" in said.lines[0]
    (kept,) = [line for line in said.lines if "vllm/_qutlass_C.abi3.so" in line]
    assert "its host is not reachable" in kept
    assert "--source NAME=DIR" in said.lines[-1]
    assert list(how.third_party) == ["third_party/cutlass/a.h"]
    assert "_moe_C_stable_libtorch" in [module.target for module in how.choice.modules]
    assert ("_qutlass_C", ("qutlass",)) in [(one.target, one.missing) for one in how.choice.kept]


def test_a_full_bundle_that_is_there_is_not_given_up_for_want_of_memory_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 4.0)
    monkeypatch.setattr(machine, "cores", lambda: 64)
    monkeypatch.setattr(modes, "_all_memory_gib", lambda: 256.0)
    assert _decide(monkeypatch, tmp_path, wanted="auto")[0].name == "quick"
    assert _decide(monkeypatch, tmp_path, wanted="auto", earlier="full")[0].name == "full"
    with pytest.raises(NoSpaceError, match=r"4\.0 GiB"):
        _decide(monkeypatch, tmp_path)


def test_generic_12_0_is_for_quick_mode_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 64.0)
    with pytest.raises(BadArchitectureError, match="PTX"):
        _decide(monkeypatch, tmp_path, arch_list="9.0a;12.0")
    assert _decide(monkeypatch, tmp_path, arch_list="12.0", wanted="quick")[0].name == "quick"


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
    both = {"cutlass": tmp_path, "qutlass": tmp_path}
    levels = modes.parse_patch_levels(BASE, ["cutlass"], both)
    assert levels == ("cutlass",)
    assert modes.parse_patch_levels(BASE, (), both) == ()
    for names, given in ((["cutlass"], {}), (["qutlass"], both), (["cutlas"], both)):
        with pytest.raises(UsageError):
            modes.parse_patch_levels(BASE, names, given)
    # What was asked for reaches those who look for sources and those who compile.
    seen: list[object] = []

    def collect(*_: object, patch_levels: tuple[str, ...], **__: object) -> dict[str, FoundSource]:
        seen.append(patch_levels)
        return {"cutlass": _found("cutlass", tmp_path)}

    monkeypatch.setattr(cmake, "free_memory_gib", lambda: 64.0)
    monkeypatch.setattr(third_party, "collect", collect)
    targets = cudaarch.parse_list("12.0a")
    how = modes.decide(BASE, "full", both, levels, targets, "", report=Said())
    assert (seen, how.patch_levels) == ([("cutlass",)], ("cutlass",))


def test_quick_mode_says_what_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"cutlass": tmp_path}
    how, said = _decide(monkeypatch, tmp_path, wanted="quick", given=given)
    assert (how.name, how.third_party) == ("quick", {})
    assert [one.target for one in how.choice.modules] == ["cumem_allocator", "spinloop", "fs_io_C"]
    assert how.offer is not None
    paths = [path for step in how.offer.steps for path in step.modules]
    assert "vllm/_moe_C_stable_libtorch.abi3.so" in paths
    assert "vllm/cumem_allocator.abi3.so" not in paths
    assert _decide(monkeypatch, tmp_path, memory=64.0)[0].offer is None
    assert "unused" in said.lines[-1]
