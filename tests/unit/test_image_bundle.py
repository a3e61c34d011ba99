"""What is checked before a bundle, what it leaves, and what it says at the end."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import pytest

from sm12x import layout
from sm12x.audit.report import AuditReport, LibraryReport, RunsReport
from sm12x.commands import build
from sm12x.core import declared, files, machine
from sm12x.core.errors import (
    BadArchitectureError,
    BadFileError,
    BuildFailedError,
    NoEngineError,
    NoSpaceError,
    UnknownBaseError,
    UsageError,
)
from sm12x.core.text import GIB
from sm12x.image.base import platforms
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.base.rootfs import BaseImage
from sm12x.image.bundle import context, decide, make, modes, record, summary
from sm12x.image.engine import engines
from sm12x.image.engine.buildah import Buildah
from sm12x.image.engine.engine import Docker, Engine
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Disk
from sm12x.wheel.ledger import FileEntry, Ledger, LibraryEntry, PatchEntry, SourceEntry
from sm12x.wheel.selection import FullStep, ModuleChoice, Offer

DATA = Path(__file__).parent / "data"
MIB = 1024**2
SHA = "0" * 64
HERE = platforms.Platforms(machine="x86_64", here="x86_64")

RECORD = record.Record(
    version="0.33.0",
    mode="quick",
    machine="x86_64",
    stack_id="1a2b3c4d",
    arch_list="12.0a;12.1a",
    inputs=SHA,
    engine="docker 20.10 with its own BuildKit (/usr/bin/docker)",
    base_image="debootstrap",
    base_digest=f"sha256:{SHA}",
    wheel="vllm-0.33.0+sm12x.1a2b3c4d-cp38-abi3-manylinux_2_24_x86_64.whl",
    wheel_sha256=SHA,
    wheel_size=237 * MIB,
    ledger_sha256=SHA,
    image_id="ad5bca12614f" + "0" * 52,
    tags=("vllm-sm12x:0.33.0-1a2b3c4d-quick", "vllm-sm12x:0.33.0-1a2b3c4d"),
    image_size=9000 * MIB,
    seconds={"fetch": 0.3, "wheel": 68.3, "image": 179.3},
)


def _library(path: str, **fields: Any) -> LibraryEntry:
    values = {
        "path": path,
        "sha256": SHA,
        "size": 84 * MIB,
        "official_size": 84 * MIB,
        "origin": "official",
        "reason": "",
        "cubins": {},
        "ptx": {},
        "sm120": "mixed",
        "sm121": "mixed",
        "ops": (),
        "lost": (),
    }
    return LibraryEntry(**{**values, **fields})


LEDGER = Ledger(
    base_version="0.33.0",
    sdist="vllm-0.33.0.tar.gz",
    sdist_sha256=SHA,
    official_wheel="vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
    official_wheel_sha256=SHA,
    stack_id="1a2b3c4d",
    patches=(
        PatchEntry(
            name="0001-sticky-error.patch",
            subject="Clear the error on entry",
            upstream="https://example.invalid/1 (closed, never merged)",
            drop_when="merged",
            witness="tests/witness/test_x.py",
            sha256=SHA,
            state="applied",
            native="not compiled in quick mode",
        ),
    ),
    mode="quick",
    machine="x86_64",
    python="3.13",
    arch_list="12.0a;12.1a",
    cmake_archs="12.0a",
    compiler="gcc 14",
    nvcc="13.0.88",
    files=(
        FileEntry(path="vllm/x.py", sha256=SHA, base_sha256=SHA, origin="patched"),
        FileEntry(path="vllm/y.abi3.so", sha256=SHA, base_sha256=SHA, origin="compiled"),
    ),
    libraries=(
        _library("vllm/_C.abi3.so", reason="the stack touches it, and quick mode does not"),
        _library("vllm/y.abi3.so", origin="compiled", size=3 * MIB, ops=("_y::a", "_y::b")),
    ),
    lock_sha256=SHA,
    dependencies={},
)


def _audited(path: str, **fields: Any) -> LibraryReport:
    values = {"sha256": SHA, "size": 1, "machine": "x86_64", "cubins": {}, "ptx": {}}
    return LibraryReport(**{"path": path, "unknown": (), "runs": {}, **values, **fields})


RUNS = RunsReport(verdict="mixed", units={"native": 40, "ptx": 20, "none": 22, "unknown": 0})
AUDIT = AuditReport(
    subject="x.whl",
    kind="wheel",
    devices=("12.0", "12.1"),
    libraries=(
        _audited(
            "vllm/_C.abi3.so",
            cubins={"12.0": 40},
            ptx={"8.0": 20},
            runs={"12.0": RUNS, "12.1": RUNS},
        ),
        _audited("vllm/y.abi3.so"),
    ),
    policy=None,
)


OFFER = Offer(
    figures="about 38 min on 2 cores with 20 GiB free",
    steps=(
        FullStep(minutes=38.0, modules=("vllm/_C.abi3.so",)),
        FullStep(minutes=118.0, modules=("vllm/_fa2.abi3.so",), sources=("flash-attention",)),
    ),
)


ENGINE = Docker(Path("/usr/bin/docker"), "20.10", buildx=False)


RECIPES = ["deepseek-v4-flash-rtx-pro-6000-tp4"]


def _made(**fields: Any) -> summary.Bundle:
    values = {
        "record": RECORD,
        "ledger": LEDGER,
        "audit": AUDIT,
        "folder": Path("dist/0.33.0"),
        "engine": ENGINE,
        "unchanged": False,
        "offer": OFFER,
    }
    return summary.Bundle(**{**values, **fields})


@pytest.mark.parametrize(
    ("unchanged", "details", "name"),
    [
        (False, False, "summary.txt"),
        (True, False, "summary-unchanged.txt"),
        (False, True, "summary-details.txt"),
    ],
)
def test_the_summary(
    unchanged: bool, details: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "default", lambda: RECORD.version)
    made = _made(unchanged=unchanged, offer=None if unchanged else OFFER)
    assert summary.text(made, RECIPES, details=details) == (DATA / name).read_text()


@pytest.mark.parametrize("engine", [ENGINE, Buildah(Path("/usr/bin/buildah"), "1", chroot=True)])
def test_the_summary_ends_with_what_to_do_next(engine: Engine) -> None:
    # GIVEN a release with many patches and libraries
    ledger = dataclasses.replace(
        LEDGER, patches=LEDGER.patches * 54, libraries=LEDGER.libraries * 20
    )
    lines = summary.text(_made(engine=engine, ledger=ledger), RECIPES).splitlines()
    assert len(lines) <= 40
    assert lines[-1].endswith("deepseek-v4-flash-rtx-pro-6000-tp4")
    assert "Next" in lines[-10:]


def test_the_summary_names_a_base_that_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "default", lambda: "9.9.9")
    got = summary.text(_made())
    assert "make bundle BASE=0.33.0 BUILD=full" in got
    assert "make bundle BASE=0.33.0 ARGS=--flashinfer" in got


def test_the_summary_names_a_source_of_another_patch_level() -> None:
    source = SourceEntry(name="cutlass", pin="v4.7.1", version="v4.7.0")
    line = "Compiled with cutlass v4.7.0 in place of v4.7.1 (--accept-patch-level)"
    assert line not in summary.modules(LEDGER)
    assert line in summary.modules(dataclasses.replace(LEDGER, sources=(source,))).splitlines()


def test_what_the_builder_is_given_reaches_what_compiles() -> None:
    """The ARG that the native stage hands on as a variable of `build native`."""
    text = (layout.root() / context.DOCKERFILES["builder"]).read_text()
    argument, variable = "PATCH_LEVELS", "SM12X_ACCEPT_PATCH_LEVEL"
    assert f"\nARG {argument}\n" in text
    assert f'{variable}="${{{argument}}}"' in text
    assert [option.envvar for option in build.native.params].count(variable) == 1


def test_the_summary_as_json() -> None:
    def written(**more: Any) -> Any:
        made = summary.BundleReport(
            **vars(RECORD), folder=Path("dist/0.33.0"), unchanged=True, **more
        )
        return json.loads(declared.to_json(made))

    found = written(full=OFFER)
    assert found["unchanged"] is True
    assert found["full"]["steps"][1]["minutes"] == 118.0
    assert written()["full"] is None
    assert found["tags"][0] == "vllm-sm12x:0.33.0-1a2b3c4d-quick"


def _dist(folder: Path) -> record.Record:
    folder.mkdir()
    for name in (RECORD.wheel, record.LEDGER, record.AUDIT, record.AUDIT_TEXT):
        (folder / name).write_text(name)
    made = dataclasses.replace(
        RECORD,
        wheel_sha256=files.sha256(folder / RECORD.wheel),
        ledger_sha256=files.sha256(folder / record.LEDGER),
    )
    declared.write_json(folder / record.NAME, made)
    return made


def test_a_record_round_trips_and_tells_a_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "0.33.0"
    made = _dist(folder)
    assert record.read(folder) == made
    assert record.is_whole(folder, made)
    (folder / RECORD.wheel).write_text("altered")
    assert not record.is_whole(folder, made)
    (folder / record.NAME).write_text("{}")
    assert record.read(folder) is None


def test_a_failed_build_leaves_the_last_one(tmp_path: Path) -> None:
    final = tmp_path / "0.33.0"
    _dist(final)
    before = sorted(path.name for path in final.iterdir())

    def fail() -> None:
        with files.replacing_folder(final, record.LEDGER) as staged:
            (staged / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert sorted(path.name for path in final.iterdir()) == before
    assert list(tmp_path.iterdir()) == [final]


def test_a_new_build_takes_the_place_of_the_last_one_and_of_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "0.33.0"
    _dist(final)
    with files.replacing_folder(final, record.LEDGER) as staged:
        (staged / "new").write_text("")
    assert [path.name for path in final.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [final]
    with pytest.raises(BadFileError), files.replacing_folder(final, record.LEDGER):
        pass


def test_one_wheel_is_expected(tmp_path: Path) -> None:
    with pytest.raises(BuildFailedError, match="0"):
        record.one_wheel(tmp_path)


class Quiet:
    def say(self, text: str) -> None:
        raise AssertionError(text)

    def phase(self, label: str, *, live: bool = True) -> object:
        raise AssertionError(label)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (decide.Options(version="0.20.9"), UnknownBaseError),
        (decide.Options(version="0.33.0", arch_list="12.1"), BadArchitectureError),
        (decide.Options(version="0.33.0", platform="linux/arm"), UsageError),
        (decide.Options(version="0.33.0", sources=("qutlass",)), UsageError),
        (decide.Options(version="0.33.0", patch_levels=("cutlass",)), UsageError),
        (decide.Options(version="0.33.0", sources=("cutlas=.",)), UsageError),
        (decide.Options(version="0.33.0", sources=("cutlass=/not/there",)), BadFileError),
    ],
)
def test_wrong_input_is_refused_before_any_program_is_started(
    options: decide.Options, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(kind):
        make.run(options, Quiet())  # type: ignore[arg-type]


def test_an_engine_is_looked_for_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(wanted: str | None, **_: object) -> Engine:
        raise NoEngineError("no engine", next_step="install one")

    def no_mode(*_: object, **__: object) -> None:
        raise AssertionError("sources were looked for")

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(engines, "find", none)
    monkeypatch.setattr(modes, "decide", no_mode)
    with pytest.raises(NoEngineError):
        make.run(decide.Options(version="0.33.0"), Quiet())  # type: ignore[arg-type]


class Disks:
    """File systems of the test: folder -> GiB free, for it and all below."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **free: float) -> None:
        self.free = {Path("/" + name): gib for name, gib in free.items()}
        monkeypatch.setattr(files, "device", lambda folder: hash(self.of(folder)))
        monkeypatch.setattr(files, "free_gib", lambda folder: self.free[self.of(folder)])

    def of(self, folder: Path) -> Path:
        return max((root for root in self.free if folder.is_relative_to(root)), key=str)


