"""Judging and reporting an audit, and the command. What was read is made up here."""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from sm12x import layout
from sm12x.audit import library as library_module
from sm12x.audit import policy, render, report, scan
from sm12x.audit.fatbin import CodePiece, FatContainer
from sm12x.audit.model import DEVICES, SM120, Audit, Device, LibraryAudit
from sm12x.commands import audit as verb
from sm12x.core import declared, files
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import (
    BadArchitectureError,
    BadFileError,
    FindingsError,
    NoEngineError,
    NoSpaceError,
)
from sm12x.wheel import ledger

DATA = Path(__file__).parent / "data"
KERNELS = DATA / "kernels.so"


def unit(*codes: str) -> FatContainer:
    """A translation unit of these: "12.0f" is a cubin, "ptx 8.0" PTX."""
    entries = tuple(
        CodePiece(
            kind="ptx" if code.startswith("ptx ") else "cubin",
            arch=CudaArch.parse(code.removeprefix("ptx ")),
        )
        for code in codes
    )
    return FatContainer(offset=0, entries=entries)


def library(path: str, *units: FatContainer, faults: tuple[str, ...] = ()) -> LibraryAudit:
    return LibraryAudit(
        path=path,
        sha256="ab" * 32,
        size=3 * 1024**2,
        machine="x86_64",
        units=units,
        faults=faults,
    )


NATIVE, PTX, NONE = unit("12.0f", "10.0f"), unit("8.0", "ptx 8.0"), unit("9.0a")
ONLY_120 = unit("12.0a")
AUDIT = Audit(
    subject="vllm-1.0-x86_64.whl",
    kind="wheel",
    libraries=(
        library("vllm/_C.abi3.so", NATIVE, NATIVE, PTX, NONE),
        library("vllm/broken.so", faults=("it is not an ELF file",)),
        library("vllm/cumem_allocator.abi3.so"),
        library("vllm/only_a.so", ONLY_120),
        library("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", PTX, PTX),
        library("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", NONE),
    ),
)


def rules(tmp_path: Path, text: str) -> policy.Policy:
    path = tmp_path / "policy.toml"
    path.write_text(f'schema = 1\nname = "test"\n{text}')
    return policy.load(path)


DEFAULT = policy.load(layout.data() / "policies" / "default.toml")


def test_the_default_policy_names_every_offender() -> None:
    judgement = policy.judge(AUDIT, DEFAULT)
    assert [str(offender) for offender in judgement.offenders] == [
        "vllm/_C.abi3.so on 12.0: 1 of 4 translation units have no code for the device",
        "vllm/_C.abi3.so on 12.1: 1 of 4 translation units have no code for the device",
        "vllm/broken.so: could not be read: it is not an ELF file",
        "vllm/only_a.so on 12.1: 1 of 1 translation units have no code for the device",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so on 12.0: 1 of 1 translation units have no "
        "code for the device",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so on 12.1: 1 of 1 translation units have no "
        "code for the device",
    ]
    assert [entry.paths for entry in judgement.accepted] == [
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",)
    ]


def test_the_first_rule_that_matches_library_and_device_counts(tmp_path: Path) -> None:
    found = rules(
        tmp_path,
        """
        [[rule]]
        match = ["vllm/only_a.so"]
        on = ["12.1"]
        units = ["none"]
        reason = "known"
        [[rule]]
        match = ["vllm/only_a.so"]
        units = ["native"]
        [[rule]]
        match = ["*"]
        units = ["native", "ptx", "none"]
        reason = "all"
        """,
    )
    judgement = policy.judge(AUDIT, found)
    assert [offender.path for offender in judgement.offenders] == ["vllm/broken.so"]
    assert judgement.accepted[1].reason == "known"


