"""A server's log beside the plan: what is read of it, and when a term agrees."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.planning import flash, hardware
from tests.unit.test_plan_figures import ROOM, answer

from sm12x.commands.plan import command
from sm12x.core.errors import BadFileError, FindingsError, UsageError
from sm12x.core.text import GIB
from sm12x.plan import against
from sm12x.plan.figures import Against, Compared

# Lines as 0.33.0 prints them, of two workers.
LOG = """\
INFO 11-29 21:00:00 [startup.py:96] non-default args: {'model': 'org/Model'}
(EngineCore pid=9) INFO 11-29 21:00:01 [core.py:144] Initializing a V1 LLM engine \
(v0.33.0+sm12x.0123abcd) with config: model='org/Model'
(Worker_TP0 pid=10) INFO [model_runner.py:429] Model loading took 11.2 GiB memory and 5.2 seconds
(Worker_TP1 pid=11) INFO [model_runner.py:429] Model loading took \x1b[32m11.21 GiB memory and 5 s
(Worker_TP0 pid=10) INFO [gpu_worker.py:869] Available KV cache memory: 40.0 GiB
(EngineCore pid=9) INFO [kv_cache_utils.py:1149] GPU KV cache size: 327,680 tokens, Maximum \
concurrency for 32,768 tokens per request: 10.00x
(Worker_TP0 pid=10) INFO [model_runner.py:1164] Graph capturing finished in 5 secs, took 0.51 GiB
(Worker_TP0 pid=10) INFO Free memory on device (94.5/94.97 GiB) on startup. Desired GPU memory \
utilization is (0.9, 85.47 GiB). Actual usage is 12.3 GiB for consumed memory (weights + \
non-torch), 1.25 GiB for peak activation, and 0.51 GiB for CUDAGraph memory. Current kv cache \
memory in use is 39.9 GiB.
"""
REFUSED = """\
Model loading took 11.2 GiB memory and 5.2 seconds
ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache \
is needed, which is larger than the available KV cache memory (2.0 GiB).
"""


def log(folder: Path, text: str = LOG) -> Path:
    path = folder / "server.log"
    path.write_text(text, encoding="utf-8")
    return path


def rows(given: Against) -> dict[str, Compared]:
    return {row.term: row for row in given.rows}


def beside(path: Path) -> dict[str, Compared]:
    """The log beside an answer whose KV cache has 327,680 tokens in the log's size of it."""
    logged = against.read(path)
    rooms = [dataclasses.replace(ROOM, budget=size) for size in logged.budgets] + [
        dataclasses.replace(ROOM, budget=50 * GIB, basis="at most", tokens=400000)
    ]
    return rows(against.compare(against.of_answer(answer(rooms=tuple(rooms)), logged), logged))


def test_the_figures_of_a_log_are_those_of_every_worker(tmp_path: Path) -> None:
    logged = against.read(log(tmp_path))
    assert logged.release == "0.33.0+sm12x.0123abcd"
    assert logged.weights == (11.2, 11.21)
    assert logged.available == (40.0, 39.9)
    assert (logged.tokens, logged.length, logged.requests) == ((327680,), (32768,), (10.0,))
    assert (logged.share, logged.memory) == ((0.9,), (94.97,))
    assert (logged.consumed, logged.activations, logged.graphs) == ((12.3,), (1.25,), (0.51,))


def test_the_last_start_of_a_server_counts(tmp_path: Path) -> None:
    earlier = LOG.replace("11.2", "22.2")
    assert against.read(log(tmp_path, earlier + LOG)).weights == (11.2, 11.21)


def test_the_sizes_that_are_rounded_to_the_logs_are_the_budgets(tmp_path: Path) -> None:
    low, high = against.read(log(tmp_path)).budgets
    assert low / GIB == pytest.approx(39.895)
    assert high / GIB == pytest.approx(39.905)


@pytest.mark.parametrize("text", ["", "INFO: Uvicorn running", "Model loading took a while"])
def test_a_log_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadFileError, match=r"server\.log"):
        against.read(log(tmp_path, text))


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="nosuch"):
        against.read(tmp_path / "nosuch")


