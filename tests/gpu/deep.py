"""A sleep of level 2 on a real server with a LoRA adapter: python -m tests.gpu.deep --out REPORT

A dense FP8 model with drawn weights is served on the first visible GPU, with a drawn adapter. Level
2 discards the weights: after each sleep a plain wake_up must name the next call, and a request must
get 503, until `reload_weights` has loaded them again. Then the model, and the model with its
adapter, answer as before. `wrong` says what was not so.

Exit code 1 where something is wrong, 2 where the server did not start.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import checkpoint, serve

MODEL = "dense-fp8"
ADAPTER = "adapter"
LORA = ("--enable-lora", "--max-lora-rank", f"{checkpoint.RANK}")


def answers(prompts: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """HTTP status and greedy text of each prompt, of the model and of the model with adapter."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in ("model", ADAPTER):
        found[name] = []
        for prompt in prompts:
            status, choice = serve.complete(prompt, model=name, max_tokens=serve.TOKENS)
            found[name].append((status, choice.get("text", "")))
    return found


def sleeps(report: serve.Steps, prompts: Sequence[str], cycles: int) -> None:
    before = answers(prompts)
    report.add("awake", 0)
    served = all(status == 200 for texts in before.values() for status, _ in texts)
    report.expect(served, f"before the first sleep: {before}")
    report.expect(answers(prompts) == before, "other text without a sleep")
    report.expect(before["model"] != before[ADAPTER], "the adapter changes no text")
    for cycle in range(1, cycles + 1):
        status, text, seconds = serve.call("POST", "/sleep?level=2")
        report.add(f"sleep {cycle}", seconds, status=status, answer=text[:600])
        report.expect(status == 200, f"sleep {cycle} answers {status}")
        status, text, seconds = serve.call("POST", "/wake_up")
        report.add(f"wake {cycle}", seconds, status=status, answer=text[:600])
        named = status == 200 and "reload_weights" in json.loads(text or "{}").get("next", "")
        report.expect(named, f"wake {cycle} names no next call: {status} {text[:200]}")
        early = {status for texts in answers(prompts).values() for status, _ in texts}
        report.expect(early == {503}, f"before the weights are loaded a request gets {early}")
        status, text, seconds = serve.call("POST", "/collective_rpc", {"method": "reload_weights"})
        report.add(f"reload {cycle}", seconds, status=status, answer=text[:600])
        now = answers(prompts)
        for name, texts in before.items():
            report.expect(now[name] == texts, f"after reload {cycle} {name} answers {now[name]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    model = serve.MODELS[MODEL]
    report = serve.Steps()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        folder, adapter = Path(scratch) / "model", Path(scratch) / ADAPTER
        model.make(folder, options.layers)
        checkpoint.make_adapter(folder, adapter)
        words = serve.command(
            folder,
            model,
            port=serve.PORT,
            utilization="0.6",
            graphs=True,
            flags=[*LORA, "--lora-modules", f"{ADAPTER}={adapter}", *options.serve],
        )
        server = serve.start(words, options.out.with_suffix(".log"))
        try:
            seconds = serve.healthy(server, lambda: serve.call("GET", "/health")[0] == 200)
            if seconds is None:
                return 2
            report.add("healthy", seconds)
            serve.first_answers(report, model.prompts)
            sleeps(report, model.prompts, options.cycles)
            report.finished = True
        finally:
            server.stop()
            told = {"finished": report.finished, "wrong": report.wrong, "steps": report.steps}
            options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({"wrong": report.wrong}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
