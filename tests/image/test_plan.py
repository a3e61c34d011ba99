"""The image's verb `plan` on published configurations: vLLM's own planner, offline, without a GPU.

tests/image/configs has config.json and hf_quant_config.json of models as their makers published
them (out of ai-dynamo/aiconfigurator). The figures are those of 0.33.0's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import declared
from sm12x.core.process import Completed
from sm12x.core.text import GIB
from sm12x.plan.figures import Answer
from sm12x.recipes import load, planned

Run = Callable[..., Completed]

CONFIGS = Path(__file__).with_name("configs")
# On each of four GPUs: GiB of weights, bytes of KV cache for one token where windows are full.
FIGURES = {
    "DeepSeek-V3.2": (158.475, 48068),
    "DeepSeek-V4-Flash": (37.736, 3915),
    "DeepSeek-V4-Pro": (200.807, 5609),
    "GLM-5.2-NVFP4": (105.907, 53940),
    "Gemma-4-31B-IT-NVFP4": (8.830, 10240),
    "Kimi-K3": (371.536, 27648),
    "Llama-4-Scout-17B-16E-Instruct": (52.904, 12288),
    "Meta-Llama-3.1-8B": (3.771, 32768),
    "MiMo-V2-Flash": (72.437, 5760),
    "MiniMax-M2.5": (53.740, 63488),
    "Mixtral-8x7B-v0.1": (21.757, 32768),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (4.529, 1536),
    "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (56.941, 4096),
    "Nemotron-H-56B-Base-8K": (26.229, 10240),
    "Qwen3-30B-A3B-FP8": (7.291, 24576),
    "Qwen3-32B-FP8-Static-PerTensor": (15.267, 65536),
    "Qwen3-VL-8B-Instruct": (4.152, 36864),
    "Qwen3.6-27B-NVFP4": (4.945, 8192),
    "gpt-oss-120b": (17.217, 9216),
    "gpt-oss-20b": (3.568, 6144),
}
# Their quantization is not seen in these folders: they count as bf16, and the answer says so.
UNSEEN = {"NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "Qwen3-32B-FP8-Static-PerTensor"}
HYBRID = {"Kimi-K3", "Nemotron-H-56B-Base-8K", "Qwen3.6-27B-NVFP4"} | {
    name for name in FIGURES if "Nemotron-3" in name
}
# Their weights after conversion are known without a GPU: bf16, block FP8, MXFP4.
CONVERTED = {"DeepSeek-V4-Flash", "Meta-Llama-3.1-8B", "Qwen3-30B-A3B-FP8", "gpt-oss-120b"}


def plan(run: Run, folder: Path, *words: str) -> tuple[Completed, dict[str, list[Answer]]]:
    """Plan the models of a folder, and return the answers for each."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    places = [word for name in names for word in ("--checkpoint", f"/models/{name}")]
    done = run("plan", *places, "--json", *words, options=("--volume", f"{folder}:/models:ro"))
    answers: dict[str, list[Answer]] = {}
    for part in json.loads(done.stdout or "[]"):
        answer, faults = declared.check(Answer, part)
        assert answer is not None, faults
        answers.setdefault(answer.model, []).append(answer)
    return done, answers


def model(folder: Path, name: str = "model", **config: object) -> Path:
    """Write a small Llama's configuration, changed by ``config``."""
    plain = json.loads((CONFIGS / "Meta-Llama-3.1-8B" / "config.json").read_text())
    # pytest's folder is its user's alone, and the image's user is another one.
    folder.chmod(0o755)
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({**plain, **config}))
    return folder


@pytest.fixture(scope="session")
def answers(docker_run: Run) -> dict[str, list[Answer]]:
    done, answers = plan(docker_run, CONFIGS, "--tp", "4", "--kv-gib", "40")
    assert done.returncode == 16, done.stderr
    return answers


@pytest.mark.parametrize("name", FIGURES)
def test_a_published_model_has_its_figures(answers: dict[str, list[Answer]], name: str) -> None:
    (answer,) = answers[name]
    weights, token = FIGURES[name]
    assert answer.figures is not None, answer.failure
    (stage,) = answer.figures.stages
    assert abs(stage.weights / GIB - weights) < 0.001
    assert answer.figures.cache is not None
    assert round(answer.figures.cache.token) == token
    assert answer.figures.cache.states == (name in HYBRID)
    assert bool(answer.doubts) == (name in UNSEEN)
    if name in CONVERTED:
        assert stage.loaded is not None, stage.unconverted
        assert stage.weights <= stage.loaded < 1.014 * stage.held


def test_vllms_own_refusal_is_in_the_answer(answers: dict[str, list[Answer]]) -> None:
    (answer,) = answers["Llama-4-Scout-17B-16E-Instruct"]
    assert answer.figures is not None
    room = answer.figures.rooms[0]
    assert "120.84 GiB" in room.refusal
    assert 0 < room.length < answer.figures.max_model_len