class Store(Docker):
    """An engine whose images would lie in ``folder``."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(Path("/usr/bin/docker"), "1", buildx=True)
        self.folder = folder

    def storage(self) -> Path | None:
        return self.folder


DISK = Disk(
    builder_gib=8.0,
    builder_layer_gib=5.0,
    builder_packages_gib=4.0,
    image_gib=10.0,
    image_layer_gib=7.0,
    image_packages_gib=6.0,
    objects_gib=5.0,
    flashinfer_gib=1.0,
    sources_gib=1.0,
    dist_gib=0.5,
)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Base:
    monkeypatch.setattr(decide, "_work_folder", lambda base: tmp_path)
    monkeypatch.setattr(machine, "available", lambda: 64 * GIB)
    monkeypatch.setattr(layout, "cache", lambda: Path("/home/me/.cache/sm12x"))
    monkeypatch.setattr(layout, "dist", lambda version: Path("/home/me/sm12x/dist") / version)
    return dataclasses.replace(bases.load("0.33.0"), disk=DISK)


def _require(
    base: Base,
    engine: Engine,
    *,
    image: bool = True,
    full: bool = False,
    flashinfer: bool = False,
) -> None:
    modules = base.modules if full else base.modules[:1]
    made = BaseImage(reference="", digest="", origin="")
    plan = decide.BuildPlan(
        base=base,
        platforms=HERE,
        arch_list="12.0a",
        mode=modes.BuildMode(name="x", choice=ModuleChoice(modules=modules, kept=())),
        flashinfer="12.0a" if flashinfer else "",
        options=decide.Options(version=base.version, image=image),
        engine=engine,
        image=made,
        builder=made,
        host=HostConfig(secrets={}, mirror=None, host_network=False),
        inputs="",
        earlier=None,
        report=Quiet(),  # type: ignore[arg-type]
    )
    try:
        plan.require_room()
    finally:
        for begun in plan.work.glob("begun-*"):
            begun.unlink()


def test_what_lies_on_one_disk_is_added_up(monkeypatch: pytest.MonkeyPatch, base: Base) -> None:
    engine = Store(Path("/var/lib/docker"))
    disks = Disks(monkeypatch, var=28.0, home=2.0)
    _require(base, engine)
    disks.free[Path("/var")] = 27.9
    with pytest.raises(NoSpaceError) as refused:
        _require(base, engine)
    for fact in ("28.0 GiB", "/var/lib/docker", "27.9 GiB"):
        assert fact in refused.value.message
    for step in ("free 0.1 GiB", "data-root"):
        assert step in refused.value.next_step
    _require(base, engine, image=False)
    with pytest.raises(NoSpaceError, match=r"33\.0 GiB"):
        _require(base, engine, full=True)
    # FlashInfer's modules: objects and a layer.
    with pytest.raises(NoSpaceError, match=r"30\.0 GiB"):
        _require(base, engine, flashinfer=True)
    # All on one: the checkout and our cache count as well.
    Disks(monkeypatch, **{"": 29.4})
    with pytest.raises(NoSpaceError, match=r"29\.5 GiB"):
        _require(base, engine)


@pytest.mark.parametrize(
    ("free", "folder", "remedy"),
    [
        # 18 of layers and one of 7 in its container; 10 of packages and that one twice.
        ({"var": 24.9, "tmp": 99.0, "home": 99.0}, "/var/lib/containers", "graphroot"),
        ({"var": 99.0, "tmp": 23.9, "home": 99.0}, "/tmp/cache", "TMPDIR"),  # noqa: S108
        ({"var": 99.0, "tmp": 99.0, "home": 1.4}, "/home/me/.cache/sm12x", "SM12X_CACHE"),
    ],
)
def test_the_disk_that_is_too_small_is_named(
    monkeypatch: pytest.MonkeyPatch, base: Base, free: dict[str, float], folder: str, remedy: str
) -> None:
    Disks(monkeypatch, **free)
    engine = Buildah(Path("/usr/bin/buildah"), "1.28.2", chroot=True)
    monkeypatch.setattr(engine, "storage", lambda: Path("/var/lib/containers"))
    monkeypatch.setenv("TMPDIR", "/tmp/cache")  # noqa: S108
    with pytest.raises(NoSpaceError, match=rf"{folder}, .*Next: .*{remedy}"):
        _require(base, engine)


def test_an_engine_on_another_machine_has_a_disk_of_its_own(
    monkeypatch: pytest.MonkeyPatch, base: Base
) -> None:
    Disks(monkeypatch, **{"": 1.5})
    _require(base, Store(None))


def test_memory_is_checked_before_a_build_is_begun(
    monkeypatch: pytest.MonkeyPatch, base: Base
) -> None:
    Disks(monkeypatch, **{"": 99.0})
    engine = Store(Path("/var/lib/docker"))
    monkeypatch.setattr(machine, "available", lambda: GIB // 2)
    with pytest.raises(NoSpaceError, match=r"2\.0 GiB of memory, 0\.5 GiB"):
        _require(base, engine)
    monkeypatch.setattr(machine, "available", lambda: 4 * GIB)
    with pytest.raises(NoSpaceError, match=r"9\.8 GiB of memory, 4\.0 GiB"):
        _require(base, engine, full=True)


def test_two_bundles_of_a_checkout_do_not_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases.load("0.33.0")
    monkeypatch.setattr(decide, "_work_folder", lambda base: tmp_path)
    monkeypatch.setattr(layout, "bundles", lambda: tmp_path / "dist")
    left = [tmp_path / "secrets-left", tmp_path / "dist/.0.33.0.left"]
    for folder in (*left, tmp_path / "dist/0.33.0"):
        folder.mkdir(parents=True)
    with decide.alone(base):
        assert not any(folder.exists() for folder in left)
        assert (tmp_path / "dist/0.33.0").exists()
        with pytest.raises(BuildFailedError, match=base.version), decide.alone(base):
            pass
    with decide.alone(base):
        pass
