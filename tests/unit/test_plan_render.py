"""What a plan looks like: text, table, JSON, picture, and the command's exit codes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.planning import flash, hardware, spark, term
from tests.unit.test_plan_figures import CACHE, GIVEN, answer

from sm12x import layout, plan
from sm12x.commands.plan import command
from sm12x.core import declared
from sm12x.core.errors import (
    FindingsError,
    Sm12xError,
    ToolMissingError,
    UnknownVerdictError,
    UsageError,
)
from sm12x.core.text import GIB
from sm12x.image import planned
from sm12x.plan import chart, render, server
from sm12x.plan.budget import Amount
from sm12x.plan.figures import Answer
from sm12x.recipes import load, options
from sm12x.recipes.planned import CONVERSION

DATA = Path(__file__).parent / "data"
PRO = dataclasses.replace(hardware("rtx-pro-6000"), gpus=4, ram=256.0)
FLASH = "deepseek-v4-flash-rtx-pro-6000-tp4"


def golden(name: str, text: str) -> None:
    assert text == (DATA / name).read_text(encoding="utf-8")


def run(*words: str) -> Result:
    return CliRunner().invoke(command, list(words))


def test_a_plan_that_does_not_fit() -> None:
    made = plan.make(dataclasses.replace(PRO, ram=128.0), [flash(utilization=0.85)])

    golden("plan-0.85.txt", render.text(made, details=True))


def test_servers_that_take_turns() -> None:
    servers = [
        flash("flash"),
        flash("mimo", outside=None),
        flash("coder", sleep=0, outside=term(3)),
    ]

    golden("plan-rotation.txt", render.text(plan.make(PRO, servers)))


def test_unified_memory() -> None:
    golden("plan-gb10.txt", render.text(plan.make(hardware("gb10"), [spark(sleep=1)])))


def test_every_end_of_a_bar_is_in_the_picture_of_the_text() -> None:
    assert render.bar(Amount(low=5, high=5), 10, 10) == "█████"
    assert render.bar(Amount(low=2, high=5), 10, 10) == "██▒▒▒"
    assert render.bar(Amount(low=0.1, high=0.1), 100, 10) == "▏"
    assert render.bar(Amount(low=0, high=0), 100, 10) == ""


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (plan.make(PRO, [flash()]), "fits: 1.7-4.1 GiB to spare; largest safe utilization 0.71;"),
        (plan.make(PRO, [flash(utilization=0.85)]), "does not fit: 10.1-12.5 GiB over;"),
        (plan.make(PRO, [flash(utilization=0.73)]), "does not fit at the worst end: 0.0-1.1 GiB"),
        (
            plan.make(PRO, [flash(outside=None)]),
            "cannot tell: unknown: outside the budget of flash",
        ),
        (plan.make(PRO, [flash(weights=term(70), outside=term(0))]), "does not fit; largest"),
    ],
)
def test_the_verdict_is_one_line(made: plan.Plan, line: str) -> None:
    assert render.verdict(made).startswith(line)


def test_the_json_carries_verdict_terms_and_sources() -> None:
    found = json.loads(declared.to_json(plan.make(PRO, [flash()])))

    assert (found["schema"], found["verdict"], found["assumed_peer"]) == (1, "fits", True)
    row = next(one for one in found["combinations"] if one["needed"])
    assert [term["name"] for term in row["budget"]["terms"]] == [
        "budget",
        "outside the budget",
        "sleep residue",
    ]
    assert row["budget"]["terms"][1]["basis"] == "reported"
    assert row["budget"]["margin"]["low"] == pytest.approx(1.7)
    assert found["host"]["copies"] == {"low": 136, "high": 136}


def test_without_matplotlib_the_picture_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)

    with pytest.raises(ToolMissingError, match="matplotlib"):
        chart.write(plan.make(PRO, [flash()]), tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())


def test_the_committed_recipe_fits_by_its_own_terms() -> None:
    """66.5 + 1.3-1.9 + 1.7-2.6 = 69.5-71.0 of 95; 1 - 4.5 / 95 = 0.95 is the most."""
    fits, over = run(FLASH), run(FLASH, "--utilization", "0.98")

    assert fits.exit_code == 0
    assert "fits: 24.0-25.5 GiB to spare; largest safe utilization 0.95" in fits.output
    assert "does not fit: 1.1-2.6 GiB over" in over.output
    assert isinstance(over.exception, FindingsError)
    assert "0.98 -> 0.95" in over.exception.next_step


def test_the_reported_22_gib_outside_the_budget_do_not_fit_at_0_85() -> None:
    """Of another build: 80.75 + 22 + 1.7-2.6 of 95; 0.70 would fit."""
    reported = (FLASH, "--outside", "22")
    fits, over = run(*reported), run(*reported, "--utilization", "0.85")

    assert "fits: 3.9-4.8 GiB to spare" in fits.output
    assert "does not fit: " in over.output
    assert isinstance(over.exception, FindingsError)
    assert "0.85 -> 0.74" in over.exception.next_step


def test_every_recipe_has_a_line() -> None:
    found = json.loads(run("--json").output)
    recipes = load.load_all(layout.recipes())

    assert set(found) == {
        key for key, one in recipes.items() if one.sm12x and one.sm12x.hardware != ("any",)
    }
    assert FLASH in run().output


def test_a_pair_is_planned_as_its_two_recipes() -> None:
    result = run("rotation-pair-rtx-pro-6000-tp4", "--outside", "22")

    assert f"A = {FLASH}" in result.output
    assert "servers that can be awake together" in result.output


@dataclasses.dataclass
class Image:
    """Stands for the image: ``answer`` to every question, and the last one's arguments."""

    answer: Answer
    arguments: tuple[str, ...] = ()
    card: str = ""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def ask(
        self, folder: Path, arguments: tuple[str, ...], env: object, card: str, **more: Any
    ) -> tuple[Answer, ...]:
        self.arguments, self.card, self.more = arguments, card, more
        each = itertools.product(*more["sweep"].values())
        figures = self.answer.figures
        if figures and "--max-num-seqs" in arguments:
            sequences = int(arguments[arguments.index("--max-num-seqs") + 1])
            figures = dataclasses.replace(figures, max_num_seqs=sequences)
        given = dataclasses.replace(self.answer, arguments=arguments, figures=figures)
        return tuple(given for _ in each)


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Image:
    stand_in = Image(answer(max_model_len=8192))
    monkeypatch.setattr(planned, "ask", stand_in.ask)
    return stand_in