def test_a_sweep_and_pipeline_stages_are_one_call(docker_run: Run, tmp_path: Path) -> None:
    words = ("--tp", "1,2", "--kv-gib", "40", "--", "--max-model-len", "32768")
    done, answers = plan(docker_run, model(tmp_path), *words, "--pipeline-parallel-size", "2")
    assert done.returncode == 0, done.stderr
    whole, half = (answer.figures for answer in answers["model"])
    assert whole is not None
    assert half is not None
    assert [len(whole.stages), len(half.stages)] == [2, 2]
    # The 14.99 GiB of one GPU, and the table of positions once more.
    assert abs(sum(stage.weights for stage in whole.stages) / GIB - 15.02) < 0.01
    assert abs(half.stages[0].weights / whole.stages[0].weights - 0.5) < 0.01
    # A block of 16 tokens has 64 KiB in each of a stage's 16 layers.
    assert [whole.rooms[0].blocks, half.rooms[0].blocks] == [40960, 81920]


def test_a_stage_without_a_kind_of_cache_is_refused(docker_run: Run) -> None:
    # The last layer reads its window alone; the first stage has compressed caches too.
    volume = ("--volume", f"{CONFIGS}:/models:ro")
    words = ("plan", "--checkpoint", "/models/DeepSeek-V4-Flash", "--tp", "4", "--kv-gib", "20")
    stages = ("--json", "--", "--pipeline-parallel-size", "2", "--max-model-len", "8192")
    for partition, refused in (("42,1", True), ("22,21", False)):
        options = (*volume, "--env", f"VLLM_PP_LAYER_PARTITION={partition}")
        done = docker_run(*words, *stages, options=options)
        answer, faults = declared.check(Answer, json.loads(done.stdout)[0])
        assert answer is not None, faults
        assert answer.figures is not None, answer.failure
        assert ["#54711" in room.refusal for room in answer.figures.rooms] == [refused] * 2


def test_a_recipe_has_the_figures_that_are_kept_of_it(docker_run: Run) -> None:
    recipe = load.load(layout.recipes() / "gpt-oss-120b-rtx-pro-6000.yaml")
    kept = planned.read(recipe)
    assert kept is not None
    mount = f"{CONFIGS / 'gpt-oss-120b'}:/model:ro"
    done = docker_run("plan", recipe.key, "--json", options=("--volume", mount))
    assert done.returncode == 0, done.stderr
    answer, faults = declared.check(Answer, json.loads(done.stdout)[0])
    assert answer is not None, faults
    figures = answer.figures
    assert figures is not None, answer.failure
    assert figures.cache is not None
    assert answer.arguments == kept.arguments
    assert (figures.max_model_len, figures.largest.held) == (kept.max_model_len, kept.weights)
    assert figures.cache.at_start == kept.kv


def test_what_vllm_cannot_build_has_its_own_reason(docker_run: Run, tmp_path: Path) -> None:
    model(tmp_path, "heads")
    model(tmp_path, "unknown", model_type="nobodys_model", architectures=["NobodysModel"])
    done, answers = plan(docker_run, tmp_path, "--tp", "5")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    for name, reason in (("heads", "divisible"), ("unknown", "NobodysModel")):
        (answer,) = answers[name]
        assert answer.figures is None
        assert reason in answer.failure


def test_nothing_of_a_checkpoint_runs(docker_run: Run, tmp_path: Path) -> None:
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    model(tmp_path, auto_map=classes, model_type="own_model")
    for name in ("configuration_own", "modeling_own"):
        code = f"print('{name} runs')\nraise SystemExit(77)\n"
        (tmp_path / "model" / f"{name}.py").write_text(code)
    done, answers = plan(docker_run, tmp_path, "--", "--trust-remote-code")
    assert "own runs" not in done.stdout + done.stderr
    assert answers["model"][0].figures is not None


# A twelfth of the limit that an answer has: the loop in the release is the same.
SOONER = """
import os, sys
from sm12x.runtime import entry, plan, planner
from sm12x.runtime.places import Places
env = plan.process_environment(Places.of_image())
if os.environ.get("LD_LIBRARY_PATH") != env["LD_LIBRARY_PATH"]:
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **env})
planner.ask.__kwdefaults__["seconds"] = 10
entry.main()
"""


def test_a_model_of_a_million_layers_ends_in_time(docker_run: Run, tmp_path: Path) -> None:
    def run(*words: str, options: tuple[str, ...] = ()) -> Completed:
        return docker_run("python", "-P", "-c", SOONER, *words, options=options)

    done, answers = plan(run, model(tmp_path, num_hidden_layers=10**6))
    assert done.returncode == 1, done.stderr
    assert answers["model"][0].failure == "no answer within 10 s"
