"""Sleep, wake and a wake that is refused, on a real server: python -m tests.gpu.serve --out REPORT

The vLLM that `python -m vllm.entrypoints.openai.api_server` finds serves a random
mixture-of-experts model on the first visible GPU. Another process then takes so much of the GPU
that a wake-up must fail, and gives it back. Printed and written as JSON: the times, the memory in
use after each step, and `wrong`. `wrong` is empty where answers are the same before and after, a
refused wake-up leaves no more in use than a sleeping server, and the same wake-up works once there
is memory. Answers are the same where greedy text is, of every prompt whose text and log
probabilities are the same twice without a sleep, and where the log probabilities of a prompt's
tokens are no further apart than twice what they are without a sleep.

`--against REPORT` compares with an earlier run, of another attention kernel, say: where greedy text
parts, and how far the log probabilities of the prompts' tokens are from each other.

Exit code 1 where something is wrong, 2 where the server did not start. The report is written in
any case, also where the run is ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x.core import process
from sm12x.runtime import tiny

# Two runs at a time, each on a GPU of its own, take two ports.
PORT = int(os.environ.get("SM12X_TEST_PORT", "8123"))
ADDRESS = f"http://127.0.0.1:{PORT}"
GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
MIB = 1 << 20
# Seconds until the server must answer; DeepSeek V4's other kernels are compiled at the first start.
# A first prompt may compile as many: it took 249 beside 59 compilers.
START_LIMIT = 540
# Seconds for any other call; a first sleep takes 14.
CALL_LIMIT = 240
# Of a greedy answer, at most.
TOKENS = 48
# Names what a wake-up failed at, as the allocator's errors do.
NAMES_BLOCK = re.compile(r"block 0x[0-9a-f]+ of \d+ bytes")
# Log probabilities that are no further apart than this are the same.
EXACT = 1e-3
# Without a sleep. With other weights, log probabilities of random models are several apart.
LOUD = 0.5
# MiB that a refused wake-up may leave in use more than a sleep.
SLACK = 64
PROMPTS = ("The capital of France is", "1 2 3 4 5 6", "def fibonacci(n):")
# In tokens of one byte: within a window of 128, beyond it, and more than 512 blocks of four.
LONG_PROMPTS = tuple(
    "".join(f"{n} squared is {n * n}. " for n in range(first, first + count))
    for first, count in ((1, 4), (5, 40), (50, 250))
)
# What the server is started with, unless the environment says otherwise.
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    # Without these FlashInfer compiles kernels for minutes.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_FLASHINFER_MOE_FP16": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "HF_HUB_OFFLINE": "1",
}
GRAPHS = ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
TENANT = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
block = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


def rewrite(folder: Path, changed: dict[str, Any]) -> None:
    """The model of the recipe `smoke` with another configuration."""
    tiny.make(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "tie_word_embeddings": False, **changed}
    path.write_text(json.dumps(config, indent=1))


def draw(module: str, folder: Path) -> None:
    """Write weights in a process of its own: this one takes no memory of the GPU."""
    subprocess.run([sys.executable, "-m", f"tests.gpu.{module}", str(folder)], check=True)


def qwen3_moe(folder: Path, layers: int) -> None:
    """Qwen3-MoE of 1.16 GiB per layer in bf16, with the tokenizer of the recipe `smoke`."""
    rewrite(
        folder,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "torch_dtype": "bfloat16",
        },
    )


def dense_fp8(folder: Path, layers: int) -> None:
    """Qwen3 in FP8 with scales of blocks, as its published checkpoints; 0.2 GiB per layer."""
    rewrite(
        folder,
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            },
        },
    )


def hybrid(folder: Path, layers: int) -> None:
    """Qwen3-Next: three layers in four are gated DeltaNet, with states in place of a cache."""
    rewrite(
        folder,
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": layers,
            "full_attention_interval": 4,
            "layer_types": [
                "full_attention" if layer % 4 == 3 else "linear_attention"
                for layer in range(layers)
            ],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 16384,
            "torch_dtype": "bfloat16",
        },
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """How a model is made, and what its server is started with.

    ``configure`` writes the configuration of so many layers; ``weights`` is the module here that
    draws its weights, empty for those of `--load-format dummy`. A model that is not ``steady`` has
    other log probabilities each time, by kernels of the release.
    """

    configure: Callable[[Path, int], None]
    flags: tuple[str, ...]
    prompts: tuple[str, ...]
    weights: str = ""
    steady: bool = True

    def make(self, folder: Path, layers: int, *, dummy: bool = False) -> None:
        """Write the model into ``folder``; without weights where they are to be ``dummy``."""
        self.configure(folder, layers)
        if self.weights and not dummy:
            draw(self.weights, folder)


MODELS = {
    "qwen3-moe": Model(
        configure=qwen3_moe,
        weights="checkpoint",
        flags=(
            *("--max-model-len", "2048", "--moe-backend", "triton"),
            *("--attention-backend", "TRITON_ATTN"),
        ),
        prompts=LONG_PROMPTS[:2],
    ),
    # The model of the recipe `smoke`.
    "smoke": Model(
        configure=lambda folder, layers: tiny.make(folder),
        flags=("--load-format", "dummy", "--attention-backend", "TRITON_ATTN"),
        prompts=PROMPTS,
    ),
    "dense-fp8": Model(
        configure=dense_fp8,
        weights="checkpoint",
        flags=("--max-model-len", "2048", "--attention-backend", "TRITON_ATTN"),
        prompts=LONG_PROMPTS[:2],
    ),
    "hybrid": Model(
        configure=hybrid,
        weights="checkpoint",
        flags=(
            *("--max-model-len", "8192", "--max-num-seqs", "8"),
            *("--moe-backend", "triton", "--attention-backend", "TRITON_ATTN"),
        ),
        prompts=LONG_PROMPTS,
    ),
    "deepseek-v4": Model(
        # Its module writes the configuration too.
        configure=lambda folder, layers: None,
        weights="deepseek_v4",
        flags=(
            *("--max-model-len", "8192", "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "2048", "--kv-cache-dtype", "fp8", "--block-size", "256"),
            *("--moe-backend", "marlin", "--tokenizer-mode", "hf"),
            # 31 kernels of TileLang, of 13 s each, before the server answers.
            *("--kernel-config", '{"enable_jit_warmup": false}'),
        ),
        prompts=LONG_PROMPTS,
    ),
    "deepseek-v41": Model(
        configure=lambda folder, layers: None,
        weights="deepseek_v41",
        flags=(
            *("--max-model-len", "8192", "--max-num-seqs", "8", "--language-model-only"),
            *("--max-num-batched-tokens", "2048", "--kv-cache-dtype", "fp8", "--block-size", "128"),
            *("--moe-backend", "marlin", "--tokenizer-mode", "hf"),
            *("--kernel-config", '{"enable_jit_warmup": false}'),
        ),
        prompts=LONG_PROMPTS,
        # By 0.08 to 0.15 on an H200, with FlashMLA and DeepGEMM as with the portable kernels.
        steady=False,
    ),
}


def used() -> int:
    """MiB in use on the first visible GPU, by all processes."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", GPU]
    return int(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def call(
    method: str, path: str, body: dict[str, Any] | None = None, *, limit: float = CALL_LIMIT
) -> tuple[int, str, float]:
    """HTTP status, text and seconds of one request; status 0 where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    # S310 is about a scheme that somebody else chose: ADDRESS is http on this host.
    request = urllib.request.Request(  # noqa: S310
        ADDRESS + path, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=limit) as answer:  # noqa: S310
            return answer.status, answer.read().decode(), time.monotonic() - began
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), time.monotonic() - began
    except OSError as error:
        return 0, str(error), time.monotonic() - began


def complete(
    prompt: str | list[int], *, limit: float = CALL_LIMIT, **settings: Any
) -> tuple[int, dict[str, Any]]:
    """HTTP status and the first choice of one greedy completion."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, **settings}
    status, text, _ = call("POST", "/v1/completions", body, limit=limit)
    return status, json.loads(text)["choices"][0] if status == 200 else {}


def greedy(prompts: Sequence[str]) -> list[str]:
    """The text of each prompt, up to the first prompt that gets none: that one's HTTP status."""
    texts: list[str] = []
    for prompt in prompts:
        status, choice = complete(prompt, max_tokens=TOKENS)
        if status != 200:
            return [*texts, f"HTTP {status}"]
        texts.append(choice["text"])
    return texts


def likelihoods(prompts: Sequence[str]) -> list[list[float]]:
    """The log probability of each token of each prompt, the first one's left out."""
    found: list[list[float]] = []
    for prompt in prompts:
        _, choice = complete(prompt, max_tokens=1, prompt_logprobs=0)
        ranks = (choice.get("prompt_logprobs") or [])[1:]
        found.append([next(iter(token.values()))["logprob"] for token in ranks])
    return found


def rescored(prompts: Sequence[str]) -> list[float]:
    """Of each prompt, how far the log probability of a generated token is, at most, from what it
    is when prompt and answer are read as one prompt: decode kernels, with the tokens of a draft
    where there is one, against prefill kernels. Infinite where the server gives no token ids.
    """
    found: list[float] = []
    for prompt in prompts:
        _, choice = complete(prompt, max_tokens=TOKENS, logprobs=0, return_token_ids=True)
        before, tokens = choice.get("prompt_token_ids"), choice.get("token_ids")
        decoded = (choice.get("logprobs") or {}).get("token_logprobs")
        if not before or not tokens or not decoded:
            found.append(math.inf)
            continue
        _, whole = complete([*before, *tokens], max_tokens=1, prompt_logprobs=0)
        ranks = (whole.get("prompt_logprobs") or [])[-len(tokens) :]
        read = [
            rank.get(str(token), {}).get("logprob", math.inf)
            for rank, token in zip(ranks, tokens, strict=False)
        ]
        gaps = (abs(a - b) for a, b in zip(decoded, read, strict=False))
        found.append(max(gaps, default=math.inf))
    return found


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Greedy text of each prompt, and the log probability of each of its tokens."""

    texts: list[str]
    likelihoods: list[list[float]]

    @classmethod
    def ask(cls, prompts: Sequence[str]) -> Answers:
        return cls(texts=greedy(prompts), likelihoods=likelihoods(prompts))

    def distances(self, other: Answers) -> list[float]:
        """Of each prompt, how far a log probability is from the other's at most.

        Infinite where one of the two has none: the server did not answer.
        """
        return [
            max((abs(a - b) for a, b in zip(mine, others, strict=True)), default=math.inf)
            if len(mine) == len(others)
            else math.inf
            for mine, others in zip(self.likelihoods, other.likelihoods, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Before:
    """The answers of a server that has not slept, and what of them is the same twice."""

    answers: Answers
    steady: list[bool]
    noise: list[float]

    @classmethod
    def of(cls, first: Answers, again: Answers) -> Before:
        """What two rounds of the same prompts tell. Where log probabilities are not the same
        twice, a text that is has been so by chance, and may be another one the third time.
        """
        noise = first.distances(again)
        # Texts end at the first prompt that gets none.
        same = [
            first.texts[n : n + 1] == again.texts[n : n + 1] != [] and distance <= EXACT
            for n, distance in enumerate(noise)
        ]
        return cls(answers=first, steady=same, noise=noise)

    def differences(self, now: Answers) -> list[str]:
        """What of the answers is not the same any more; empty where all is."""
        found: list[str] = []
        distances = self.answers.distances(now)
        for n, (steady, noise, distance) in enumerate(
            zip(self.steady, self.noise, distances, strict=True), 1
        ):
            if steady and now.texts[n - 1 : n] != self.answers.texts[n - 1 : n]:
                found.append(f"other text of prompt {n}")
            if distance > 2 * noise + EXACT:
                found.append(f"prompt {n} is {distance:.4f} away, {noise:.4f} without a sleep")
        return found


def burst(prompts: Sequence[str]) -> None:
    """As many requests as the server takes at a time, for the memory that steps come to need."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: complete(prompts[-1][number:], max_tokens=64), range(8)))


def compare(answers: Answers, other: Answers) -> list[dict[str, Any]]:
    """A prompt at a time: where texts part, and how far log probabilities are apart."""
    found: list[dict[str, Any]] = []
    for mine, theirs, here, there in zip(
        answers.texts, other.texts, answers.likelihoods, other.likelihoods, strict=True
    ):
        same = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        gaps = [abs(a - b) for a, b in zip(here, there, strict=True)]
        found.append(
            {
                "tokens": len(here) + 1,
                "texts_part_at": same,
                "logprob_mean": sum(gaps) / len(gaps),
                "logprob_max": max(gaps),
            }
        )
    return found


def earlier(path: Path, prompts: int) -> Answers:
    """The answers in the report of another run; ends this one where a prompt has none."""
    report = json.loads(path.read_text())
    answers = Answers(texts=report.get("texts", []), likelihoods=report.get("likelihoods", []))
    if {len(answers.texts), len(answers.likelihoods)} != {prompts}:
        sys.exit(f"{path} has {len(answers.texts)} texts of {prompts} prompts: run it again")
    return answers


def held() -> dict[str, int]:
    """MiB that the first worker holds, by what; see tests/gpu/probe.py."""
    status, text, _ = call("POST", "/collective_rpc", {"method": "memory_held"})
    if status != 200:
        return {}
    return {name: size // MIB for name, size in json.loads(text)["results"][0].items()}


class Steps:
    """What was seen, step by step, and what of it is wrong."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        # False: the run was ended before its last step, so an empty `wrong` says nothing.
        self.finished = False

    def add(self, name: str, seconds: float, **seen: Any) -> int:
        """Record and print a step; returns the MiB in use after it."""
        memory = used()
        self.steps.append({"step": name, "seconds": round(seconds, 3), "used_mib": memory, **seen})
        print(json.dumps(self.steps[-1]), flush=True)
        return memory

    def expect(self, right: bool, problem: str) -> None:
        if not right:
            self.wrong.append(problem)
            print(json.dumps({"wrong": problem}), flush=True)


class Report(Steps):
    """The steps of one server, and its answers before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Before | None = None
        self.rescored: list[float] = []

    def step(
        self,
        name: str,
        *,
        status: int = 200,
        seconds: float = 0.0,
        error: str = "",
        held: dict[str, int] | None = None,
    ) -> int:
        more = ({"error": error[:600]} if error else {}) | ({"worker_mib": held} if held else {})
        return self.add(name, seconds, status=status, **more)

    def same(self, before: Before, now: Answers, when: str) -> None:
        for difference in before.differences(now):
            self.expect(False, f"{when}: {difference}")


def first_answers(report: Steps, prompts: Sequence[str]) -> None:
    """Ask each prompt once, with the time that compiling its kernels takes."""
    for number, prompt in enumerate(prompts, 1):
        began = time.monotonic()
        status, _ = complete(prompt, limit=START_LIMIT, max_tokens=TOKENS)
        report.add(f"first answer to prompt {number}", time.monotonic() - began, status=status)


def answer(report: Report, model: Model) -> Before:
    """Ask all prompts twice, and compare the answers with each other."""
    prompts = model.prompts
    first_answers(report, prompts)
    before = Before.of(Answers.ask(prompts), Answers.ask(prompts))
    report.before = before
    report.step("awake", held=held())
    report.rescored = rescored(prompts)
    print(json.dumps({"rescored": report.rescored}))
    burst(prompts)
    report.step("eight requests at a time", held=held())
    texts = before.answers.texts
    report.expect(len(set(texts)) > 1, f"one text for all prompts: {texts[0]!r}")
    if model.steady:
        report.expect(any(before.steady), "no prompt has the same text twice, without a sleep")
    report.expect(max(before.noise) < LOUD, f"{max(before.noise):.2f} apart, without a sleep")
    return before


def rotate(report: Report, model: Model, before: Before, cycles: int) -> None:
    """Cycles of sleep and wake, then a wake-up that another process is in the way of."""
    prompts = model.prompts
    asleep = 0
    for cycle in range(cycles):
        status, text, seconds = call("POST", "/sleep?level=1")
        asleep = report.step(f"sleep {cycle + 1}", status=status, seconds=seconds)
        status, text, seconds = call("POST", "/wake_up")
        report.step(f"wake {cycle + 1}", status=status, seconds=seconds)
        report.same(before, Answers.ask(prompts), f"after cycle {cycle + 1}")
    call("POST", "/sleep?level=1")
    words = [sys.executable, "-c", TENANT, str(4096 * MIB)]
    tenant = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tenant.stdout is not None
    tenant.stdout.readline()
    taken = report.step("another process has taken all but 4 GiB")
    for _ in range(2):
        status, text, seconds = call("POST", "/wake_up")
        left = report.step("wake refused", status=status, seconds=seconds, error=text)
        report.expect(status == 500, f"a wake-up without memory answers {status}")
        report.expect(NAMES_BLOCK.search(text) is not None, "the answer names no block and size")
        report.expect(left <= taken + SLACK, f"it keeps {left - taken} MiB")
        _, text, _ = call("GET", "/is_sleeping")
        report.expect("true" in text, f"is_sleeping says {text}")
    tenant.communicate("")
    report.expect(used() <= asleep + SLACK, "more in use than asleep once the memory is back")
    status, text, seconds = call("POST", "/wake_up")
    report.step(
        "wake repeated", status=status, seconds=seconds, error="" if status == 200 else text
    )
    report.expect(status == 200, f"the repeated wake-up answers {status}")
    report.same(before, Answers.ask(prompts), "after the repeated wake-up")


def command(
    folder: Path,
    model: Model,
    *,
    port: int,
    utilization: str,
    graphs: bool,
    flags: Sequence[str],
    module: Sequence[str] = ("vllm.entrypoints.openai.api_server",),
) -> list[str]:
    """What starts a server of the model in ``folder``, with sleep mode; ``module`` and its words
    start it.
    """
    return [
        *(sys.executable, "-m", *module),
        *("--model", f"{folder}", "--served-model-name", "model"),
        *("--worker-extension-cls", "tests.gpu.probe.Probe"),
        *("--port", f"{port}", "--enable-sleep-mode", "--gpu-memory-utilization", utilization),
        *(GRAPHS if graphs else ["--enforce-eager"]),
        # A prompt whose first blocks are cached takes other tiles, and may get other text.
        "--no-enable-prefix-caching",
        *model.flags,
        *flags,
    ]


def start(
    words: Sequence[str], log: Path, settings: Mapping[str, str] | None = None
) -> process.Background:
    """A server whose output goes to ``log``; the environment goes before ``ENVIRONMENT`` and
    ``settings``.
    """
    environment = {**ENVIRONMENT, **(settings or {}), **os.environ}
    return process.Background(words, log=log, env=environment)


def healthy(server: process.Background, is_up: Callable[[], bool]) -> float | None:
    """The seconds until the server answers, None where it does not: its last words are printed.

    Args:
        is_up: whether it answers now.
    """
    began = time.monotonic()
    while not is_up():
        if server.poll() is not None or time.monotonic() - began > START_LIMIT:
            print(server.log.read_text()[-4000:])
            return None
        time.sleep(0.5)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-moe")
    parser.add_argument("--layers", type=int, default=14, help="of what is not DeepSeek V4 or V4.1")
    parser.add_argument("--against", type=Path, help="the report of another run of the same model")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, without torch.compile")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--utilization", default="0.6", help="of the GPU's memory (default: 0.6)")
    parser.add_argument("--answers", action="store_true", help="no sleep: others share the GPU")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    # So that a run that is ended cleans up, and takes its server along once there is one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if call("GET", "/health")[0]:
        sys.exit(f"another server answers at {ADDRESS}: stop it, or name another SM12X_TEST_PORT")
    report = Report()
    model = MODELS[options.model]
    theirs = earlier(options.against, len(model.prompts)) if options.against else None
    against: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model.make(Path(scratch) / "model", options.layers)
        words = command(
            Path(scratch) / "model",
            model,
            port=PORT,
            utilization=options.utilization,
            graphs=options.graphs,
            flags=options.serve,
        )
        server = start(words, options.out.with_suffix(".log"))

        # At once, so that no thread waits for an answer.
        def end(*_: object) -> None:
            server.kill()
            sys.exit(143)

        signal.signal(signal.SIGTERM, end)
        try:
            seconds = healthy(server, lambda: call("GET", "/health")[0] == 200)
            if seconds is None:
                return 2
            report.step("healthy", seconds=seconds, held=held())
            before = answer(report, model)
            if not options.answers:
                rotate(report, model, before, options.cycles)
            if theirs and report.before:
                against = compare(report.before.answers, theirs)
                print(json.dumps({"against": against}))
            report.finished = True
        finally:
            server.stop()
            result: dict[str, Any] = {"finished": report.finished, "wrong": report.wrong}
            if report.before:
                answers = report.before.answers
                result |= {"texts": answers.texts, "likelihoods": answers.likelihoods}
                result |= {"steady": report.before.steady, "noise": report.before.noise}
            result |= {"against": against, "rescored": report.rescored, "steps": report.steps}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"wrong": report.wrong}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