def hybrid(image: Image, folder: Path, *words: str) -> dict[str, Any]:
    """A model of 52.2 GiB on one RTX PRO 6000: 87.4 GiB, less its weights, for its states."""
    states = dataclasses.replace(CACHE, block=50 << 20, states=True)
    held = dataclasses.replace(GIVEN.stages[0], held=56 * 10**9, loaded=None)
    image.answer = answer(cache=states, stages=(held,), max_num_seqs=1024, tp=1)
    given = ("--hardware", "rtx-pro-6000", "--outside", "3", "--json")
    report: dict[str, Any] = json.loads(run("--checkpoint", str(folder), *given, *words).output)
    return report


def test_vllms_figures_replace_the_recipe_s(image: Image, tmp_path: Path) -> None:
    report = json.loads(run(FLASH, "--checkpoint", str(tmp_path), "--json").output)

    (deployment,) = report["servers"]
    assert deployment["weights"]["amount"]["low"] == 12.0
    # 12 sequences of 8192 tokens at rest: the recipe's own flag.
    rest = 4 + (2 << 20) / GIB + 11 * 131072 * 8192 / GIB
    assert deployment["kv"]["amount"]["low"] == pytest.approx(rest)
    assert {"--max-num-seqs", "12"} <= {*image.arguments}
    assert len(report["warnings"]) == 2


def test_a_checkpoint_can_be_planned_without_a_recipe(image: Image, tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path), "--tp", "2", "--hardware", "rtx-pro-6000")

    unknown, known = run(*words), run(*words, "--outside", "5", "--utilization", "0.9")

    assert "cannot tell" in unknown.output
    assert isinstance(unknown.exception, FindingsError)
    assert known.exit_code == 0
    assert image.more["sweep"] == {"--tp": (2,)}
    assert image.card == "rtx-pro-6000"


