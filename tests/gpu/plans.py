"""The plan of small models beside what their servers log: python -m tests.gpu.plans --out REPORT

Each model of MODELS is served with dummy weights and without CUDA graphs, at TP=1 and, where it
says so, at TP=2, until it has logged its KV cache; several share a GPU. Then one process without a
GPU plans all of them for the host's own card with vLLM's own code, each with the KV cache that its
log has, and puts both side by side as `sm12x plan --against` does. Printed and written as JSON:
every term of every server, and `wrong`.

The models are the published configurations of tests/image/configs, or of tests.gpu.serve, with few
layers and experts. Exit code 1 where a term differs, a server does not start or vLLM does not plan
it. Nothing of the image is needed: the packages of tests.gpu.payload on PYTHONPATH are enough.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import serve

from sm12x.core import declared, process
from sm12x.core.errors import Sm12xError
from sm12x.plan import against
from sm12x.plan.figures import DIFFERS, Against, Answer, Question, Source
from sm12x.runtime import plan, planner
from sm12x.runtime.meta import Card

CONFIGS = Path(__file__).resolve().parents[1] / "image" / "configs"
# Servers that share a GPU, and what each takes of it.
SHARING, UTILIZATION = 4, "0.2"
# The last line of a start that is compared.
LAST = "Maximum concurrency for"
LIMIT = 300
PORT = 8200
ENVIRONMENT = {**serve.ENVIRONMENT, "VLLM_DEEP_GEMM_WARMUP": "skip"}
CARD = """
import json, torch
one = torch.cuda.get_device_properties(0)
print(json.dumps({"name": one.name, "major": one.major, "minor": one.minor,
    "memory": one.total_memory, "multiprocessors": one.multi_processor_count}))