def test_a_rule_reaches_into_an_image(tmp_path: Path) -> None:
    (rule,) = rules(tmp_path, '[[rule]]\nmatch = ["vllm/_C.abi3.so"]\nunits = ["native"]').rules
    installed = "opt/venv/lib/python3.13/site-packages/vllm/_C.abi3.so"
    assert rule.concerns(installed, SM120, compiled=False)
    assert not rule.concerns("opt/myvllm/_C.abi3.so", SM120, compiled=False)


def test_more_may_be_asked_of_what_was_compiled_here(tmp_path: Path) -> None:
    found = rules(
        tmp_path,
        """
        [[rule]]
        match = ["vllm/_C.abi3.so"]
        compiled = true
        units = ["native"]
        [[rule]]
        match = ["vllm/_C.abi3.so"]
        units = ["native", "ptx", "none"]
        reason = "official"
        required = true
        """,
    )
    for path in ("vllm/_C.abi3.so", "opt/venv/lib/python3.13/site-packages/vllm/_C.abi3.so"):
        library = dataclasses.replace(AUDIT["vllm/_C.abi3.so"], path=path)
        only = Audit(subject="x", kind="wheel", libraries=(library,))
        assert policy.judge(only, found, (SM120,)).passed
        named = {"vllm/_C.abi3.so": library.sha256}
        ours = policy.judge(only, found, (SM120,), compiled=named)
        assert [offender.message for offender in ours.offenders] == [
            "1 of 4 translation units run only through PTX",
            "1 of 4 translation units have no code for the device",
        ]


# What `sm12x build native --mode full --arch-list "9.0a;12.0a;12.1a"` makes of 0.33.0, by verdict
# on 12.x, as CMake configures it.
WITH_HOPPER = {
    "vllm/_C_stable_libtorch.abi3.so": (90, 1, 10),
    "vllm/_moe_C_stable_libtorch.abi3.so": (28, 0, 0),
    "vllm/_qutlass_C.abi3.so": (6, 0, 0),
    "vllm/_flashkda_C.abi3.so": (1, 0, 0),
}
POLICY = layout.patches() / "0.33.0" / "audit-policy.toml"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_full_build_may_be_for_hopper_too(lost: int) -> None:
    """It passes as it is, and not with one unit of each for 12.x left to PTX."""
    found = policy.load(POLICY)
    ours = unit("12.0a", "12.1a")
    made = [
        library(path, *[ours] * (native - lost), *[PTX] * (ptx + lost), *[unit("9.0a")] * none)
        for path, (native, ptx, none) in WITH_HOPPER.items()
    ]
    made.append(library("vllm/cumem_allocator.abi3.so"))
    compiled = {one.path: one.sha256 for one in made}
    judged = policy.judge(
        Audit(subject="x", kind="wheel", libraries=tuple(made)), found, compiled=compiled
    )
    broken = {offender.path for offender in judged.offenders if offender.path in compiled}
    assert broken == (set(WITH_HOPPER) if lost else set())


def test_units_beyond_those_counted_are_not_left_to_ptx() -> None:
    """A module with more native units than the policy's number: that hides none of these."""
    found = policy.load(POLICY)
    for ptx, faults in ((1, []), (2, ["2 of 101 translation units run only through PTX, "])):
        path = "vllm/_C_stable_libtorch.abi3.so"
        made = library(path, *[unit("12.0a", "12.1a")] * (101 - ptx), *[PTX] * ptx)
        judged = policy.judge(
            Audit(subject="x", kind="wheel", libraries=(made,)),
            found,
            (SM120,),
            compiled={made.path: made.sha256},
        )
        said = [one.message for one in judged.offenders if one.path == made.path]
        assert said == [f"{fault}the policy allows 1" for fault in faults]


def test_too_few_native_units_and_a_missing_library_are_offences(tmp_path: Path) -> None:
    found = rules(
        tmp_path,
        """
        [[rule]]
        match = ["vllm/_C.abi3.so"]
        units = ["native", "ptx", "none"]
        reason = "known"
        native_at_least = 3
        [[rule]]
        match = ["vllm/_moe_C.abi3.so"]
        units = ["native"]
        required = true
        """,
    )
    only = Audit(subject="x", kind="wheel", libraries=AUDIT.libraries[:1])
    assert [str(offender) for offender in policy.judge(only, found, (SM120,)).offenders] == [
        "vllm/_C.abi3.so on 12.0: 2 of 4 translation units run natively, the policy asks for 3",
        "vllm/_moe_C.abi3.so: is not there, and the policy requires it",
    ]