def test_what_vllm_refuses_has_its_reason(image: Image, tmp_path: Path) -> None:
    image.answer = dataclasses.replace(image.answer, figures=None, failure="no such model")
    result = run("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000")
    assert isinstance(result.exception, FindingsError)
    assert "no such model" in result.exception.message


def test_figures_in_doubt_are_no_plan(image: Image, tmp_path: Path) -> None:
    image.answer = dataclasses.replace(image.answer, doubts=("twice the checkpoint",))
    result = run("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000")
    assert isinstance(result.exception, UnknownVerdictError)
    assert "twice the checkpoint" in result.exception.message


def test_the_largest_max_num_seqs_of_a_hybrid_model_is_named(image: Image, tmp_path: Path) -> None:
    most = int((0.92 * 95 * GIB - 56e9 * CONVERSION) / (50 << 20))

    report = hybrid(image, tmp_path, "--max-num-seqs", "2")

    (inside,) = report["combinations"][0]["budget"]["inside"]
    assert inside["most_sequences"] == most
    assert report["warnings"] == []
    text = run("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000", "--outside", "3").output
    assert f"{most:,} at most" in text


def test_a_default_max_num_seqs_without_states_is_warned_of(image: Image, tmp_path: Path) -> None:
    (warning,) = hybrid(image, tmp_path)["warnings"]
    assert "takes 1024" in warning
    assert "--max-num-seqs" in warning
    # On a small share of the memory no state at all fits.
    none = hybrid(image, tmp_path, "--utilization", "0.5")
    (inside,) = none["combinations"][0]["budget"]["inside"]
    assert inside["most_sequences"] == 0


def test_a_sweep_is_a_row_for_each_combination(image: Image, tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000", "--outside", "3")
    swept = (*words, "--tp", "1,2", "--max-model-len", "4096,8192")
    assert image.more == {}
    text = run(*swept).output
    assert image.more["sweep"] == {"--tp": (1, 2), "--max-model-len": (4096, 8192)}
    assert text.count("--tp 2 --max-model-len") == 2
    plans = json.loads(run(*swept, "--json").output)
    assert next(iter(plans)) == "--tp 1 --max-model-len 4096"
    assert {one["verdict"] for one in plans.values()} == {"fits"}


def test_a_sweep_has_no_picture_and_no_log(image: Image, tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000", "--tp", "1,2")
    assert isinstance(run(*words, "--png", str(tmp_path / "x.png")).exception, UsageError)


def test_what_vllm_refuses_of_a_sweep_is_an_error_beside_the_rest(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = dataclasses.replace(image.answer, figures=None, failure="64 heads")
    monkeypatch.setattr(planned, "ask", lambda *words, **more: (image.answer, refused))
    words = ("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000", "--outside", "3")
    result = run(*words, "--tp", "1,3")
    assert "--tp 1" in result.output
    assert isinstance(result.exception, FindingsError)
    assert "--tp 3: " in result.exception.message
    assert "64 heads" in result.exception.message


def test_a_draft_goes_to_the_image(image: Image, tmp_path: Path) -> None:
    words = ("--checkpoint", str(tmp_path), "--hardware", "rtx-pro-6000")
    run(*words, "--draft", str(tmp_path))
    assert image.more["draft"] == tmp_path


@pytest.mark.parametrize(("graphs", "states", "limited"), [(1, 1, 1), (0, 1, 0), (1, 0, 0)])
def test_states_limit_sequences_where_cuda_graphs_are_on(
    graphs: bool, states: bool, limited: bool
) -> None:
    figures = dataclasses.replace(GIVEN, cache=dataclasses.replace(CACHE, states=bool(states)))
    given = {} if graphs else {"enforce-eager": ""}
    deployment = server.from_figures(figures, "model", "", given)
    assert deployment.cache is not None
    assert (deployment.cache.block is not None) == limited


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["nosuch"], UsageError, "no recipe 'nosuch'"),
        (["deepseek-v4-flash-rtx-pro-6000-tp5"], UsageError, "perhaps you meant"),
        (["smoke"], UsageError, "no hardware to plan smoke for"),
        ([FLASH, "deepseek-v4-flash-gb10-x2"], UsageError, "different kinds"),
        ([FLASH, "--hardware", "h100"], UsageError, "no hardware 'h100'"),
        ([FLASH, "--utilization", "85"], UsageError, "'85' is not"),
        ([FLASH, "--utilization", "x"], UsageError, "'x' is not"),
        ([FLASH, "--gpus", "2"], FindingsError, "needs 4 GPUs, there are 2"),
        ([FLASH, "--ram", "128"], FindingsError, "cut: host copies: "),
        ([FLASH, "--gpus", "2"], FindingsError, "a machine with as many GPUs"),
    ],
)
def test_mistakes_are_one_line(words: list[str], error: type[Sm12xError], said: str) -> None:
    result = run(*words)

    assert isinstance(result.exception, error)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [[FLASH, "--here", "--hardware", "gb10"], [FLASH, "--tp", "4"], [FLASH, "--kv-dtype", "fp3"]],
)
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_the_last_utilization_of_a_command_counts() -> None:
    words = ("vllm", "serve", "--gpu-memory-utilization", "0.5", "--gpu-memory-utilization=0.6")

    assert server.share(options.parse(words)["gpu-memory-utilization"], "x") == 0.6
    assert server.share(None, "x") == server.DEFAULT_UTILIZATION