"""


def published(name: str, *without: str, **changes: Any) -> Callable[[Path], None]:
    """What writes a published configuration, with other values and without some keys."""

    def write(folder: Path) -> None:
        config = json.loads((CONFIGS / name / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in without}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return write


def sliding(folder: Path) -> None:
    """Three layers in four have a window, as Cohere's Command R7B."""
    layers = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(8)]
    serve.rewrite(
        folder,
        {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": len(layers),
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 4096,
            "layer_types": layers,
            "max_position_embeddings": 32768,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of model: what writes its configuration, its server's flags, and its TP sizes."""

    write: Callable[[Path], None]
    flags: tuple[str, ...] = ()
    tp: tuple[int, ...] = (1,)


FEW: dict[str, Any] = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 32,
    "n_group": 4,
}
INDEX = ("index_topk", "index_n_heads", "index_head_dim")
MLA = published(
    *("DeepSeek-V3.2", *INDEX),
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    **FEW,
)
MTP = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
SHORT = ("--max-model-len", "16384")
MODELS = {
    "dense": Model(
        write=published("Meta-Llama-3.1-8B", num_hidden_layers=8), flags=SHORT, tp=(1, 2)
    ),
    "moe": Model(write=published("Mixtral-8x7B-v0.1", num_hidden_layers=4), tp=(1, 2)),
    "mla": Model(write=MLA, flags=SHORT, tp=(1, 2)),
    "sparse-mla": Model(write=published("DeepSeek-V3.2", **FEW), flags=SHORT),
    "mtp": Model(write=MLA, flags=(*SHORT, *MTP)),
    "hybrid": Model(
        write=lambda folder: serve.hybrid(folder, 8),
        flags=("--max-model-len", "8192", "--max-num-seqs", "64"),
        tp=(1, 2),
    ),
    "sliding": Model(write=sliding),
    "dense-fp8": Model(
        write=lambda folder: serve.dense_fp8(folder, 8), flags=("--max-model-len", "4096")
    ),
    "moe-fp8": Model(write=published("Qwen3-30B-A3B-FP8", num_hidden_layers=8), flags=SHORT),
    "fp8-cache": Model(
        write=published("Meta-Llama-3.1-8B", num_hidden_layers=8),
        flags=(*SHORT, "--kv-cache-dtype", "fp8"),
    ),
    "windows-mxfp4": Model(write=published("gpt-oss-20b", num_hidden_layers=8), flags=SHORT),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """One server: a model at a size of tensor parallelism."""

    name: str
    folder: Path
    tp: int
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name}-tp{self.tp}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the server and the plan have in common."""
        return (
            *("--tensor-parallel-size", f"{self.tp}", "--gpu-memory-utilization", UTILIZATION),
            *("--enforce-eager", "--skip-tokenizer-init", *self.flags),
        )

    def start(self, port: int, gpus: Sequence[int], log: Path) -> process.Background:
        words = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", f"{self.folder}", "--load-format", "dummy", "--port", f"{port}"),
            *self.arguments,
        ]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return process.Background(words, log=log, env={**ENVIRONMENT, **os.environ, **own})


def serve_all(servers: Sequence[Served], gpus: int, logs: Path) -> dict[str, float]:
    """Start every server, as many at a time as the GPUs have room for; return the seconds of each.

    A server that ends early, or takes longer than LIMIT, has the seconds until then: its log says
    why.
    """
    free = dict.fromkeys(range(gpus), SHARING)
    waiting = sorted(servers, key=lambda one: -one.tp)
    running: dict[str, tuple[process.Background, list[int], float]] = {}
    seconds: dict[str, float] = {}
    try:
        while waiting or running:
            for one in [*waiting]:
                chosen = sorted(free, key=lambda gpu: -free[gpu])[: one.tp]
                if all(free[gpu] for gpu in chosen) and len(chosen) == one.tp:
                    waiting.remove(one)
                    for gpu in chosen:
                        free[gpu] -= 1
                    port = PORT + len(seconds) + len(running)
                    server = one.start(port, chosen, logs / f"{one.key}.log")
                    running[one.key] = server, chosen, time.monotonic()
            for key, (server, chosen, began) in [*running.items()]:
                spent = time.monotonic() - began
                done = LAST in server.log.read_text(errors="replace")
                if done or server.poll() is not None or spent > LIMIT:
                    server.stop()
                    del running[key]
                    seconds[key] = round(spent, 1)
                    print(f"{key}: {'served' if done else 'failed'}, {spent:.0f} s", flush=True)
                    for gpu in chosen:
                        free[gpu] += 1
            time.sleep(0.2)
    finally:
        for server, _, _ in running.values():
            server.stop()
    return seconds


def plan_all(file: Path) -> None:
    """Answer the questions of a file, in this process, and print the answers."""
    given = json.loads(file.read_text())
    card = Card(**given["card"])
    planner.prepare(card)
    answers = []
    for part in given["questions"]:
        question, faults = declared.check(Question, part)
        assert question is not None, faults
        answers.append(
            plan.conclude(
                planner.ask(question),
                question,
                Source(tensors=None, quantized=False),
                release=given["release"],
                stack="",
                card=card.name,
            )
        )
    print(declared.to_json(answers, list[Answer]))


def ask(questions: Sequence[Question], release: str, folder: Path) -> list[Answer]:
    """Return the answers of a process without GPUs, for the card of this host."""
    shown = subprocess.run([sys.executable, "-c", CARD], check=True, stdout=subprocess.PIPE)
    card = json.loads(shown.stdout)
    file = folder / "questions.json"
    given = {"card": card, "release": release, "questions": [*map(dataclasses.asdict, questions)]}
    file.write_text(json.dumps(given))
    words = [sys.executable, "-m", "tests.gpu.plans", "--questions", f"{file}"]
    env = {**os.environ, **ENVIRONMENT, **planner.ENV, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, env=env)
    answers, faults = declared.check(list[Answer], json.loads(done.stdout))
    assert answers is not None, faults
    return answers


def beside(answer: Answer, logged: against.Logged) -> tuple[Against | None, str]:
    """Return the comparison, and what is wrong: "" for nothing."""
    if answer.figures is None:
        return None, f"not planned: {answer.failure}"
    compared = against.compare(against.of_answer(answer, logged), logged)
    differing = [row.term for row in compared.rows if row.verdict == DIFFERS]
    return compared, f"differs: {', '.join(differing)}" if differing else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--questions", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--logs", type=Path, help="keep logs there, and serve none that is there")
    options = parser.parse_args()
    if options.questions:
        plan_all(options.questions)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = options.logs or folder
        logs.mkdir(exist_ok=True)
        servers = []
        for key in options.only:
            model = MODELS[key]
            model.write(folder / key)
            servers += [
                Served(name=key, folder=folder / key, tp=tp, flags=model.flags)
                for tp in model.tp
                if tp <= options.gpus
            ]
        missing = [one for one in servers if not (logs / f"{one.key}.log").exists()]
        seconds = serve_all(missing, options.gpus, logs)
        logged: dict[str, against.Logged] = {}
        wrong: dict[str, str] = {}
        for one in servers:
            try:
                logged[one.key] = against.read(logs / f"{one.key}.log")
            except Sm12xError as error:
                wrong[one.key] = error.message
        read = [one for one in servers if one.key in logged]
        questions = [
            Question(
                folder=f"{one.folder}",
                arguments=one.arguments,
                env={},
                budgets=logged[one.key].budgets,
            )
            for one in read
        ]
        release = next((one.release for one in logged.values()), "").partition("+")[0]
        report: dict[str, Any] = {"seconds": seconds, "servers": {}, "wrong": wrong}
        for one, answer in zip(read, ask(questions, release, folder), strict=True):
            compared, problem = beside(answer, logged[one.key])
            if compared:
                print(f"{one.key}\n{against.text(compared)}", flush=True)
                report["servers"][one.key] = dataclasses.asdict(compared)
            if problem:
                wrong[one.key] = problem
                print(f"{one.key}: {problem}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
