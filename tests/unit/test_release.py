"""A release: what is not to be published, its SBOM, and the record that evidence needs."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_evidence import STACK, ledger

from sm12x.audit.policy import Judgement
from sm12x.audit.report import AuditReport, LibraryReport, RunsReport
from sm12x.core import declared, files
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.image.bundle import record as records
from sm12x.image.bundle.record import Record
from sm12x.recipes import evidence
from sm12x.stack.model import series
from sm12x.wheel.ledger import NAME, Ledger
from sm12x_dev import release

WHEEL = f"vllm-0.33.0+sm12x.{STACK}.quick-cp38-abi3-manylinux_2_28_x86_64.whl"
DEBIAN = "bash 5.2.37-2 amd64\nlibc6 2.41-12 amd64\n"
DATE = "2026-11-30T10:00:00+00:00"


def known() -> Ledger:
    return replace(ledger(), machine="x86_64", dependencies={"torch": "2.14.0", "numpy": "2.4.6"})


def audit(*, passed: bool = True) -> AuditReport:
    runs = {
        "12.0": RunsReport(verdict="native", units={"native": 3, "ptx": 0, "none": 0, "unknown": 0})
    }
    library = LibraryReport(
        path="_C.abi3.so",
        sha256="c" * 64,
        size=9,
        machine="x86_64",
        cubins={"12.0a": 3},
        ptx={},
        unknown=(),
        runs=runs,
    )
    judged = Judgement(name="p", passed=passed, offenders=(), accepted=())
    return AuditReport(
        subject=WHEEL, kind="wheel", devices=("12.0",), libraries=(library,), policy=judged
    )  # fmt: skip


def record(folder: Path) -> Record:
    return Record(
        version="0.33.0",
        mode="quick",
        machine="x86_64",
        stack_id=STACK,
        arch_list="12.0a;12.1a",
        inputs="",
        engine="docker",
        base_image="debian",
        base_digest="sha256:" + "d" * 64,
        wheel=WHEEL,
        wheel_sha256=files.sha256(folder / WHEEL),
        wheel_size=1,
        ledger_sha256=files.sha256(folder / records.LEDGER),
        image_id="",
        tags=(),
        image_size=0,
        seconds={},
    )


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished bundle, of the checkout's stack."""
    monkeypatch.setattr(series, "read_id", lambda folder: STACK)
    monkeypatch.setattr(
        release, "_git", lambda *words: f"{'e' * 40} {DATE}" if "log" in words else ""
    )
    folder = tmp_path / "dist"
    folder.mkdir()
    declared.write_json(folder / records.LEDGER, known())
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / records.LEDGER, f"vllm-0.33.0.dist-info/{NAME}")
    declared.write_json(folder / records.AUDIT, audit())
    (folder / records.AUDIT_TEXT).write_text("native\n")
    declared.write_json(folder / records.NAME, record(folder))
    return folder


def faults(folder: Path, *, clean: bool = True) -> list[str]:
    return [*release.faults(folder, "0.33.0", None, clean=clean)]


def test_a_finished_bundle_is_published_with_all_that_describes_it(
    bundle: Path, tmp_path: Path
) -> None:
    assert faults(bundle) == []
    out = tmp_path / "out"
    out.mkdir()
    made = release.make(bundle, out, None)
    assert release.read(out) == made
    assert made.tag == f"0.33.0-{STACK}"
    assert {*made.files} == {
        *(WHEEL, "ledger-x86_64.json", "audit-x86_64.json", "audit-x86_64.txt"),
        "sbom-x86_64.cdx.json",
    }
    sums = (out / "SHA256SUMS-x86_64").read_text()
    assert all(f"{sha256}  {name}\n" in sums for name, sha256 in made.files.items())
    page = (out / release.NOTES).read_text()
    assert "2 patches" in page
    assert "| `_C.abi3.so` | native |" in page
    (out / WHEEL).write_bytes(b"other")
    with pytest.raises(FindingsError, match="not the file of the release"):
        release.read(out)


def _spoil_ledger(folder: Path) -> None:
    declared.write_json(folder / records.LEDGER, replace(known(), nvcc="other"))


def _other_ledger_beside(folder: Path) -> None:
    _spoil_ledger(folder)
    declared.write_json(folder / records.NAME, record(folder))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / records.NAME).unlink(), "no whole bundle"),
        (lambda folder: (folder / WHEEL).write_bytes(b"x"), "no whole bundle"),
        (_spoil_ledger, "no whole bundle"),
        (_other_ledger_beside, "not the one beside it"),
        (
            lambda folder: declared.write_json(folder / records.AUDIT, audit(passed=False)),
            "audit was not passed",
        ),
    ],
)
def test_what_is_not_to_be_published(bundle: Path, spoil: Any, reason: str) -> None:
    spoil(bundle)
    assert any(reason in fault for fault in faults(bundle))


def test_another_stack_or_an_edited_checkout_is_not_published(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "_git", lambda *words: " M Makefile")
    assert any("Makefile" in fault for fault in faults(bundle))
    assert faults(bundle, clean=False) == []
    monkeypatch.setattr(series, "read_id", lambda folder: "00000000")
    assert any("this checkout is 00000000" in fault for fault in faults(bundle, clean=False))


def test_the_sbom_is_valid_and_the_same_each_time(bundle: Path) -> None:
    texts = {release.sbom(record(bundle), known(), DEBIAN, DATE) for _ in range(2)}
    (text,) = texts
    document = json.loads(text)
    assert document["bomFormat"] == "CycloneDX"
    purls = {one.get("purl") for one in document["components"]}
    assert {"pkg:pypi/torch@2.14.0", "pkg:deb/debian/libc6@2.41-12?arch=amd64"} <= purls
    wheel = next(one for one in document["components"] if one["name"] == "vllm")
    assert len([one for one in wheel["properties"] if one["name"] == "sm12x:patch"]) == 2
    broken = replace(record(bundle), wheel_sha256="not a hash")
    with pytest.raises(BadFileError, match="SBOM"):
        release.sbom(broken, known(), DEBIAN, DATE)


def test_the_parts_of_a_release_belong_together(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    one = replace(release.make(bundle, out, None), digest="sha256:1")
    other = replace(one, machine="aarch64", digest="sha256:2")
    (words,) = release.publish_words([one, other], "host/owner/name")
    assert words[-2:] == ["host/owner/name@sha256:1", "host/owner/name@sha256:2"]
    assert f"host/owner/name:0.33.0-{STACK}" in words
    for wrong in (replace(other, commit="f" * 40), replace(other, digest="")):
        with pytest.raises(FindingsError):
            release.publish_words([one, wrong], "host/owner/name")
    assert release.push_words(one, "host/owner/name")[-1] == [
        "push",
        f"host/owner/name:0.33.0-{STACK}-x86_64",
    ]


@pytest.mark.parametrize("name", ["", "name", "host/Owner", "host/owner/name:tag", "-x/y"])
def test_a_repository_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(BadFileError):
        release.require_repository(name)


def test_a_record_of_what_was_published_is_what_evidence_reads(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    one = release.make(bundle, out, None)
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    (tmp_path / "patches").mkdir()
    path = tmp_path / "patches" / evidence.RELEASED
    path.write_text(release.published_text([replace(one, stack_id="11111111")]))
    path.write_text(release.published_text([one, replace(one, machine="aarch64")]))
    first, second = evidence.published()
    assert (first.stack_id, second.stack_id) == ("11111111", STACK)
    assert {*second.ledgers} == {"x86_64 quick", "aarch64 quick"}
    path.write_text(release.published_text([one]))
    assert len(evidence.published()) == 2
