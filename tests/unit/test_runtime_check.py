"""`check` on a small fake image: whole it passes, and each thing that is corrupted is found."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm12x import layout
from sm12x.core.errors import ToolFailedError
from sm12x.recipes import load
from sm12x.runtime.check import compiler, content, machinecode, native, probe, report, versions
from sm12x.runtime.check.report import FAIL, NOTE, PASS, WARN, Line
from sm12x.runtime.places import Places
from sm12x.wheel.ledger import ExtraEntry, FileEntry, Ledger, LibraryEntry, OverrideEntry

PATCHED = "vllm/device_allocator/cumem.py"
LIBRARY = "vllm/_C.abi3.so"
FOREIGN = "vllm/third_party/_C.cpython-310-x86_64-linux-gnu.so"
FILES = {PATCHED: b"patched", LIBRARY: b"machine code", FOREIGN: b"other", "vllm/a.py": b"a"}
LOCK = (
    "# made by hand\n--only-binary :all:\n\ntorch==2.11.0 \\\n    --hash=sha256:00\n    # via x\n"
)


def make_ledger(**fields: Any) -> Ledger:
    """A ledger with the fields that matter here, and nothing in the others."""
    empty = {field.name: "" for field in dataclasses.fields(Ledger) if field.name != "schema"}
    return Ledger(**{**empty, **fields})


def hexdigest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def library(path: str, *ops: str) -> LibraryEntry:
    return LibraryEntry(
        path=path,
        sha256=hexdigest(FILES[path]),
        size=len(FILES[path]),
        official_size=len(FILES[path]),
        origin="official",
        reason="",
        cubins={},
        ptx={},
        sm120="native",
        sm121="ptx",
        ops=ops,
        lost=(),
    )


@dataclasses.dataclass
class Image:
    places: Places
    ledger: Ledger

    @property
    def record(self) -> Path:
        return self.places.site / f"vllm-{self.ledger.wheel_version}.dist-info" / "RECORD"

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def dist(site: Path, name: str, version: str, *requires: str) -> Path:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    rows = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(rows) + "\n")
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Image:
    places = Places(
        root=tmp_path / "sm12x",
        site=tmp_path / "site",
        cuda_home=tmp_path / "cuda",
        cache=tmp_path / "cache",
    )
    for folder in (places.site, places.recipes, places.stand_in.parent):
        folder.mkdir(parents=True)
    places.stand_in.write_bytes(b"stand-in")
    places.lock.write_text(LOCK)
    ledger = make_ledger(
        base_version="1.2.3",
        stack_id="0123abcd",
        patches=(),
        mode="quick",
        machine="x86_64",
        python="3.13",
        files=(
            FileEntry(
                path=PATCHED,
                sha256=hexdigest(FILES[PATCHED]),
                base_sha256="",
                origin="patched",
            ),
        ),
        libraries=(library(LIBRARY, "_C::one", "_C::two.out"), library(FOREIGN)),
        lock_sha256=hexdigest(LOCK.encode()),
        dependencies={"torch": "2.11.0"},
    )
    rows = []
    for name, data in FILES.items():
        path = places.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    folder = dist(places.site, "vllm", ledger.wheel_version, "torch==2.11.0", 'x; extra == "y"')
    metadata = (folder / "METADATA").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
    rows += [
        f"{folder.name}/METADATA,sha256={digest},{len(metadata)}",
        f"{folder.name}/RECORD,,",
        "vllm/__pycache__/a.cpython-313.pyc,,",
    ]
    (folder / "RECORD").write_text("\n".join(rows) + "\n")
    dist(places.site, "torch", "2.11.0", "numpy>=1; python_version < '3'")
    (places.site / "vllm_sleep_keep").mkdir()
    (places.site / "vllm_sleep_keep" / "__init__.py").write_bytes(b"")
    empty = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).rstrip(b"=").decode()
    keep = dist(places.site, "vllm_sleep_keep", "0.1.0")
    (keep / "RECORD").write_text(
        f"vllm_sleep_keep/__init__.py,sha256={empty},0\n{keep.name}/RECORD,,\n"
    )
    return Image(places=places, ledger=ledger)


def faults(lines: list[Line]) -> str:
    assert all(line.next_step for line in lines if line.state == FAIL)
    return "\n".join(line.text for line in lines if line.state == FAIL)


def check_versions(image: Image) -> str:
    places = image.places
    return faults(versions.check(image.ledger, places.lock, versions.installed(places.site)))


def check_content(image: Image) -> str:
    return faults(content.check(image.ledger, image.places.site))


def test_a_whole_image_passes(image: Image) -> None:
    assert check_versions(image) == ""
    assert check_content(image) == ""


@pytest.mark.parametrize(
    ("requirement", "instead_of", "fault"),
    [
        ("torch==2.11.0", "torch>=3", ""),
        # Another wish than the one that is known, or another version than the one it got instead.
        ("torch==2.11.0", "torch>=4", "vllm requires torch>=3, found 2.11.0"),
        ("torch==2.12.0", "torch>=3", "vllm requires torch>=3, found 2.11.0"),
    ],
)
def test_a_requirement_that_the_lock_replaces_is_noted(
    requirement: str, instead_of: str, fault: str
) -> None:
    override = OverrideEntry(requirement=requirement, instead_of=instead_of, why="none is newer")
    packages = [
        versions.Distribution(name="vllm", version="1", requires=("torch>=3",)),
        versions.Distribution(name="torch", version="2.11.0", requires=()),
    ]
    lines = versions.requirements(packages, [override])
    assert faults(lines) == fault
    notes = [line.text for line in lines if line.state == NOTE]
    said = "vllm requires torch>=3, found 2.11.0, as the lock says: none is newer"
    assert notes == ([] if fault else [said])


@pytest.mark.parametrize(
    ("of", "fault"),
    [
        ("torch", ""),
        # Somebody else's wish for the same.
        ("vllm", "torch requires nvidia-nccl-cu13==2.28.9, found 2.29.7"),
    ],
)
def test_the_wish_of_another_package_may_be_replaced_too(of: str, fault: str) -> None:
    override = OverrideEntry(
        of=of, requirement="nvidia-nccl-cu13>=2.29.3,<2.30",
        instead_of="nvidia-nccl-cu13==2.28.9", why="it deadlocks",
    )  # fmt: skip
    wish = 'nvidia-nccl-cu13==2.28.9; python_version > "3"'
    packages = [
        versions.Distribution(name="torch", version="2.11.0", requires=(wish,)),
        versions.Distribution(name="nvidia-nccl-cu13", version="2.29.7"),
    ]
    lines = versions.requirements(packages, [override])
    assert faults(lines).replace('; python_version > "3"', "") == fault
    assert len([line for line in lines if line.state == NOTE]) == (0 if fault else 1)


EXTRA = ExtraEntry(
    name="b12x", requirement="b12x==1.5.1", license="Apache-2.0", modules=("b12x.a", "b12x._b")
)


@pytest.fixture
def extra(image: Image) -> Image:
    """The image with the package of an extra, as an installer leaves it."""
    with_it = LOCK + "b12x==1.5.1 \\\n    --hash=sha256:00\n"
    image.places.lock.write_text(with_it)
    image.ledger = dataclasses.replace(
        image.ledger,
        extras=(EXTRA,),
        lock_sha256=hexdigest(with_it.encode()),
        dependencies={"torch": "2.11.0", "b12x": "1.5.1"},
    )
    site = image.places.site
    image.edit(
        image.record.with_name("METADATA"),
        'Requires-Dist: x; extra == "y"\n',
        'Requires-Dist: x; extra == "y"\nRequires-Dist: b12x==1.5.1; extra == "b12x"\n',
    )
    folder = dist(site, "b12x", "1.5.1", "torch>=2", 'pytest; extra == "dev"')
    image.edit(
        folder / "METADATA", "Version: 1.5.1", "Version: 1.5.1\nLicense-Expression: Apache-2.0"
    )
    rows = []
    (site / "b12x").mkdir()
    for name, data in {"b12x/__init__.py": b"", "b12x/a.py": b"a = 1"}.items():
        (site / name).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    (folder / "RECORD").write_text("\n".join([*rows, f"{folder.name}/RECORD,,"]) + "\n")
    return image


def test_a_whole_image_with_an_extra_passes(extra: Image) -> None:
    places = extra.places
    lines = versions.check(extra.ledger, places.lock, versions.installed(places.site))
    assert faults(lines) == ""
    assert "b12x 1.5.1, of vLLM's extra b12x, Apache-2.0" in [line.text for line in lines]
    # The fixture changed vLLM's own metadata, which is in its RECORD.
    lines = content.check(extra.ledger, places.site)
    assert faults(lines).count("\n") == 0
    assert "METADATA" in faults(lines)
    assert "RECORD of b12x agrees with 3 files, and there are no others" in [
        line.text for line in lines
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Apache-2.0", "MIT", "its licence is MIT, the ledger says Apache-2.0"),
        ("License-Expression: Apache-2.0\n", "", "its licence is not said, the ledger says"),
        ("Version: 1.5.1", "Version: 1.5.2", "b12x is 1.5.2, 1.5.1 is locked"),
        ("torch>=2", "torch>=3", "b12x requires torch>=3, found 2.11.0"),
    ],
)
def test_a_wrong_package_of_an_extra_is_found(extra: Image, old: str, new: str, said: str) -> None:
    extra.edit(extra.places.site / "b12x-1.5.1.dist-info" / "METADATA", old, new)
    assert said in check_versions(extra)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # What vLLM asks for with the extra is looked at, too.
        ('b12x==1.5.1; extra == "b12x"', 'b12x==1.6; extra == "b12x"', "asks for b12x==1.6"),
        ('b12x==1.5.1; extra == "b12x"', 'b12x==1.5.1; extra == "z"', "asks for nothing of it"),
        ('; extra == "b12x"', "", "asks for nothing of it"),
    ],
)
def test_an_extra_must_be_the_releases_own(extra: Image, old: str, new: str, said: str) -> None:
    extra.edit(extra.record.with_name("METADATA"), old, new)
    assert f"b12x 1.5.1, of vLLM's extra b12x: vLLM's metadata {said}" in check_versions(extra)


def test_what_an_extra_asks_for_must_hold() -> None:
    vllm = versions.Distribution(
        name="vllm", version="1", requires=('b12x==1.5.1; extra == "b12x"', 'c; extra == "d"')
    )
    assert faults(versions.requirements([vllm])) == ""
    assert 'b12x==1.5.1; extra == "b12x", found None' in faults(
        versions.requirements([vllm], extras=[EXTRA])
    )


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        ("b12x/a.py", b"a = 2", "RECORD: b12x/a.py is not the file that was installed"),
        ("b12x/c.py", b"", "b12x/c.py is on disk and not in RECORD"),
        ("b12x/a.py", None, "RECORD: b12x/a.py is missing"),
        ("B12x-1.4.dist-info/RECORD", b"", "one b12x-*.dist-info is expected, found B12x-1.4"),
    ],
)
def test_a_wrong_file_of_an_extra_is_found(
    extra: Image, path: str, data: bytes | None, said: str
) -> None:
    place = extra.places.site / path
    place.parent.mkdir(exist_ok=True)
    if data is None:
        place.unlink()
    else:
        place.write_bytes(data)
    assert said in check_content(extra)


def _extras(image: Image, answer: object) -> list[Line]:
    return native.check_extras(image.ledger, NO_DRIVER, answering({"imports": answer}))


def test_the_modules_of_an_extra_are_imported(image: Image, extra: Image) -> None:
    lines = _extras(extra, {"b12x.a": "", "b12x._b": ""})
    assert [(line.state, line.text) for line in lines] == [
        (PASS, "b12x: 2 modules can be imported")
    ]
    lines = _extras(extra, {"b12x.a": "", "b12x._b": "ImportError: no cutlass"})
    assert [line.text for line in lines] == ["b12x._b cannot be imported: ImportError: no cutlass"]
    assert faults(lines)
    crash = ToolFailedError("ended with -11", next_step="x")
    assert "b12x stopped the probe: ended with -11" in faults(_extras(extra, crash))
    extra.ledger = dataclasses.replace(extra.ledger, extras=())
    assert _extras(extra, crash) == []


def test_an_import_says_what_keeps_it_from_working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sound.py").write_text("")
    (tmp_path / "odd.py").write_text("raise RuntimeError('no\\n driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe.imports(["sound", "odd", "odd.part", "absent"]) == {
        "sound": "",
        "odd": "RuntimeError: no driver",
        "odd.part": "RuntimeError: no driver",
        "absent": "ModuleNotFoundError: No module named 'absent'",
    }


def _upgrade(image: Image) -> None:
    old = image.places.site / "torch-2.11.0.dist-info"
    (old / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n")


def _remove(image: Image) -> None:
    folder = image.places.site / "torch-2.11.0.dist-info"
    (folder / "METADATA").unlink()
    folder.rmdir()


def _add(image: Image) -> None:
    dist(image.places.site, "extra", "1")


def _official(image: Image) -> None:
    image.ledger = dataclasses.replace(image.ledger, stack_id="ffffffff")


def _locked_otherwise(image: Image) -> None:
    image.edit(image.places.lock, "2.11.0", "2.10.0")


def _ledger_otherwise(image: Image) -> None:
    image.ledger = dataclasses.replace(image.ledger, dependencies={"torch": "2.9.0"})


@pytest.mark.parametrize(
    ("corrupt", "fault"),
    [
        (_upgrade, "torch is 2.12.0, 2.11.0 is locked"),
        (_upgrade, "vllm requires torch==2.11.0, found 2.12.0"),
        (_remove, "torch 2.11.0 is locked and not installed"),
        (
            lambda image: dist(image.places.site, "extra", "1"),
            "extra 1 is installed and in no lock",
        ),
        (
            _official,
            "vllm is 1.2.3+sm12x.0123abcd.quick, the ledger says 1.2.3+sm12x.ffffffff.quick",
        ),
        (_locked_otherwise, "is not the lock the ledger names"),
        (_locked_otherwise, "torch is 2.11.0, 2.10.0 is locked"),
        (_ledger_otherwise, "torch is 2.11.0, 2.9.0 is in the ledger"),
    ],
)
def test_a_wrong_package_is_found(
    image: Image, corrupt: Callable[[Image], object], fault: str
) -> None:
    corrupt(image)
    assert fault in check_versions(image)


def test_names_and_versions_are_compared_in_normal_form(image: Image) -> None:
    lock = LOCK + "Nvidia_Thing==1.0\nwindows-only==1; sys_platform == 'win32'\n"
    image.places.lock.write_text(lock)
    image.ledger = dataclasses.replace(image.ledger, lock_sha256=hexdigest(lock.encode()))
    dist(image.places.site, "nvidia-thing", "1.0.0")
    assert check_versions(image) == ""


def _write(path: str, data: bytes) -> Callable[[Image], object]:
    return lambda image: (image.places.site / path).write_bytes(data)


@pytest.mark.parametrize(
    ("corrupt", "fault"),
    [
        (_write(PATCHED, b"pristine"), f"{PATCHED} (patched) has sha256"),
        (_write(LIBRARY, b"machine codf"), f"{LIBRARY} (official) has sha256"),
        (_write(LIBRARY, b"machine codf"), f"RECORD: {LIBRARY} is not the file that was installed"),
        (_write("vllm/a.py", b"b"), "RECORD: vllm/a.py is not the file that was installed"),
        (_write("vllm/b.py", b""), "vllm/b.py is on disk and not in RECORD"),
        (lambda image: (image.places.site / LIBRARY).unlink(), f"{LIBRARY} (official) is missing"),
        (lambda image: (image.places.site / "vllm/a.py").unlink(), "RECORD: vllm/a.py is missing"),
        (lambda image: image.record.unlink(), "RECORD cannot be read"),
        (lambda image: image.edit(image.record, ",12\n", ",13\n"), "has another size than RECORD"),
        (lambda image: image.edit(image.record, LIBRARY, "vllm/a.py"), "is in the ledger and not"),
        (
            lambda image: dist(image.places.site, "vllm", "9"),
            "one vllm-*.dist-info is expected, found vllm-1.2.3+sm12x.0123abcd.quick.dist-info",
        ),
    ],
)
def test_a_wrong_file_is_found(
    image: Image, corrupt: Callable[[Image], object], fault: str
) -> None:
    corrupt(image)
    assert fault in check_content(image)


def test_a_module_with_other_machine_code_is_named(image: Image) -> None:
    """Hashes say that it is another file; this says what it holds instead."""
    site = image.places.site
    kernels = (Path(__file__).with_name("data") / "kernels.so").read_bytes()
    (site / LIBRARY).write_bytes(kernels)
    found = machinecode.read(site / LIBRARY)
    assert found.cubins["12.0a"]
    entry = dataclasses.replace(
        library(LIBRARY), origin="compiled", cubins=dict(found.cubins), ptx=dict(found.ptx)
    )
    ledger = dataclasses.replace(image.ledger, libraries=(entry,))
    (line,) = machinecode.check(ledger, site)
    assert line.state == PASS
    assert "1 libraries, 1 of them compiled for this image (quick mode)" in line.text

    # The fat binary's entry for 12.0a says 12.1a now.
    at = kernels.index(bytes([120, 0, 0, 0]) + bytes(8) + bytes.fromhex("11801001"))
    (site / LIBRARY).write_bytes(kernels[:at] + bytes([121]) + kernels[at + 1 :])
    fault = faults(machinecode.check(ledger, site))
    assert fault.startswith(f"{LIBRARY} (compiled) has cubins ")
    assert "12.1a x 2, ledger " in fault

    (site / LIBRARY).write_bytes(kernels[:-70])
    assert "machine code that cannot be read" in faults(machinecode.check(ledger, site))
    (site / LIBRARY).write_bytes(b"")
    assert f"{LIBRARY} cannot be read: it is empty" in faults(machinecode.check(ledger, site))


def test_a_file_that_the_stack_removes_must_be_gone(image: Image) -> None:
    gone = FileEntry(path="vllm/gone.py", sha256="", base_sha256="00", origin="removed")
    image.ledger = dataclasses.replace(image.ledger, files=(*image.ledger.files, gone))
    assert check_content(image) == ""
    (image.places.site / gone.path).write_text("")
    assert "vllm/gone.py is there, the stack removes it" in check_content(image)


def test_what_python_compiles_beside_the_sources_is_no_fault(image: Image) -> None:
    cached = image.places.site / "vllm" / "__pycache__" / "b.cpython-313.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    assert check_content(image) == ""


def answering(answers: Mapping[str, Any]) -> native.Ask:
    def ask(kind: str, question: object, env: Mapping[str, str | None]) -> Any:
        answer = answers[kind]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


NO_DRIVER = native.LoadedDriver(path=None, env={})
LOADED = {LIBRARY: "", FOREIGN: "other-python"}


def modules(image: Image, libraries: dict[str, str], *ops: str) -> list[Line]:
    ask = answering({"modules": {"libraries": libraries, "ops": list(ops)}})
    return native.check_modules(image.ledger, image.places, NO_DRIVER, ask)


def test_a_program_is_not_loaded(image: Image) -> None:
    program = dataclasses.replace(library(LIBRARY), path="vllm/vllm-rs")
    image.ledger = dataclasses.replace(image.ledger, libraries=(*image.ledger.libraries, program))
    asked: list[Any] = []

    def ask(kind: str, question: Any, env: Mapping[str, str | None]) -> Any:
        asked.append(question["libraries"])
        return {"libraries": {}, "ops": []}

    native.check_modules(image.ledger, image.places, NO_DRIVER, ask)
    assert asked == [[LIBRARY, FOREIGN]]


def test_modules_that_load_and_register_pass(image: Image) -> None:
    lines = modules(image, LOADED, "_C::one.default", "_C::two.out", "aten::add")
    assert faults(lines) == ""
    assert [line.text for line in lines if line.state == NOTE] == [
        "1 module for other Pythons not loaded"
    ]


def test_a_module_that_does_not_load_is_found(image: Image) -> None:
    lines = modules(image, {LIBRARY: "undefined symbol: cuFoo"}, "_C::one", "_C::two.out")
    assert f"{LIBRARY} does not load: undefined symbol: cuFoo" in faults(lines)


def test_a_module_that_crashes_is_found(image: Image) -> None:
    ask = answering({"modules": ToolFailedError("ended with -11", next_step="x")})
    lines = native.check_modules(image.ledger, image.places, NO_DRIVER, ask)
    assert "loading stopped the probe: ended with -11" in faults(lines)


def test_a_lost_operator_is_found(image: Image) -> None:
    # Another overload of the same operator is not the one that is wanted.
    assert (
        f"{LIBRARY} registers 1 of the official wheel's 2 operators; lost: _C::two.out"
        in faults(modules(image, LOADED, "_C::one", "_C::two"))
    )


def test_operators_read_out_of_a_file_are_compared_without_namespaces(image: Image) -> None:
    read = dataclasses.replace(library(LIBRARY, "one", "two.out"), ops_by="read")
    image.ledger = dataclasses.replace(image.ledger, libraries=(read,))
    lines = modules(image, {LIBRARY: ""}, "_C::one", "_C::two.out")
    assert faults(lines) == ""
    assert any("compared without namespaces" in line.text for line in lines)
    assert "lost: two.out" in faults(modules(image, {LIBRARY: ""}, "_C::one", "_C::two"))


def test_a_ledger_without_operators_proves_nothing(image: Image) -> None:
    image.ledger = dataclasses.replace(image.ledger, libraries=(library(LIBRARY),))
    assert "the ledger lists no operators" in faults(modules(image, {LIBRARY: ""}))


def test_a_module_that_moved_is_found_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.first_there(("json.gone", "json.decoder")).__name__ == "json.decoder"
    assert probe.first_there(("gone.long.ago", "json.decoder")).__name__ == "json.decoder"
    # One that is there and lacks what it needs is not passed over.
    (tmp_path / "sm12x_lame.py").write_text("import sm12x_lame_leg\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="sm12x_lame_leg"):
        probe.first_there(("sm12x_lame", "json.decoder"))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        probe.first_there(("gone.long.ago", "gone"))


def test_without_a_driver_the_stand_in_is_used_for_probes_alone(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/old")
    driver, lines = native.check_driver(image.places, answering({"driver": None}), "")
    assert faults(lines) == ""
    assert driver.env == {"LD_LIBRARY_PATH": f"{image.places.stand_in.parent}:/old"}


def test_a_real_driver_is_used_and_named(image: Image, tmp_path: Path) -> None:
    real = tmp_path / "libcuda.so.580.1"
    real.write_bytes(b"real")
    driver, lines = native.check_driver(image.places, answering({"driver": str(real)}), "")
    assert driver.env == {}
    assert [line.text for line in lines] == [f"the real libcuda is used: {real}"]


@pytest.mark.parametrize("how", ["found", "copied", "ldconfig"])
def test_a_stand_in_on_the_default_path_is_found(image: Image, tmp_path: Path, how: str) -> None:
    found, ldconfig = None, ""
    if how == "found":
        found = str(image.places.stand_in)
    elif how == "copied":
        copy = tmp_path / "libcuda.so.1"
        copy.write_bytes(image.places.stand_in.read_bytes())
        found = str(copy)
    else:
        ldconfig = f"\tlibcuda.so.1 (libc6,x86-64) => {image.places.stand_in}\n"
    _, lines = native.check_driver(image.places, answering({"driver": found}), ldconfig)
    assert "the stand-in libcuda is on the default path" in faults(lines)


def test_a_missing_stand_in_is_found(image: Image) -> None:
    image.places.stand_in.unlink()
    _, lines = native.check_driver(image.places, answering({"driver": None}), "")
    assert "libcuda.so.1 is missing" in faults(lines)


RECIPE = "recipe_version: '1'\nname: x\ncontainer: y\ncommand: vllm serve m --port 1\n"


def recipe_lines(image: Image, text: str, answer: object) -> list[Line]:
    (image.places.recipes / "one.yaml").write_text(text)
    recipes = load.load_all(image.places.recipes)
    return native.check_arguments(recipes, NO_DRIVER, answering({"arguments": answer}))


def test_a_recipe_that_vllm_takes_passes(image: Image) -> None:
    lines = recipe_lines(image, RECIPE, {"problems": {"one": []}, "warnings": {"one": []}})
    assert [line.text for line in lines] == ["one: vLLM's parser takes all 3 arguments"]


def test_a_recipe_that_vllm_refuses_is_found(image: Image) -> None:
    refusal = {
        "problems": {"one": ["unrecognized arguments: --prot"]},
        "warnings": {"one": []},
    }
    lines = recipe_lines(image, RECIPE, refusal)
    assert "one: vLLM refuses it: unrecognized arguments: --prot" in faults(lines)


BLOCK = """\
sm12x:
  hardware: [gb10]
  gpus: 1
  sleep: {{level: never, reason: x}}
  status: {{state: untested, source: x, blocked: {{{release}: no such model}}}}
