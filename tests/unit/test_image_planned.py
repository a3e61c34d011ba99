"""The image's answers on the build machine: how it is asked, and what is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_plan_figures import answer

from sm12x.core import declared, process
from sm12x.core.errors import BadFileError, ToolFailedError
from sm12x.core.process import Completed
from sm12x.image import planned
from sm12x.image.bundle import record
from sm12x.image.engine import engines
from sm12x.plan.figures import Answer

ANSWER = answer()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines that the engine gets; it answers ANSWER."""
    lines: list[list[str]] = []
    engine = SimpleNamespace(
        program="docker",
        image_id=lambda image: "sha256:1",
        has_image=lambda image: True,
        script=lambda image: "",
    )
    bundle = SimpleNamespace(engine="docker 20.10", tags=("vllm-sm12x:1",))
    monkeypatch.setenv("SM12X_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "find", lambda *words, **options: engine)
    monkeypatch.setattr(record, "read", lambda folder: bundle)
    monkeypatch.setattr(process, "run", engine_of(lines))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return lines


def engine_of(
    lines: list[list[str]], *answers: Answer, code: int = 0, stdout: str | None = None
) -> Callable[..., Completed]:
    text = declared.to_json(list(answers or (ANSWER,)), list[Answer])

    def run(argv: list[str], **options: Any) -> Completed:
        lines.append([str(word) for word in argv])
        shown = text if stdout is None else stdout
        return Completed(argv=(), returncode=code, stdout=shown, stderr="error: no such verb\n")

    return run


def ask(folder: Path, *words: str, **more: Any) -> Answer:
    (answer,) = answers(folder, *words, **more)
    return answer


def answers(folder: Path, *words: str, **more: Any) -> tuple[Answer, ...]:
    return planned.ask(folder, words, {"VLLM_X": "1"}, "gb10", say=lambda text: None, **more)


def test_the_image_is_asked_without_network_and_once(
    calls: list[list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    assert ask(folder, "--max-num-seqs", "4") == ANSWER == ask(folder, "--max-num-seqs", "4")
    (line,) = calls
    assert line[:5] == ["docker", "run", "--rm", "--network", "none"]
    assert line[-2:] == ["--max-num-seqs", "4"]
    assert {"VLLM_X=1", f"{folder}:/model:ro", "gb10"} <= {*line}


def test_a_change_of_model_or_arguments_is_asked_anew(
    calls: list[list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    ask(folder)
    ask(folder, "--enforce-eager")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    ask(folder)
    (folder / "model.safetensors").write_bytes(b"12345678")
    ask(folder)
    assert len(calls) == 4


def test_a_sweep_is_one_call_whose_answers_are_kept_one_by_one(
    calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = dataclasses.replace(ANSWER, arguments=("--tensor-parallel-size", "2"))
    monkeypatch.setattr(process, "run", engine_of(calls, ANSWER, second))
    sweep = {"--tp": (1, 2), "--max-model-len": (8192,)}
    assert answers(tmp_path / "model", sweep=sweep) == (ANSWER, second)
    (line,) = calls
    at = line.index("--tp")
    assert line[at : at + 4] == ["--tp", "1,2", "--max-model-len", "8192"]
    assert ask(tmp_path / "model", sweep={**sweep, "--tp": (2,)}) == second
    assert len(calls) == 1


def test_a_draft_and_sizes_of_the_cache_are_asked_about(
    calls: list[list[str]], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    ask(tmp_path / "model", draft=draft, budgets=(1 << 30, 3 << 29))
    (line,) = calls
    assert {f"{draft}:/draft:ro", "1.0,1.5"} <= {*line}
    assert line[line.index("--draft") + 1] == "/draft"
    ask(tmp_path / "model")
    assert len(calls) == 2


def test_a_refusal_is_returned_and_not_kept(
    calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = dataclasses.replace(ANSWER, figures=None, failure="no such model")
    monkeypatch.setattr(process, "run", engine_of(calls, refused, code=1))
    assert ask(tmp_path / "model") == refused == ask(tmp_path / "model")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("code", "stdout"), [(2, ""), (0, ""), (0, json.dumps([{"schema": 2}])), (137, "[")]
)
def test_an_image_that_does_not_answer_is_named(
    calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stdout: str
) -> None:
    monkeypatch.setattr(process, "run", engine_of(calls, code=code, stdout=stdout))
    with pytest.raises(ToolFailedError, match="vllm-sm12x:1"):
        ask(tmp_path / "model")


def test_without_an_image_the_way_is_named(
    calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "read", lambda folder: None)
    with pytest.raises(BadFileError) as caught:
        ask(tmp_path / "model")
    assert "IMAGE plan" in caught.value.next_step