def test_a_log_that_agrees(tmp_path: Path) -> None:
    found = beside(log(tmp_path))
    verdicts = {term: row.verdict for term, row in found.items()}
    assert verdicts.pop("CUDA graphs") == "log only"
    assert verdicts.pop("peak of activations") == "log only"
    assert verdicts.pop("weights and memory outside PyTorch") == "log only"
    assert {*verdicts.values()} == {"agrees"}
    assert verdicts.keys() == {
        "--max-model-len",
        "weights",
        "KV cache, at most",
        "tokens in the KV cache",
        "requests at once",
    }
    # Of the server's own card, not of the planned one: 0.9 x 94.97, less the weights' 11.
    assert found["KV cache, at most"].high == pytest.approx(0.9 * 94.97 - 11)
    against.check(Against(release="", rows=tuple(found.values())))


@pytest.mark.parametrize(
    ("change", "term"),
    [
        (("took 11.2 GiB", "took 12.2 GiB"), "weights"),
        (("327,680", "327,664"), "tokens in the KV cache"),
        (("32,768", "16,384"), "--max-model-len"),
        (("10.00x", "10.02x"), "requests at once"),
    ],
)
def test_a_log_that_differs(tmp_path: Path, change: tuple[str, str], term: str) -> None:
    found = beside(log(tmp_path, LOG.replace(*change)))
    assert [name for name, row in found.items() if row.verdict == "differs"] == [term]
    with pytest.raises(FindingsError, match=term):
        against.check(Against(release="", rows=tuple(found.values())))


def test_more_kv_cache_than_the_weights_leave_differs(tmp_path: Path) -> None:
    small = LOG.replace("40.0 GiB", "140.0 GiB").replace("39.9 GiB", "139.9 GiB")
    assert beside(log(tmp_path, small))["KV cache, at most"].verdict == "differs"


def test_a_refusal_in_the_log_is_compared_with_what_is_needed(tmp_path: Path) -> None:
    assert beside(log(tmp_path, REFUSED))["KV cache needed at start"].verdict == "agrees"
    other = REFUSED.replace("(4.0 GiB", "(4.1 GiB")
    assert beside(log(tmp_path, other))["KV cache needed at start"].verdict == "differs"


def test_a_size_that_the_arguments_give_is_exact(tmp_path: Path) -> None:
    text = "reserved 40.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config\n"
    logged = against.read(log(tmp_path, f"{text}GPU KV cache size: 327,680 tokens, Maximum"))
    expected = against.of_answer(answer(rooms=(ROOM,)), logged)
    assert expected.cache == (40.0, 40.0)
    assert {row.verdict for row in against.compare(expected, logged).rows} == {"agrees"}


def test_the_terms_of_a_server_are_compared_where_vllm_is_not_asked(tmp_path: Path) -> None:
    logged = against.read(log(tmp_path))
    expected = against.of_server(flash(), hardware("rtx-pro-6000"))
    found = rows(against.compare(expected, logged))
    assert found["weights"].verdict == "differs"
    assert found["KV cache, at most"].logged == (40.0, 39.9)
    assert "tokens in the KV cache" not in found


def test_the_text_has_both_sides(tmp_path: Path) -> None:
    given = Against(release="0.33.0", rows=tuple(beside(log(tmp_path)).values()))
    lines = against.text(given).splitlines()
    assert "0.33.0" in lines[0]
    assert any("327,680" in line and "agrees" in line for line in lines)


def test_the_command_compares_a_recipe_with_its_log(tmp_path: Path) -> None:
    words = ("deepseek-v4-flash-rtx-pro-6000-tp4", "--against", str(log(tmp_path)))
    result = CliRunner().invoke(command, words)
    assert isinstance(result.exception, FindingsError)
    assert "--max-model-len" in result.exception.message
    report = json.loads(CliRunner().invoke(command, (*words, "--json")).output)
    assert report["against"]["rows"][0]["term"] == "--max-model-len"


def test_a_log_is_of_one_server(tmp_path: Path) -> None:
    words = ("rotation-pair-rtx-pro-6000-tp4", "--against", str(log(tmp_path)))
    assert isinstance(CliRunner().invoke(command, words).exception, UsageError)