"""


@pytest.mark.parametrize(
    ("problems", "warnings"),
    [(["unrecognized arguments: --prot"], []), ([], ["VLLM_X is unknown"]), (["a"], ["b"])],
)
def test_a_recipe_of_another_release_is_no_fault_of_this_image(
    image: Image, monkeypatch: pytest.MonkeyPatch, problems: list[str], warnings: list[str]
) -> None:
    monkeypatch.setattr(layout, "release", lambda: "0.33.0")
    answer = {"problems": {"one": problems}, "warnings": {"one": warnings}}
    here = recipe_lines(image, RECIPE + BLOCK.format(release="0.33.0"), answer)
    said = "; ".join([*problems, *warnings])
    assert [(line.state, line.text) for line in here] == [
        (NOTE, f"one is blocked on 0.33.0, whose parser reports: {said}")
    ]
    # Blocked on another release only, it must pass here.
    there = recipe_lines(image, RECIPE + BLOCK.format(release="9.9.9"), answer)
    assert {line.state for line in there} == ({FAIL} if problems else {WARN, PASS}) | (
        {WARN} if warnings else set()
    )


def test_a_blocked_recipe_whose_arguments_the_release_takes_passes(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "release", lambda: "0.33.0")
    answer: dict[str, Any] = {"problems": {"one": []}, "warnings": {"one": []}}
    lines = recipe_lines(image, RECIPE + BLOCK.format(release="0.33.0"), answer)
    assert [line.state for line in lines] == [PASS]


def test_a_variable_that_vllm_does_not_know_is_a_warning(image: Image) -> None:
    unknown = "VLLM_X is not a variable of this release"
    answer = {"problems": {"one": []}, "warnings": {"one": [unknown]}}
    lines = recipe_lines(image, RECIPE, answer)
    assert [(line.state, line.text) for line in lines] == [
        (WARN, f"one: {unknown}"),
        (PASS, "one: vLLM's parser takes all 3 arguments"),
    ]
    assert "check: ok" in report.as_text(lines)
    assert json.loads(report.as_json(lines))["ok"] is True


def test_the_release_is_asked_for_variables_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parser(argparse.ArgumentParser):
        pass

    def make(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("model_tag", nargs="?")
        for name in ("reasoning-parser", "tool-call-parser"):
            parser.add_argument(f"--{name}")
            parser.add_argument(f"--{name.removesuffix('-call-parser')}-plugin")
        return parser

    nothing = SimpleNamespace(list_registered=list)
    fakes = {
        "vllm.platforms": SimpleNamespace(),
        "vllm.platforms.cuda": SimpleNamespace(CudaPlatform=SimpleNamespace),
        "vllm.envs": SimpleNamespace(environment_variables={"VLLM_USE_X": None}),
        "vllm.entrypoints.common.cli_args": SimpleNamespace(
            make_arg_parser=make, validate_parsed_serve_args=lambda parsed: None
        ),
        "vllm.reasoning": SimpleNamespace(ReasoningParserManager=nothing),
        "vllm.tool_parsers": SimpleNamespace(ToolParserManager=nothing),
        "vllm.utils.argparse_utils": SimpleNamespace(FlexibleArgumentParser=Parser),
    }
    monkeypatch.setattr(importlib, "import_module", fakes.__getitem__)
    answer = probe.arguments(
        {"one": ["m"], "two": ["m", "--x"]}, {"one": ["VLLM_USE_X", "VLLM_USE_Y", "HOME"]}
    )
    assert answer["problems"]["one"] == []
    assert answer["warnings"] == {
        "one": ["VLLM_USE_Y is not a variable of this release; perhaps you meant VLLM_USE_X"],
        "two": [],
    }
    assert "--x" in answer["problems"]["two"][0]


def test_a_recipe_of_another_program_is_noted(image: Image) -> None:
    lines = recipe_lines(image, RECIPE.replace("vllm serve", "serve"), None)
    assert [line.state for line in lines] == [NOTE]


def test_a_parser_that_does_not_run_is_found(image: Image) -> None:
    lines = recipe_lines(image, RECIPE, ToolFailedError("ended with 1", next_step="x"))
    assert "the parser could not be run: ended with 1" in faults(lines)


def test_an_image_without_recipes_is_found(image: Image) -> None:
    assert "no recipe" in faults(native.check_arguments({}, NO_DRIVER, answering({})))


def test_the_report_says_what_failed_and_what_next() -> None:
    lines = [report.Topic("a", "").passed("fine"), report.Topic("b", "correct it").failed("broken")]
    assert report.as_text(lines) == (
        "a\n  pass  fine\nb\n  fail  broken\n        next: correct it\n"
        "check: FAILED, 1 passed, 1 failed"
    )
    assert json.loads(report.as_json(lines))["ok"] is False


# ---- the Triton kernels of the stack ----


def kernel(name: str, capability: int, shared: int = 90112, error: str = "") -> dict[str, Any]:
    return {"name": name, "capability": capability, "shared": shared, "error": error}


def check_kernels(places: Places, *answer: dict[str, Any]) -> list[Line]:
    (places.site / compiler.PACKAGE).mkdir(parents=True, exist_ok=True)

    def ask(kind: str, question: Any, env: Mapping[str, str | None]) -> Any:
        assert kind == "kernels"
        assert question["folder"] == str(places.site / compiler.PACKAGE)
        return list(answer)

    return compiler.check_kernels(places, ask)


def kernel_places(tmp_path: Path) -> Places:
    return Places(root=tmp_path, site=tmp_path / "site", cuda_home=tmp_path, cache=tmp_path)


def test_a_stack_without_kernels_of_its_own_compiles_none(tmp_path: Path) -> None:
    def ask(*_: Any) -> Any:
        raise AssertionError

    assert compiler.check_kernels(kernel_places(tmp_path), ask) == []


def test_kernels_that_fit_pass_in_one_line(tmp_path: Path) -> None:
    (line,) = check_kernels(kernel_places(tmp_path), kernel("a", 120), kernel("a", 121, 101376))
    assert line.state == PASS
    assert "101376 of 101376" in line.text


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (kernel("b", 121, 101377), "101377"),
        (kernel("b", 121, 0, "ptxas says no"), "ptxas says no"),
    ],
)
def test_a_kernel_that_does_not_fit_or_compile_is_named(
    tmp_path: Path, wrong: dict[str, Any], named: str
) -> None:
    (line,) = check_kernels(kernel_places(tmp_path), kernel("a", 120), wrong)
    assert line.state == FAIL
    assert "b for sm_121" in line.text
    assert named in line.text


def test_a_package_that_lists_nothing_fails(tmp_path: Path) -> None:
    (line,) = check_kernels(kernel_places(tmp_path))
    assert line.state == FAIL


def test_the_package_with_the_sleep_backend_is_compared(image: Image) -> None:
    # GIVEN an image whose package is as its RECORD has it
    site = image.places.site
    assert faults(content.check(image.ledger, site)) == ""
    # It is in no lock, and that is no fault.
    assert check_versions(image) == ""
    # WHEN a file is changed, or the package is missing THEN that is a fault
    (site / "vllm_sleep_keep" / "__init__.py").write_bytes(b"changed")
    assert "vllm_sleep_keep/__init__.py" in faults(content.check(image.ledger, site))
    shutil.rmtree(site / "vllm_sleep_keep-0.1.0.dist-info")
    assert "one vllm-sleep-keep-*.dist-info is expected" in faults(
        content.check(image.ledger, site)
    )


def test_files_that_run_as_another_user_are_found(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    for name, mode in {"su": 0o4755, "wall": 0o2755, "ls": 0o755}.items():
        path = tmp_path / "usr" / name
        path.write_bytes(b"x")
        path.chmod(mode)
    # A folder's setgid bit gives no rights, and a link has none of its own.
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail").chmod(0o2775)
    (tmp_path / "link").symlink_to("usr/su")
    (line,) = content.check_modes(tmp_path)
    assert line.state == FAIL
    assert f"{tmp_path}/usr/su, {tmp_path}/usr/wall" in line.text
    assert "link" not in line.text
    for name in ("su", "wall"):
        (tmp_path / "usr" / name).chmod(0o755)
    (line,) = content.check_modes(tmp_path)
    assert line.state == PASS
