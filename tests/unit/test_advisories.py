"""Advisories of pinned packages: found, accepted, stale, and never "none" where nobody answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sm12x import layout
from sm12x.core import process
from sm12x.core.errors import (
    BadFileError,
    FindingsError,
    Sm12xError,
    ToolFailedError,
    ToolMissingError,
    UnknownVerdictError,
)
from sm12x.core.process import Completed
from sm12x.stack.model import base as bases
from sm12x_dev import advisories
from sm12x_dev.advisories import Accepted, AcceptedAdvisories, AdvisoryReport
from sm12x_dev.commands import base as verb

TODAY = date(2026, 11, 28)
LOCKS = {
    "1.0/requirements-x86_64.lock": {"vllm": "1.0", "old": "1", "fine": "3"},
    "dev.lock": {"old": "2", "fine": "3"},
}
NONE = AcceptedAdvisories()
LIST = """
[[accepted]]
id = "CVE-1"
package = "vllm"
versions = ["1.0"]
why = "It takes a client that has the key of the server."
on = "2026-11-28"
review = "2026-12-31"
"""


class Service:
    """pip-audit with these advisories, (name, version) -> ids, that knows all but ``unknown``."""

    def __init__(
        self, bugs: Mapping[tuple[str, str], list[str]] | None = None, unknown: tuple[str, ...] = ()
    ) -> None:
        self.bugs, self.unknown = bugs or {}, unknown
        self.asked: list[dict[str, str]] = []

    def __call__(self, pins: Mapping[str, str]) -> Any:
        self.asked.append(dict(pins))
        found: list[dict[str, Any]] = []
        for name, version in pins.items():
            if name in self.unknown:
                found.append({"name": name, "skip_reason": "Dependency not found on PyPI"})
                continue
            ids = self.bugs.get((name, version), [])
            bugs = [{"id": ids[0], "aliases": ids[1:], "fix_versions": ["9"]}] if ids else []
            found.append({"name": name, "version": version, "vulns": bugs})
        return {"dependencies": found, "fixes": []}


def look_up(service: Any, accepted: AcceptedAdvisories = NONE, **locks: Any) -> AdvisoryReport:
    return advisories.look_up(locks or LOCKS, accepted, service, today=TODAY)


def entry(**fields: Any) -> AcceptedAdvisories:
    given: dict[str, Any] = {
        "id": "CVE-1",
        "package": "old",
        "versions": ("1",),
        "why": "it needs a writer of the cache, whom nobody lets in there",
        "on": "2026-11-01",
        "review": "2027-01-01",
        **fields,
    }
    return AcceptedAdvisories(accepted=(Accepted(**given),))


def test_every_pin_is_asked_for_once_and_the_release_first() -> None:
    service = Service({("old", "1"): ["PYSEC-1", "CVE-1"]})
    report = look_up(service)
    assert service.asked == [{"vllm": "1.0"}, {"fine": "3", "old": "1"}, {"old": "2"}]
    (found,) = report.open
    assert (found.package, found.version, found.ids) == ("old", "1", ("PYSEC-1", "CVE-1"))
    assert found.locks == ("1.0/requirements-x86_64.lock",)
    assert (report.pins, report.unseen, report.stale) == (4, (), ())
    with pytest.raises(FindingsError, match="old PYSEC-1"):
        verb._judge(report)


def test_an_accepted_one_passes_by_any_of_its_names() -> None:
    report = look_up(Service({("old", "1"): ["PYSEC-1", "CVE-1"]}), entry())
    assert not report.open
    assert report.advisories[0].accepted == entry().accepted[0].why
    verb._judge(report)
    # Of this version, and of no other.
    bugs = {("old", "1"): ["CVE-1"], ("old", "2"): ["CVE-1"]}
    assert [one.version for one in look_up(Service(bugs), entry()).open] == ["2"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"review": "2026-11-28"}, "its review was due on 2026-11-28"),
        ({"versions": ("1", "0.9")}, "no lock pins old==0.9 any longer"),
        ({"id": "CVE-2"}, "the service has no such advisory of old==1"),
    ],
)
def test_a_stale_entry_is_a_finding(fields: dict[str, Any], said: str) -> None:
    report = look_up(Service({("old", "1"): ["CVE-1"]}), entry(**fields))
    assert any(said in line for line in report.stale)
    with pytest.raises(FindingsError):
        verb._judge(report)


def test_what_nobody_looked_up_is_no_verdict() -> None:
    """pip-audit itself ends with 0 and "No known vulnerabilities found" there."""
    report = look_up(Service(unknown=("fine",)), entry())
    assert report.unseen == ("fine==3",)
    # Of what was not seen nothing is said, and old==1 was seen.
    assert [line for line in report.stale if "no such advisory" in line]
    report = look_up(Service(unknown=("fine",)))
    with pytest.raises(UnknownVerdictError, match="1 of 4 pins were not looked up"):
        verb._judge(report)


def test_a_service_that_knows_nothing_is_asked_once() -> None:
    service = Service(unknown=("vllm", "old", "fine"))
    report = look_up(service, entry())
    assert len(service.asked) == 1
    assert len(report.unseen) == report.pins == 4
    assert not report.stale
    assert "NOT LOOKED UP: 4 of 4" in advisories.render(report)
    with pytest.raises(UnknownVerdictError):
        verb._judge(report)


@pytest.mark.parametrize(
    "error",
    [ToolFailedError("no name", next_step="x"), ToolMissingError("no tool", next_step="x")],
)
def test_a_tool_that_fails_is_no_verdict(error: Sm12xError) -> None:
    def fails(pins: Mapping[str, str]) -> Any:
        raise error

    report = look_up(fails)
    assert report.why == error.message
    with pytest.raises(UnknownVerdictError, match=error.message):
        verb._judge(report)


@pytest.mark.parametrize("document", [None, [], {}, {"dependencies": [{}]}, {"dependencies": [3]}])
def test_a_report_of_another_form_is_no_verdict(document: Any) -> None:
    assert look_up(lambda pins: document).why


@pytest.mark.parametrize(
    ("code", "output"), [(0, ""), (1, "Traceback"), (2, '{"dependencies": []}')]
)
def test_output_that_is_no_report(monkeypatch: pytest.MonkeyPatch, code: int, output: str) -> None:
    def run(argv: list[str], **_: Any) -> Completed:
        return Completed(argv=tuple(argv), returncode=code, stdout=output, stderr="a\nno name\n")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    report = look_up(advisories.ask_pip_audit)
    assert report.why
    assert len(report.unseen) == report.pins


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('review = "2026-12-31"', 'review = "2026-11-01"', "not after"),
        ('review = "2026-12-31"', 'review = "soon"', "no date"),
        ('review = "2026-12-31"\n', "", "review is missing"),
        ('package = "vllm"', 'pakage = "vllm"', "perhaps you meant package"),
        ('versions = ["1.0"]', "versions = []", "versions"),
        ('why = "', 'why = "so" # "', "why"),
    ],
)
def test_a_fault_of_the_accepted_list(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in LIST
    path = tmp_path / advisories.NAME
    path.write_text(LIST, encoding="utf-8")
    assert len(advisories.load(path).accepted) == 1
    path.write_text(LIST.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadFileError, match=said):
        advisories.load(path)


def test_the_list_that_ships_is_of_pinned_versions() -> None:
    accepted = advisories.load(layout.patches() / advisories.NAME)
    found = advisories.locks([bases.load(version) for version in bases.versions()])
    assert found["0.33.0/requirements-x86_64.lock"]["vllm"] == "0.33.0"
    assert "scripts/requirements-dev.lock" in found
    assert "scripts/sm12x/data/bench/requirements.lock" in found
    pins = {pin for one in found.values() for pin in one.items()}
    for one in accepted.accepted:
        assert {(one.package, version) for version in one.versions} <= pins


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisories, "ask_pip_audit", lambda pins, service: Service()(pins))
    done = CliRunner().invoke(verb.base_command, ["advisories", "--json"])
    accepted = advisories.load(layout.patches() / advisories.NAME).accepted
    report = json.loads(done.stdout)
    assert report["advisories"] == report["unseen"] == []
    # Every accepted entry is stale where the service knows of none.
    assert len(report["stale"]) == len(accepted)
    assert isinstance(done.exception, FindingsError) == bool(accepted)
