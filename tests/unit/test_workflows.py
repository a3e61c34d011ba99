"""What a pull request of a fork can reach in the workflows: nothing that outlives its run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sm12x import layout

FOLDER = layout.root() / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.y*ml"))
# They run with the repository's rights on what a stranger has written.
DANGEROUS = {"pull_request_target", "workflow_run", "issue_comment", "issues", "discussion"}
# Who may start a job that has more than the right to read.
BY_MAINTAINERS = {"workflow_dispatch", "schedule"}
# Machines of GitHub's, each used once.
HOSTED = re.compile(r"ubuntu-\d+\.\d+")
NOT_FORKS = "github.event_name != 'pull_request'"


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    # PyYAML reads the key `on` as YAML 1.1 does.
    return {"on" if key is True else str(key): value for key, value in found.items()}


def faults(workflow: dict[str, Any]) -> list[str]:
    """What a pull request of a fork could reach."""
    events = workflow["on"]
    events = {events} if isinstance(events, str) else set(events)
    found = [f"on: {event}" for event in sorted(events & DANGEROUS)]
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions")
    for name, job in workflow["jobs"].items():
        if "permissions" in job and events - BY_MAINTAINERS:
            found.append(f"{name}: permissions")
        if "pull_request" not in events or job.get("if") == NOT_FORKS:
            continue
        text = yaml.safe_dump(job)
        found += [f"{name}: {word}" for word in ("container", "services") if word in job]
        found += [
            f"{name}: {word}" for word in ("secrets.", "vars.", "sudo", "docker") if word in text
        ]
        if not HOSTED.fullmatch(str(job.get("runs-on"))):
            found.append(f"{name}: runs-on")
    return found


def test_there_are_workflows() -> None:
    assert WORKFLOWS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_pull_request_of_a_fork_reaches_nothing_that_outlives_it(path: Path) -> None:
    assert not faults(read(path))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_of_one_commit_and_keep_no_credentials(path: Path) -> None:
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
            if str(step.get("uses")).startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_what_may_write_is_started_by_maintainers_or_the_clock() -> None:
    workflow = read(FOLDER / "release.yml")
    assert not faults(workflow)
    workflow["on"] = {"workflow_dispatch": None, "push": {"branches": ["main"]}}
    assert faults(workflow) == ["build: permissions", "publish: permissions"]


def test_a_workflow_has_the_logic_of_a_script_that_runs_here() -> None:
    """What a workflow alone has cannot be tried before it is pushed."""
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            for step in job["steps"]:
                lines = str(step.get("run", "")).strip().splitlines()
                assert len(lines) <= 4, path.name
                assert not any(re.match(r"\s*(if|for|while|case) ", line) for line in lines)


def test_the_job_that_ran_for_forks_was_one() -> None:
    """As it was until 2026-11-28: privileged, with volumes, on the machine in CI_RUNNER."""
    workflow = read(FOLDER / "ci.yml")
    del workflow["jobs"]["ci"]["if"]
    assert faults(workflow) == ["ci: container", "ci: vars.", "ci: docker", "ci: runs-on"]
    workflow["on"] = ["pull_request_target"]
    assert "on: pull_request_target" in faults(workflow)
