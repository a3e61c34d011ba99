"""FlashInfer's modules ahead of time: what is asked for, what a stopped build keeps, `check`."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sm12x.core import declared
from sm12x.core.errors import BadFileError, BuildFailedError, ToolFailedError, UsageError
from sm12x.image.base.platforms import Platforms
from sm12x.image.bundle import context, modes
from sm12x.runtime.check import machinecode
from sm12x.runtime.check.native import LoadedDriver
from sm12x.runtime.check.report import FAIL, NOTE, PASS
from sm12x.runtime.places import Places
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, FlashInferModule
from sm12x.wheel import flashinfer, flashinfer_jit, selection
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.flashinfer import Request

DATA = Path(__file__).with_name("data")
# Of the files there: code for 12.0f and 12.1a; for 7.5 alone; no ELF file at all.
GOOD, OLD, TEXT = DATA / "kernels.so", DATA / "stub.so", Path(__file__)
DRIVER = LoadedDriver(path=None, env={"LD_LIBRARY_PATH": "/stub"})


def module(name: str, **more: Any) -> FlashInferModule:
    known = {"generator": "flashinfer.jit:gen", "why": "w", "cpu_seconds": 60.0, "peak_gib": 3.0}
    return FlashInferModule(**{"name": name, **known, **more})


def request(*modules: FlashInferModule) -> Request:
    return Request(arch_list="12.0f", key="k", modules=modules)


class Builder:
    """Stands for the process that FlashInfer runs in: ``made`` is what each module becomes."""

    def __init__(self) -> None:
        self.made: dict[str, Path] = {}
        self.asked: list[tuple[str, ...]] = []
        self.env: dict[str, str | None] = {}
        self.failing = ""

    def __call__(
        self,
        verb: str,
        modules: Sequence[FlashInferModule],
        scratch: Path,
        *,
        env: dict[str, str | None],
        on_line: Callable[[str], None] | None = None,
    ) -> dict[str, str]:
        self.asked.append((verb, *(each.name for each in modules)))
        self.env = env
        if self.failing:
            raise ToolFailedError(self.failing, next_step="")
        return {each.name: str(self.made.get(each.name, GOOD)) for each in modules}


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    monkeypatch.setattr(flashinfer, "ask", made)
    return made


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("12.0a;12.1a", "12.0f"),
        ("12.1a", "12.0f"),
        ("12.0f", "12.0f"),
        ("9.0a;12.0a;12.1a", "9.0a 12.0f"),
        ("12.0+PTX;8.9+PTX", "8.9 12.0f"),
        ("", ""),
    ],
)
def test_all_of_sm12x_is_one_family(given: str, wanted: str) -> None:
    assert flashinfer.targets(given) == wanted


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(2, 24, 2), (64, 24, 8), (64, 2, 1), (8, None, 1), (1, 99, 1)]
)
def test_as_many_units_run_as_cores_and_memory_allow(
    cores: int, gib: int | None, jobs: int
) -> None:
    modules = [module("a", peak_gib=1.0), module("b", peak_gib=3.0)]
    free = None if gib is None else gib * 2**30
    assert flashinfer.jobs(modules, cores=cores, available=free) == jobs


def test_modules_land_where_flashinfer_looks(builder: Builder, tmp_path: Path) -> None:
    made = flashinfer.build(request(module("a"), module("b")), tmp_path / "out", tmp_path / "work")
    assert (tmp_path / "out/aot/a/a.so").read_bytes() == GOOD.read_bytes()
    assert flashinfer.read(tmp_path / "out/flashinfer.json") == made
    assert [library.module.name for library in made.libraries] == ["a", "b"]
    assert made.libraries[0].cubins["12.0f"] == 1
    assert builder.env["FLASHINFER_CUDA_ARCH_LIST"] == "12.0f"
    dates = {path.stat().st_mtime for path in (tmp_path / "out").rglob("*")}
    assert len(dates) == 1


def test_the_work_folder_may_be_named_from_here(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flashinfer.build(request(module("a")), Path("out"), Path("work"))
    assert builder.env["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "work" / "k")
    assert Path("out/aot/a/a.so").is_file()


def test_nothing_asked_for_leaves_an_empty_folder(builder: Builder, tmp_path: Path) -> None:
    assert flashinfer.build(request(), tmp_path / "out", tmp_path / "work").libraries == ()
    assert builder.asked == []
    assert list((tmp_path / "out/aot").iterdir()) == []


def test_a_finished_module_is_not_compiled_again_unless_it_is_another(
    builder: Builder, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    flashinfer.build(request(module("a")), out, work)
    flashinfer.build(request(module("a", why="other words"), module("b")), out, work)
    flashinfer.build(request(module("a", arguments={"head_dim": 128}), module("b")), out, work)
    flashinfer.build(dataclasses.replace(request(module("b")), key="other"), out, work)
    assert builder.asked == [("build", "a"), ("build", "b"), ("build", "a"), ("build", "b")]


def test_a_failed_build_leaves_what_was_there(builder: Builder, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    flashinfer.build(request(module("a")), out, work)
    builder.failing = "ninja: error"
    with pytest.raises(BuildFailedError) as caught:
        flashinfer.build(request(module("a"), module("b")), out, work)
    assert "ninja: error" in caught.value.message
    assert [path.name for path in (out / "aot").iterdir()] == ["a"]


@pytest.mark.parametrize(("made", "said"), [(OLD, "7.5"), (TEXT, "")])
def test_a_module_that_sm12x_cannot_run_is_refused(
    builder: Builder, tmp_path: Path, made: Path, said: str
) -> None:
    builder.made["a"] = made
    with pytest.raises(BuildFailedError) as caught:
        flashinfer.build(request(module("a")), tmp_path / "out", tmp_path / "work")
    assert "a" in caught.value.message
    assert said in caught.value.message
    assert not (tmp_path / "out").exists()


def test_the_key_knows_the_compiler_and_the_architectures() -> None:
    first = flashinfer.key(["torch==2 --hash=1", "ninja==1"], "12.0a")
    assert first == flashinfer.key(["ninja==1", "torch==2 --hash=1"], "12.0a")
    assert first != flashinfer.key(["ninja==1", "torch==2 --hash=2"], "12.0a")
    assert first != flashinfer.key(["ninja==1", "torch==2 --hash=1"], "12.0a;12.1a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../escape"),
        ("name", ""),
        ("generator", "flashinfer.jit"),
        ("generator", "os:system('x')"),
        ("peak_gib", 0.0),
        ("cpu_seconds", -1.0),
    ],
)
def test_a_base_cannot_ask_for_what_is_no_module(key: str, value: object) -> None:
    entry, faults = declared.check(FlashInferModule, {**vars(module("a")), key: value})
    assert entry is None
    assert [fault.where for fault in faults] == [(key,)]


class FakeTorch(ModuleType):
    dtype = type("dtype", (), {})
    bfloat16 = dtype()


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A torch and a FlashInfer to import: the calls of its generator ``gen``."""
    calls: list[dict[str, Any]] = []

    def gen(**arguments: Any) -> SimpleNamespace:
        calls.append(arguments)

        def load() -> None:
            if arguments.get("broken"):
                raise RuntimeError("no such\nmodule")

        return SimpleNamespace(name="made", build_and_load=load)

    package = ModuleType("fake_flashinfer")
    monkeypatch.setattr(package, "gen", gen, raising=False)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("torch"))
    monkeypatch.setitem(sys.modules, "fake_flashinfer", package)
    return calls