def test_a_recipe_whose_sleep_keeps_the_weights_holds_them_while_it_sleeps(tmp_path: Path) -> None:
    # GIVEN a recipe that sleeps at level 1, with and without the setting
    text = (layout.recipes() / f"{FLASH}.yaml").read_text(encoding="utf-8")
    assert text.count("    --enable-sleep-mode \\\n") == 1
    recipe = tmp_path / "mine.yaml"
    option = "    --enable-sleep-mode --sleep-mode-release kv_cache \\\n"
    text = text.replace("    --enable-sleep-mode \\\n", option)
    recipe.write_text(text, encoding="utf-8")
    (tmp_path / "memory").mkdir()
    shutil.copy(layout.recipes() / "memory" / f"{FLASH}.json", tmp_path / "memory" / "mine.json")
    # WHEN both are read
    copies = server.from_recipe(load.load(layout.recipes() / f"{FLASH}.yaml"))
    keeps = server.from_recipe(load.load(recipe))
    # THEN what the one has on the host the other keeps on the GPU
    assert copies.copies_weights
    assert not keeps.copies_weights
    assert copies.residue is not None
    assert copies.weights is not None
    assert keeps.residue is not None
    assert keeps.residue.amount == copies.residue.amount + copies.weights.amount
    assert "--sleep-mode-release" in keeps.residue.source


@pytest.mark.parametrize("word", ["--gpu_memory_utilization", "--gpu-memory_utilization"])
def test_an_option_is_found_however_its_words_are_joined(word: str) -> None:
    assert options.parse(("vllm", word, "0.5")) == {"gpu-memory-utilization": "0.5"}
    assert options.parse(("vllm", f"{word}=0.5")) == {"gpu-memory-utilization": "0.5"}


@pytest.mark.parametrize("option", ["--outside", "--ram"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999"])
def test_a_size_that_is_none_is_wrong_usage(option: str, value: str) -> None:
    assert run(FLASH, option, value).exit_code == 2


@pytest.mark.parametrize(
    "words", [["--png", "x.png"], ["--outside", "3"], ["--alone"], [FLASH, "--outside", "1e308"]]
)
def test_options_that_could_have_no_effect_are_refused(words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_the_overview_s_next_step_plans_the_same() -> None:
    result = run("--ram", "1", "--hardware", "rtx-pro-6000")
    assert isinstance(result.exception, FindingsError)
    (words,) = re.findall("`sm12x plan (.*)`", result.exception.next_step)
    assert isinstance(run(*words.split()).exception, FindingsError)
