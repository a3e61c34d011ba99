"""The data of `doctor`, and how findings are put into words and JSON."""

from __future__ import annotations

import ast
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import GIB, Machine, rtx_pro

from sm12x import layout
from sm12x.audit import report as audits
from sm12x.audit.model import Audit
from sm12x.audit.policy import Judgement, Offender
from sm12x.core import declared, files
from sm12x.core.errors import BadFileError
from sm12x.doctor import examine, image, knowledge, report
from sm12x.doctor.host import Unseen
from sm12x.doctor.model import CHECKS, SEVERITIES, Image
from sm12x.recipes import load

# Where a claim comes from: a thread with its number, or a document or measurement by name.
_SOURCE = re.compile(
    r"[\w.-]+/[\w.-]+#\d+( \(.+\))?$|NVIDIA,? |measured by this project|forum thread \"|"
    r"Linux, Documentation/|vLLM, docs/|edurdias/capyctl, |pci\.ids|README|podman|sm12x audit$|"
    r"the recipe's|data/doctor\.toml"
)
DATA = Path(__file__).parent / "data"


def bad_machine(root: Path) -> Machine:
    """A host with something of every severity."""
    return Machine(
        root=root,
        files={"/proc/driver/nvidia/version": fake.OPEN_595},
        answers=fake.docker(),
        library=fake.nvml("595.71.05", [rtx_pro(0, 80 * GIB), rtx_pro(1)]),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_text_keeps_to_the_width(tmp_path: Path, width: int) -> None:
    facts = replace(fake.facts(bad_machine(tmp_path)), image=Unseen("no bundle was built here"))
    findings = examine.run(facts)
    assert {finding.severity for finding in findings} == set(SEVERITIES)

    text = report.text(facts, findings, width=width)

    # Commands are to be copied, so they are never wrapped.
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith("  $ "))
    path = DATA / f"doctor-{width}.txt"
    if os.environ.get("SM12X_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_json_follows_its_schema(tmp_path: Path) -> None:
    schema = json.loads((layout.data() / "schemas" / "doctor-1.json").read_text())
    audit = fake.bundle(tmp_path / "dist")
    for machine in (bad_machine(tmp_path / "a"), Machine(root=tmp_path / "b")):
        facts = fake.facts(machine, audit)
        findings = examine.run(facts)
        document = json.loads(declared.to_json(report.document(facts, findings)))
        jsonschema.validate(document, schema)
        assert sum(document["summary"].values()) == len(findings)


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    facts = replace(fake.facts(Machine(root=tmp_path)), gpus=Unseen("no"), image=Unseen("no"))
    document = report.document(facts, [])
    assert document.gpus is None
    assert document.image is None
    assert document.machine.driver is None
    assert document.machine.unified_memory is None


def test_every_check_has_its_entry_in_the_data() -> None:
    assert CHECKS.keys() == knowledge.load().checks.keys()


def test_every_remedy_in_the_data_is_one_that_a_check_names() -> None:
    folder = Path(examine.__file__).parent
    words = {
        node.value
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    remedies = {name for check in knowledge.load().checks.values() for name in check.fix}
    assert remedies <= words, remedies - words


def test_every_claim_has_a_source() -> None:
    known = knowledge.load()
    claims = {
        **{name: check.sources for name, check in known.checks.items()},
        **{trouble.id: trouble.sources for trouble in known.troubles},
        **{report.id: report.sources for report in known.reports},
        **{model.name: (model.source,) for model in known.models},
        **{f"cuda {need.toolkit}": (need.source,) for need in known.requirements},
    }
    for name, sources in claims.items():
        assert sources, name
        for source in sources:
            assert _SOURCE.match(source), f"{name}: {source!r}; _SOURCE may be extended"


def test_reports_name_exact_versions() -> None:
    for trouble in knowledge.load().troubles:
        assert trouble.drivers or trouble.kernels, trouble.id
        assert all("#" in source for source in trouble.sources)


def test_a_report_needs_driver_and_kernel() -> None:
    (trouble,) = [each for each in knowledge.load().troubles if each.id == "kexec-handover"]
    assert trouble.matches("580.142", "7.0.0-1019-nvidia")
    assert not trouble.matches("580.142", "7.0.0-10190-nvidia")
    assert not trouble.matches("580.142", "6.17.0-1032-nvidia")


def test_explain_tells_reason_source_and_what_was_found(tmp_path: Path) -> None:
    facts = fake.facts(bad_machine(tmp_path))
    known = knowledge.load()
    mine = [each for each in examine.run(facts) if each.id == "gpu.leftover"]
    text = report.explain("gpu.leftover", known.checks["gpu.leftover"], mine, width=80)
    assert text.startswith("gpu.leftover: GPU memory that no process owns\n")
    assert "NVIDIA/open-gpu-kernel-modules#1200" in text
    assert "  $ sudo fuser -v /dev/nvidia*" in text
    assert mine[0].seen in " ".join(text.split())


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "doctor.toml"
    path.write_text("schema = 2\n")
    with pytest.raises(BadFileError, match="schema"):
        knowledge.load(path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 2}', "[1]"])
def test_an_audit_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.json"
    path.write_text(text)
    with pytest.raises(BadFileError, match=re.escape(str(path))):
        image.read(path)


def test_an_image_is_found_by_the_ledger_that_its_labels_name(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    # The same stack twice, as a bundle for GB10 built beside this machine's leaves it.
    bundles = {"0.33.0": "x86_64", "0.33.0-arm64": "aarch64"}
    for name, made_for in bundles.items():
        fake.bundle(dist / name, machine=made_for)
    machine = Machine(root=tmp_path / "root")

    def found(labels: dict[str, str] | None) -> Image | Unseen:
        machine.answers["docker image inspect"] = json.dumps(labels)
        return image.find(machine.host(), None, "it", machine="x86_64", dist=dist)

    for name, made_for in bundles.items():
        labels = {"sm12x.ledger.sha256": files.sha256(dist / name / "ledger.json")}
        of_label = found(labels)
        assert isinstance(of_label, Image)
        assert (of_label.machine, of_label.stack_id) == (made_for, "0123abcd")

    other = {"sm12x.stack": "0123abcd", "sm12x.mode": "full", "sm12x.ledger.sha256": "f" * 64}
    unseen = found(other)
    assert isinstance(unseen, Unseen)
    assert all(word in unseen.why for word in ("0123abcd", "full", "ffffffffffff"))
    for bare in (None, {"sm12x.stack": "0123abcd"}):
        unseen = found(bare)
        assert isinstance(unseen, Unseen)
        assert "sm12x.ledger.sha256" in unseen.why


def test_a_bundle_for_other_machines_is_not_this_ones(tmp_path: Path) -> None:
    host, dist = Machine(root=tmp_path / "root").host(), tmp_path / "dist"
    fake.bundle(dist / "0.33.0-arm64", machine="aarch64")
    alone = image.find(host, None, None, machine="x86_64", dist=dist)
    assert isinstance(alone, Unseen)
    assert "aarch64" in alone.why
    older = fake.bundle(dist / "0.33.0")
    os.utime(older, (1, 1))
    for machine in ("x86_64", "aarch64"):
        found = image.find(host, None, None, machine=machine, dist=dist)
        assert getattr(found, "machine", "") == machine


def test_a_recipe_against_the_host(tmp_path: Path) -> None:
    # GIVEN a recipe for four RTX PRO 6000 that sleeps at level 1
    path = layout.recipes() / "deepseek-v4-flash-rtx-pro-6000-tp4.yaml"
    recipe = load.load(path)

    def severities(count: int, available: float) -> list[str]:
        machine = Machine(
            root=tmp_path / f"{count}-{available}",
            files={"/proc/meminfo": fake.meminfo(MemTotal=900, MemAvailable=available)},
            library=fake.nvml("590.48.01", [rtx_pro(index) for index in range(count)]),
        )
        found = fake.findings(machine, recipe=recipe)["recipe.needs"]
        return [each.severity for each in found]

    # THEN it wants the GPUs, and host memory for its weights
    assert severities(4, 800) == ["ok", "ok"]
    assert severities(2, 800) == ["bad", "ok"]
    assert severities(4, 8) == ["bad", "ok"]


def test_a_recipe_that_sleeps_in_unified_memory(tmp_path: Path) -> None:
    recipe = load.load(layout.recipes() / "deepseek-v4-flash-rtx-pro-6000-tp4.yaml")
    machine = Machine(root=tmp_path, library=fake.nvml("580.142", [fake.gb10()]))
    found = fake.findings(machine, recipe=recipe)["recipe.needs"]
    assert [each.severity for each in found] == ["bad", "warn"]
    assert "vllm-project/vllm#50011" in found[1].sources


def test_a_recipe_of_someone_else(tmp_path: Path) -> None:
    recipe = load.load(layout.recipes() / "deepseek-v4-flash-rtx-pro-6000-tp4.yaml")
    found = fake.findings(Machine(root=tmp_path), recipe=replace(recipe, sm12x=None))
    assert [each.severity for each in found["recipe.needs"]] == ["unknown"]


def test_a_finding_about_no_device_is_about_each(tmp_path: Path) -> None:
    """A library that could not be read is found on both, and the audit is no bad file."""
    path = tmp_path / "audit.json"
    offender = Offender(path="a.so", device="", message="could not be read")
    judgement = Judgement(name="p", passed=False, offenders=(offender,), accepted=())
    audit = Audit(subject="x", kind="wheel", libraries=())
    declared.write_json(path, audits.document(audit, judgement))
    assert sorted(map(str, image.read(path).offenders)) == ["12.0", "12.1"]
