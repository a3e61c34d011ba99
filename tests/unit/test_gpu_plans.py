"""The GPU run that puts plans beside logs: what it serves, and what it makes of the answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.gpu import plans
from tests.unit.test_plan_against import LOG
from tests.unit.test_plan_figures import ROOM, answer

from sm12x.core.text import GIB
from sm12x.plan import against


@pytest.fixture
def logged(tmp_path: Path) -> against.Logged:
    (tmp_path / "server.log").write_text(LOG)
    return against.read(tmp_path / "server.log")


@pytest.mark.parametrize("name", plans.MODELS)
def test_every_model_is_a_configuration(tmp_path: Path, name: str) -> None:
    plans.MODELS[name].write(tmp_path / name)
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config["model_type"]
    assert config["num_hidden_layers"] <= 8


def test_kinds_and_sizes_are_those_that_the_plan_is_believed_for() -> None:
    assert len(plans.MODELS) >= 8
    assert {tp for model in plans.MODELS.values() for tp in model.tp} == {1, 2}


def test_server_and_plan_have_the_same_arguments(tmp_path: Path) -> None:
    served = plans.Served(name="mtp", folder=tmp_path, tp=2, flags=plans.MODELS["mtp"].flags)
    assert "--speculative-config" in served.arguments
    assert served.key == "mtp-tp2"


def test_a_plan_of_what_the_server_logged_is_right(logged: against.Logged) -> None:
    rooms = tuple(dataclasses.replace(ROOM, budget=size) for size in logged.budgets)
    left = dataclasses.replace(ROOM, budget=50 * GIB, basis="at most")
    compared, problem = plans.beside(answer(rooms=(*rooms, left)), logged)
    assert compared is not None
    assert problem == ""


def test_what_differs_and_what_is_not_planned_is_wrong(logged: against.Logged) -> None:
    rooms = tuple(dataclasses.replace(ROOM, budget=size, tokens=1) for size in logged.budgets)
    assert "tokens" in plans.beside(answer(rooms=rooms), logged)[1]
    refused = dataclasses.replace(answer(), figures=None, failure="no such model")
    assert "no such model" in plans.beside(refused, logged)[1]