def test_a_library_no_rule_matches_is_an_offence(tmp_path: Path) -> None:
    found = rules(tmp_path, '[[rule]]\nmatch = ["nothing"]\nunits = ["native"]')
    assert "no rule" in policy.judge(AUDIT, found).offenders[0].message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nmatch = ["*"]\nunits = ["ptx"]', "reason is missing"),
        (
            '[[rule]]\nmatch = ["*"]\nunits = ["sass"]',
            "units.0. is 'sass'",
        ),
        ('[[rule]]\nmatch = "*"\nunits = ["native"]', "match has the wrong type"),
        ('[[rule]]\nmatch = ["*"]\nunits = ["native"]\nrequird = true', "meant required"),
        (
            '[[rule]]\nmatch = ["*"]\nunits = ["native"]\nnative_at_least = true',
            "least has the wrong type",
        ),
        (
            '[[rule]]\nmatch = ["*"]\nunits = ["native"]\non = ["12.0a"]',
            "on.0.: '12.0a' is what code",
        ),
        ('[[rule]]\nunits = ["native"]', "match is missing"),
        ("rule = [1]", "rule.0. has the wrong type"),
        ("", "rule is missing"),
        ("ruel = []", "meant rule"),
        ("this is not toml", "cannot be read"),
    ],
)
def test_a_fault_in_a_policy_names_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadFileError, match=said):
        rules(tmp_path, text)