def asked(name: str, **arguments: object) -> dict[str, Any]:
    return {"name": name, "generator": "fake_flashinfer:gen", "arguments": arguments}


def test_dtypes_are_given_by_name(generators: list[dict[str, Any]]) -> None:
    flashinfer_jit.specs([asked("made", dtype="bfloat16", backend="fa2", head_dim=128)])
    assert generators == [{"dtype": FakeTorch.bfloat16, "backend": "fa2", "head_dim": 128}]


def test_a_module_of_another_name_is_refused(generators: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="other"):
        flashinfer_jit.specs([asked("other")])


def test_what_keeps_a_module_from_loading_is_said(generators: list[dict[str, Any]]) -> None:
    assert flashinfer_jit.load([asked("made")]) == {"made": ""}
    assert flashinfer_jit.load([asked("made", broken=True)]) == {
        "made": "RuntimeError: no such module"
    }
    assert "ValueError" in flashinfer_jit.load([asked("other")])["other"]


@dataclasses.dataclass
class Image:
    places: Places
    answers: dict[str, str]


@pytest.fixture
def image(builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """An image with two modules; ``answers`` is what FlashInfer says of loading them."""
    root, site = tmp_path / "root", tmp_path / "site"
    flashinfer.build(request(module("a"), module("b")), root, tmp_path / "work")
    shutil.copytree(root / "aot", site / flashinfer.FOLDER)
    answers = {"a": "", "b": ""}
    monkeypatch.setattr(flashinfer, "ask", lambda *_, **__: answers)
    places = Places(root=root, site=site, cuda_home=tmp_path, cache=tmp_path)
    return Image(places=places, answers=answers)


def states(image: Image, scratch: Path) -> list[str]:
    return [line.state for line in machinecode.check_flashinfer(image.places, DRIVER, scratch)]


def test_whole_modules_pass(image: Image, tmp_path: Path) -> None:
    assert states(image, tmp_path) == [PASS]


def test_a_changed_or_missing_module_is_found(image: Image, tmp_path: Path) -> None:
    path = image.places.site / flashinfer.FOLDER / "a/a.so"
    path.write_bytes(path.read_bytes() + b"\0")
    assert states(image, tmp_path) == [FAIL]
    path.unlink()
    assert states(image, tmp_path) == [FAIL]


def test_a_module_that_flashinfer_would_compile_is_found_for_each_device(
    image: Image, tmp_path: Path
) -> None:
    image.answers["b"] = "MissingJITCacheError: ..."
    lines = machinecode.check_flashinfer(image.places, DRIVER, tmp_path)
    assert [line.state for line in lines] == [FAIL, FAIL]
    assert all("b" in line.text and "MissingJITCacheError" in line.text for line in lines)
    assert {device for device in ("12.0f", "12.1a") for line in lines if device in line.text}


def test_a_probe_that_dies_fails(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> dict[str, str]:
        raise ToolFailedError("signal 11", next_step="")

    monkeypatch.setattr(flashinfer, "ask", die)
    assert states(image, tmp_path) == [FAIL, FAIL]


def test_an_image_without_modules_says_so(image: Image, tmp_path: Path) -> None:
    declared.write_json(image.places.flashinfer, flashinfer.Record(arch_list="", libraries=()))
    assert states(image, tmp_path) == [NOTE]
    image.places.flashinfer.unlink()
    assert states(image, tmp_path) == [FAIL]


HERE = Platforms(machine="x86_64", here="x86_64")
THERE = Platforms(machine="aarch64", here="x86_64", platform="linux/arm64")


@pytest.fixture
def base() -> Base:
    return dataclasses.replace(bases.load(bases.default()), flashinfer=(module("a"),))


@pytest.mark.parametrize(
    ("asked", "mode", "wanted"),
    [
        (None, "full", True),
        (None, "quick", False),
        (True, "quick", True),
        (False, "full", False),
    ],
)
def test_full_mode_has_them_unless_asked_otherwise(
    base: Base, asked: bool | None, mode: str, wanted: bool
) -> None:
    assert modes.flashinfer(base, asked, mode, HERE, image=True) is wanted


@pytest.mark.parametrize(
    ("places", "image", "listed"), [(THERE, True, True), (HERE, False, True), (HERE, True, False)]
)
def test_where_they_cannot_be_made_asking_for_them_is_an_error(
    base: Base, places: Platforms, image: bool, listed: bool
) -> None:
    if not listed:
        base = dataclasses.replace(base, flashinfer=())
    assert not modes.flashinfer(base, None, "full", places, image=image)
    with pytest.raises(UsageError):
        modes.flashinfer(base, True, "full", places, image=image)


def test_a_full_build_counts_them(base: Base) -> None:
    def minutes(cores: int, *modules: FlashInferModule) -> float:
        given = dataclasses.replace(base, flashinfer=modules)
        others = selection.choose(given, (), mode="full").modules
        return selection.full_minutes(given, others, cores=cores, memory_gib=24.0)

    none, some = minutes(2), minutes(2, module("a", cpu_seconds=1200.0, peak_gib=3.0))
    assert 9.9 < some - none < 10.1
    # One at a time where memory does not do for two.
    assert 19.9 < minutes(2, module("a", cpu_seconds=1200.0, peak_gib=20.0)) - none < 20.1


def test_the_context_has_the_request(base: Base) -> None:
    for archs, count in (("12.0a;12.1a", 1), ("", 0)):
        text = context.bundle_files(base, "x86_64", flashinfer=archs)[ledgers.FLASHINFER_REQUEST]
        assert isinstance(text, str)
        made = declared.parse_json(Request, text, Path("flashinfer.json"), next_step="")
        assert len(made.modules) == count


def test_a_record_of_other_making_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"schema": 2}')
    with pytest.raises(BadFileError):
        flashinfer.read(tmp_path / "r.json")
