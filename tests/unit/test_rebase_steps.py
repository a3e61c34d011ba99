"""What a rebase does when a step fails or finds something unusual: folder, locks, notes, record."""

from __future__ import annotations

import dataclasses
import errno
import io
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_rebase_base_draft import ARM, FIRST, SDIST, VERSION

from sm12x.core import listing
from sm12x.core.errors import BadFileError, FetchError, NoSpaceError, ToolFailedError
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base, Dropped
from sm12x.stack.model.series import Patch
from sm12x.stack.worktree import tree
from sm12x_dev import lock
from sm12x_dev.commands import rebase as patchrebase
from sm12x_dev.rebase import base_draft, porting, rebase, status, verdict
from sm12x_dev.rebase.porting import PortResult
from sm12x_dev.rebase.rebase import PatchOutcome
from sm12x_dev.rebase.verdict import PatchVerdict
from sm12x_dev.worktree import add_drop, staging

DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def base() -> Base:
    return bases.load(bases.versions()[0])


@pytest.fixture
def patches(base: Base) -> tuple[Patch, ...]:
    return series.load(base).patches


def _outcome(patch: Patch, state: str, said: PatchVerdict, since: str = "") -> PatchOutcome:
    text = porting.CONFLICT if state == status.CONFLICT else porting.APPLIES
    return PatchOutcome(
        patch=patch,
        state=state,
        verdict=said,
        port=PortResult(patch=patch, state=text),
        since=since,
    )


# The new folder