def test_every_policy_that_ships_loads() -> None:
    found = list(layout.patches().glob("*/audit-policy.toml"))
    assert found
    for path in (*found, *(layout.data() / "policies").glob("*.toml")):
        assert policy.load(path).rules


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_report_is_as_the_golden_file(width: int) -> None:
    text = render.text(AUDIT, policy.judge(AUDIT, DEFAULT), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text == (DATA / f"audit-{width}.txt").read_text()


def test_a_report_of_host_code_alone_has_no_tables() -> None:
    text = render.text(Audit(subject="x", kind="file", libraries=(library("x.so"),)))
    assert text == "x: 1 library, 3 MiB; 0 with device code\n\nNo device code: x.so\n"


def schema() -> Any:
    return json.loads((layout.data() / "schemas" / "audit-1.json").read_text())


def written(*of: Any) -> Any:
    return json.loads(declared.to_json(report.document(*of)))


def test_a_report_reads_back_as_it_was(tmp_path: Path) -> None:
    made = report.document(AUDIT, policy.judge(AUDIT, DEFAULT))
    path = tmp_path / "audit.json"
    declared.write_json(path, made)
    again = report.read(path, next_step="")
    # Only the sentence of a finding is written, not what it is about.
    assert again.libraries == made.libraries
    assert json.loads(declared.to_json(again)) == json.loads(declared.to_json(made))
    path.write_text(path.read_text().replace('"subject"', '"subjct"'))
    with pytest.raises(BadFileError, match=r"audit\.json.* meant subject"):
        report.read(path, next_step="")


def test_the_json_report_fits_its_schema() -> None:
    document = written(AUDIT, policy.judge(AUDIT, DEFAULT))
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(document, schema())
    jsonschema.validate(written(AUDIT), schema())
    first = document["libraries"][0]
    assert first["cubins"] == {"8.0": 1, "9.0a": 1, "10.0f": 2, "12.0f": 2}
    assert first["runs"]["12.1"] == {
        "verdict": "mixed",
        "units": {"native": 2, "ptx": 1, "none": 1, "unknown": 0},
    }
    document["libraries"][0]["verdict"] = "?"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


@pytest.mark.parametrize("text", ["12.1a", "12.0+PTX", "sm_120", ""])
def test_a_device_is_no_build_target(text: str) -> None:
    with pytest.raises(BadArchitectureError):
        Device.parse(text)


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(verb.command, [str(word) for word in arguments])


def test_the_command_prints_the_report(tmp_path: Path) -> None:
    done = call(KERNELS)
    assert done.exit_code == 0
    assert "Policy `default`: passed." in done.output
    jsonschema.validate(json.loads(call(KERNELS, "--json", "--arch", "12.1").output), schema())


def test_the_command_fails_with_the_offenders_after_writing_the_report(tmp_path: Path) -> None:
    rule = tmp_path / "policy.toml"
    rule.write_text(
        'schema = 1\nname = "strict"\n[[rule]]\nmatch = ["*"]\nunits = ["native"]\n'
        "native_at_least = 9\n"
    )
    output = tmp_path / "report.txt"
    done = call(KERNELS, "--policy", rule, "--output", output)
    assert isinstance(done.exception, FindingsError)
    assert str(KERNELS) in done.exception.message
    assert "the policy asks for 9" in " ".join(output.read_text().split())


def ledger_of(origin: str, sha256: str) -> str:
    entry = ledger.LibraryEntry(
        path="vllm/_C.abi3.so",
        sha256=sha256,
        size=1,
        official_size=1,
        origin=origin,
        reason="",
        cubins={},
        ptx={},
        sm120="mixed",
        sm121="mixed",
        ops=(),
        lost=(),
    )
    texts = {field.name: "" for field in dataclasses.fields(ledger.Ledger)}
    empty = ("patches", "files", "libraries", "allowed_missing", "overrides", "extras", "sources")
    lists = dict.fromkeys(empty, ())
    made: dict[str, Any] = {**texts, **lists, "dependencies": {}, "schema": 2}
    return declared.to_json(ledger.Ledger(**{**made, "libraries": (entry,)}))


@pytest.mark.parametrize(("origin", "passes"), [("official", True), ("compiled", False)])
def test_the_ledger_says_what_was_compiled_here(tmp_path: Path, origin: str, passes: bool) -> None:
    rule = tmp_path / "policy.toml"
    rule.write_text(
        'schema = 1\nname = "more of ours"\n'
        '[[rule]]\nmatch = ["vllm/_C*"]\ncompiled = true\nunits = ["native"]\n'
        "native_at_least = 9\n"
        '[[rule]]\nmatch = ["vllm/_C*"]\nunits = ["native"]\nrequired = true\n'
    )
    beside = tmp_path / "ledger.json"
    beside.write_text(ledger_of(origin, files.sha256(KERNELS)))
    wheel, folder, bare = tmp_path / "a.whl", tmp_path / "site", tmp_path / "bare"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(KERNELS, "vllm/_C.abi3.so")
        archive.write(beside, f"vllm-1.dist-info/{ledger.NAME}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        archive.extract("vllm/_C.abi3.so", bare)
    for words in ((wheel,), (folder,), (bare, "--ledger", beside)):
        done = call(*words, "--policy", rule)
        assert isinstance(done.exception, FindingsError) is not passes
    alone = call(bare, "--policy", rule)
    assert alone.exit_code == 0
    assert "--ledger FILE" in alone.output
    beside.write_text(ledger_of(origin, "0" * 64))
    other = call(bare, "--policy", rule, "--ledger", beside)
    assert ("belongs to another build" in other.output) is not passes


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    wheel, beside = tmp_path / "a.whl", tmp_path / "ledger.json"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(KERNELS, "vllm/_C.abi3.so")
        archive.writestr(f"vllm-1.dist-info/{ledger.NAME}", "{}")
    beside.write_text("[]")
    for words in ((wheel, "--policy", POLICY), (KERNELS, "--ledger", beside)):
        done = call(*words)
        assert isinstance(done.exception, BadFileError)
        named = beside if "--ledger" in words else wheel
        assert f"{named} holds no ledger" in done.exception.message


@pytest.mark.parametrize("name", ["missing.whl", "./missing"])
def test_a_path_that_is_not_there_is_not_looked_for_as_an_image(name: str) -> None:
    done = call(name)
    assert isinstance(done.exception, BadFileError)
    assert "does not exist" in done.exception.message


def test_a_folder_without_a_library_is_a_bad_file(tmp_path: Path) -> None:
    assert isinstance(call(tmp_path).exception, BadFileError)


def test_an_image_without_an_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoEngineError):
        scan.image("vllm-sm12x:1.0")
    with pytest.raises(NoEngineError, match="no podman"):
        scan.image("podman:vllm-sm12x")


def test_both_devices_are_judged_unless_told(tmp_path: Path) -> None:
    assert [str(device) for device in DEVICES] == ["12.0", "12.1"]
    assert json.loads(call(KERNELS, "--json").output)["devices"] == ["12.0", "12.1"]


def wheel_of(path: Path, metadata: str, folder: str = "vllm-0.33.0.dist-info") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/METADATA", metadata)
        archive.write(KERNELS, "vllm/_C.abi3.so")
    return path


@pytest.mark.parametrize(
    ("name", "metadata", "version"),
    [
        ("vllm-9.9.9-cp38-abi3-linux_x86_64.whl", "Name: vllm\nVersion: 0.33.0\n", "0.33.0"),
        ("renamed.zip", "Name: vLLM\nVersion: 0.33.0+sm12x.0123.full\n", "0.33.0"),
        ("vllm-0.33.0-1-cp38-abi3-linux_x86_64.whl", "Name: torch\nVersion: 0.33.0\n", None),
        ("vllm-0.33.0-1-cp38-abi3-linux_x86_64.whl", "Name: vllm\nVersion: 9.9.9\n", None),
        ("vllm-0.33.0-1-cp38-abi3-linux_x86_64.whl", "Name: vllm\nVersion: ../0.33.0\n", None),
        ("vllm-0.33.0-1-cp38-abi3-linux_x86_64.whl", "", None),
    ],
)
def test_a_wheel_is_judged_by_the_base_of_its_metadata(
    tmp_path: Path, name: str, metadata: str, version: str | None
) -> None:
    wheel = wheel_of(tmp_path / name, metadata)
    wanted = layout.patches() / version if version else layout.data() / "policies"
    assert verb._policy_file(str(wheel), None, None).parent == wanted
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert verb._policy_file(str(folder), None, None).parent == wanted


def test_metadata_of_what_a_wheel_carries_along_is_not_its_own(tmp_path: Path) -> None:
    below = "other/vendored/vllm-0.33.0.dist-info"
    wheel = wheel_of(tmp_path / "other.whl", "Name: vllm\nVersion: 0.33.0\n", below)
    assert verb._policy_file(str(wheel), None, None).name == "default.toml"


@pytest.mark.parametrize("key", ["native_at_least", "ptx_at_most"])
def test_a_bound_is_not_negative(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadFileError, match=key):
        rules(tmp_path, f'[[rule]]\nmatch = ["*"]\nunits = ["native"]\n{key} = -1')


def test_a_report_goes_into_no_folder_that_is_not_there(tmp_path: Path) -> None:
    done = call(KERNELS, "--output", tmp_path / "new" / "report.txt")
    assert isinstance(done.exception, BadFileError)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_no_memory_is_exit_7(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(library_module, "audit", fails)
    assert isinstance(call(KERNELS).exception, NoSpaceError)


def test_a_thread_that_cannot_be_started_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert isinstance(call(KERNELS).exception, NoSpaceError)


def test_who_did_not_build_it_is_not_told_to_mend_the_build(tmp_path: Path) -> None:
    rule = tmp_path / "policy.toml"
    rule.write_text(
        'schema = 1\nname = "strict"\n[[rule]]\nmatch = ["*"]\nunits = ["native"]\n'
        "native_at_least = 9\n"
    )
    done = call(KERNELS, "--policy", rule)
    assert isinstance(done.exception, FindingsError)
    assert "correct" not in str(done.exception)
    assert "broken" not in done.output
    beside = tmp_path / "ledger.json"
    beside.write_text(ledger_of("compiled", files.sha256(KERNELS)))
    assert "correct" in str(call(KERNELS, "--policy", rule, "--ledger", beside).exception)


def test_the_report_says_that_a_unit_may_never_be_called() -> None:
    for found, said in ((AUDIT, True), (Audit(subject="x", kind="file", libraries=()), False)):
        text = render.text(found, policy.judge(found, DEFAULT))
        assert ("may never call it on 12.x" in " ".join(text.split())) is said


def test_ptx_is_named_by_target_and_what_never_runs_is_marked() -> None:
    made = library("a.so", unit("ptx 8.0", "ptx 9.0a"), unit("ptx 8.0"))
    text = render.text(Audit(subject="x", kind="file", libraries=(made,)))
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.endswith("never"))
    runs, never = (slice(lines[at].index(word), None) for word in ("8.0", "never"))
    assert [line[never].strip() for line in lines[at - 2 : at]] == ["PTX", "9.0a"]
    assert [line[runs].split() for line in lines[at : at + 3 : 2]] == [["8.0", "never"], ["2", "1"]]


def test_many_targets_of_ptx_keep_the_newest_apart() -> None:
    names = ("5.0", "6.0", "7.0", "7.5", "8.0", "8.9", "9.0a", "12.0")
    made = library("a.so", *(unit(f"ptx {name}") for name in names))
    text = render.text(Audit(subject="x", kind="file", libraries=(made,)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "older" in text
    assert "5.0" not in text


def test_thousands_of_cubins_are_a_row_and_a_finding_a_folder() -> None:
    made = [library(f"cubins/{number}.cubin", NONE) for number in range(3000)]
    found = Audit(subject="x", kind="wheel", libraries=tuple(made))
    judgement = policy.judge(found, DEFAULT)
    assert len(judgement.offenders) == 6000
    text = render.text(found, judgement)
    assert len(text.splitlines()) < 60
    assert "3000 files" in text
    jsonschema.validate(written(found, judgement), schema())


def embedding(*units: FatContainer) -> Audit:
    made = dataclasses.replace(library("a.so"), embedded=units)
    return Audit(subject="x", kind="wheel", libraries=(made,))


@pytest.mark.parametrize(
    ("units", "passes"),
    [
        ((NATIVE, NONE, NONE), True),
        ((PTX, NONE), True),
        ((NONE, NONE), False),
    ],
)
def test_pieces_that_a_library_picks_among_are_judged_together(
    units: tuple[FatContainer, ...], passes: bool
) -> None:
    found = embedding(*units)
    judgement = policy.judge(found, DEFAULT, (SM120,))
    assert judgement.passed is passes
    assert [entry.reason for entry in judgement.accepted] == [policy.EMBEDDED] * passes
    assert found["a.so"].units_on(SM120)["none"] == units.count(NONE)
    jsonschema.validate(written(found, judgement), schema())


def test_a_library_that_cannot_be_loaded_meets_no_policy(tmp_path: Path) -> None:
    made = dataclasses.replace(library("a.so", NATIVE), unloadable="it cannot be loaded")
    found = Audit(subject="x", kind="wheel", libraries=(made,))
    all_ = rules(
        tmp_path,
        '[[rule]]\nmatch = ["*"]\nunits = ["native", "ptx", "lto", "none"]\nreason = "all"',
    )
    judgement = policy.judge(found, all_)
    assert [offender.message for offender in judgement.offenders] == ["it cannot be loaded"]
    assert made.sm120 == "none"
    document = written(found, judgement)
    jsonschema.validate(document, schema())
    assert document["libraries"][0]["unloadable"]
    assert "Cannot be loaded" in render.text(found, judgement)