def test_a_stop_between_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a folder to replace WHEN stopped just after it has been moved aside THEN it is back."""
    target = tmp_path / "2.0"
    target.mkdir()
    (target / "base.toml").write_text("mine")
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        monkeypatch.undo()
        real(self, to)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), staging.fresh(target, force=True):
        pass
    assert (target / "base.toml").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_where_no_folder_can_be_made_is_said_early(tmp_path: Path) -> None:
    staging.require_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for parent in (Path("/proc/x"), tmp_path / "file" / "x"):
        with pytest.raises(BadFileError, match=f"no folder can be made in {parent}: ") as caught:
            staging.require_writable(parent)
        assert "--out DIR" in caught.value.next_step


def test_a_full_disk_is_not_a_spoilt_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "tiny-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("tiny-1.0/a"), io.BytesIO())

    def full(*args: Any, **more: Any) -> None:
        raise DISK_FULL

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(NoSpaceError, match=f"cannot be unpacked in {tmp_path}: No space left"):
        tree.unpack(archive, tmp_path / "tree")
    assert list(tmp_path.iterdir()) == [archive]


# Notes in base.toml


def _write(base: Base, outcomes: list[PatchOutcome], folder: Path) -> dict[str, Any]:
    """The new base.toml, of a release that is later than any."""
    text = (base.folder / "base.toml").read_text()
    (folder / "base.toml").write_text(text)
    new = dataclasses.replace(base, version="9.9.0", folder=folder)
    rebase._write(base, new, outcomes, {}, rebase._Work(folder=folder))
    return tomllib.loads((folder / "base.toml").read_text())


def test_a_conflicts_tests_are_noted_and_none_twice(
    base: Base, patches: tuple[Patch, ...], tmp_path: Path
) -> None:
    shared = PatchVerdict(
        state=verdict.NEEDED, red=("t.py::a",), green=("t.py::b",), failing_guards=("t.py::c",)
    )
    other = dataclasses.replace(shared, green=("t.py::b", "u.py::d"))
    gone = PatchVerdict(state=verdict.UPSTREAM, green=("v.py::e",))
    outcomes = [
        _outcome(patches[0], status.NEEDED, shared),
        _outcome(patches[1], status.CONFLICT, other),
        _outcome(patches[2], status.UPSTREAM, gone, "9.8"),
    ]
    values = _write(base, outcomes, tmp_path)
    assert values["witness"]["upstream"] == ["t.py::b", "u.py::d"]
    assert values["witness"]["needed"] == ["t.py::c"]


def test_a_patch_that_is_in_the_stack_is_not_dropped_as_well(
    base: Base, patches: tuple[Patch, ...], tmp_path: Path
) -> None:
    """GIVEN a base that still says of a resolved patch that it is in conflict."""
    name = f"0009-{status.slug(patches[0].name)}.patch"
    resolved = Dropped(patch=name, state="conflict", since="", why="x")
    other = Dropped(patch="0008-Other.patch", state="upstream", since="0.1", why="y")
    old = dataclasses.replace(base, dropped=(resolved, other))
    green = PatchVerdict(state=verdict.UPSTREAM, green=("t.py::a",))
    values = _write(old, [_outcome(patches[0], status.UPSTREAM, green, "9.9.0")], tmp_path)
    assert [(entry["patch"], entry["state"]) for entry in values["dropped"]] == [
        ("0008-Other.patch", "upstream"),
        (patches[0].name, "upstream"),
    ]


@pytest.mark.parametrize("error", [FetchError("no answer", next_step="wait"), DISK_FULL])
def test_a_release_in_between_that_cannot_be_had_does_not_end_the_run(
    base: Base, patches: tuple[Patch, ...], tmp_path: Path, error: Exception
) -> None:
    """GIVEN a probe that fails after one that says "upstream" THEN that one is the first known."""

    def probe(new: Base, patch: Patch, version: str) -> PatchVerdict:
        if version == "9.2":
            return PatchVerdict(state=verdict.UPSTREAM)
        raise error

    work, probed = rebase._Work(folder=tmp_path), list[status.RebaseOutcome]()
    green = PatchVerdict(state=verdict.UPSTREAM, green=("t.py::a",))
    outcome = _outcome(patches[0], status.UPSTREAM, green, "9.9")
    releases = ["9.1", "9.2", "9.3"]
    found = rebase._since(outcome, base, base, releases, probe, probed, work)
    assert found.since == "9.2"
    assert [(outcome.release, outcome.since) for outcome in probed] == [("9.2", "9.2")]
    (line,) = work.to_check
    assert line.startswith(f"dropped: {patches[0].name} is upstream since 9.2 or earlier")
    assert line.endswith(str(getattr(error, "message", error)))


# Locks


def _locks(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def make(new: Base, machine: str) -> lock.Locks:
        if machine == failing:
            raise ToolFailedError("uv finds nothing", next_step="look")
        pins = "".join(
            f"{name}==1 --hash=sha256:{'0' * 64}\n    # via x\n" for name in ("numpy", "torch")
        )
        return lock.Locks(closure=pins, build=pins)

    monkeypatch.setattr(lock, "make", make)
    monkeypatch.setattr(lock, "verify", lambda *args: [])


@pytest.mark.parametrize(("failing", "made"), [("x86_64", "aarch64"), ("aarch64", "x86_64")])
def test_a_lock_that_fails_keeps_no_other_from_being_made(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, made: str
) -> None:
    _locks(monkeypatch, failing)
    (tmp_path / "base.toml").write_text((base.folder / "base.toml").read_text())
    new = dataclasses.replace(base, folder=tmp_path)
    check: list[str] = []
    found = rebase.write_locks(base, new, {}, check, lambda text: None, machine=failing)
    assert found == (made,)
    assert new.lock_path(made).is_file()
    assert not new.lock_path(failing).exists()
    assert f"lock.{failing}: uv finds nothing" in check
    assert (
        sum(line.startswith("lock: for a package that cannot be installed") for line in check) == 1
    )
    # The witnesses' packages are those that the lock which was made has.
    packages = tomllib.loads((tmp_path / "base.toml").read_text())["witness"]["packages"]
    assert set(packages) <= {"numpy", "torch"}
    assert (
        rebase.write_locks(base, dataclasses.replace(new, locks={}), {}, [], lambda text: None)
        == ()
    )


# The command


def test_the_index_says_when_the_files_of_a_folder_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SDIST.name).write_text("x")
    (here,) = listing.of_folder("vllm", tmp_path)
    known = (dataclasses.replace(SDIST, sha256=here.sha256), FIRST, ARM)
    monkeypatch.setattr(listing, "of_index", lambda project: known)
    found = patchrebase._listed("vllm", tmp_path, locks=True)
    assert found == (dataclasses.replace(here, uploaded=SDIST.uploaded), FIRST, ARM)
    assert patchrebase._listed("vllm", tmp_path, locks=False) == (here,)
    # Another file of that name is not the one that came out then.
    monkeypatch.setattr(listing, "of_index", lambda project: (SDIST,))
    assert patchrebase._listed("vllm", tmp_path, locks=True) == (here,)

    def none(project: str) -> tuple[listing.ListedFile, ...]:
        raise FetchError("no answer", next_step="wait")

    monkeypatch.setattr(listing, "of_index", none)
    assert patchrebase._listed("vllm", tmp_path, locks=True) == (here,)
    assert "the release date of vllm is not known: no answer" in capsys.readouterr().err


def test_the_day_of_a_release_is_the_index_s_the_one_given_or_the_one_kept(base: Base) -> None:
    day = base.released.replace(year=2031)
    undated = dataclasses.replace(SDIST, uploaded=None)
    silent = base_draft.release([undated], VERSION, project="vllm")
    dated = base_draft.release([SDIST], VERSION, project="vllm")
    by_hand = dataclasses.replace(base, released=day)
    assert patchrebase._dated(dated, None, base, by_hand) == dated
    assert patchrebase._dated(dated, day, base, None).released == day
    assert patchrebase._dated(silent, None, base, by_hand).released == day
    # What the old folder has of the base it was drafted from, nobody has looked up.
    assert patchrebase._dated(silent, None, base, base).released is None
    assert patchrebase._dated(silent, None, base, None).released is None


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EROFS, "Read-only file system"), BadFileError("spoilt", next_step="correct")],
)
def test_a_record_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def record(path: Path, fresh: object, stacks: object) -> None:
        raise error

    monkeypatch.setattr(status, "record", record)
    report = SimpleNamespace(outcomes=(), probed=(), source="1.0", version="2.0")
    patchrebase._record(Path("patches/status.toml"), report)  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the outcome is not recorded in patches/status.toml: ")
    assert "--no-record" in line


# A patch made like another


def test_files_that_a_patch_made_like_another_leaves_out_are_known(
    patches: tuple[Patch, ...],
) -> None:
    model = patches[0]
    first, *others = [file.path for file in model.files]
    assert add_drop.missing(model, [first, *others]) == ()
    assert add_drop.missing(model, [*others, "elsewhere.txt"]) == (first,)
    # One of its name in another folder is where its hunks went.
    assert add_drop.missing(model, [*others, f"moved/{Path(first).name}"]) == ()
