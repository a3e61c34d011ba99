"""`sm12x bench` against a real server, stopped and gone on: python -m tests.gpu.bench --out REPORT

The server is that of tests.gpu.serve, with random weights. The tools are installed from the wheels
in the folder TOOLS, as the host has no network; on another machine

    python -m tests.gpu.bench --fetch TOOLS --python 3.12

fills it (53 MB). The first run of the benchmark is ended once two steps are done, the second one
goes on. REPORT gets `wrong`, which is empty where that is so, each step ran, and each of the
figures is there; the benchmark's folder is beside it, without `.json`.

Exit code 1 where something is wrong, 2 where the server did not start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu import serve

from sm12x.bench import presets, run
from sm12x.core import pipconfig
from sm12x.core.errors import INTERRUPTED, BadFileError

# Seconds that a part of the benchmark may take.
LIMIT = 400
# Steps after which the first run is ended.
STEPS = 2


def fetch(folder: Path, python: str) -> int:
    """Fill a folder with the wheels of the tools' lock, for an x86_64 host with that Python."""
    platforms = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
    words = ["download", "--quiet", "--require-hashes", "--only-binary", ":all:"]
    words += ["--python-version", python, "--dest", f"{folder}"]
    for platform in platforms:
        words += ["--platform", platform]
    lock = presets.folder() / "requirements.lock"
    # pip's index is that of the settings which uv is given elsewhere.
    index = pipconfig.load().indexes[0]
    argv = [sys.executable, "-m", "pip", *words, "--index-url", index, "-r", f"{lock}"]
    return subprocess.run(argv, check=False).returncode


def with_nvml(folder: Path) -> dict[str, str]:
    """The environment of a client: the host may lack nvidia-ml-py, and vLLM has a copy of it."""
    mine = dict(os.environ)
    vllm = importlib.util.find_spec("vllm")
    if importlib.util.find_spec("pynvml") is None and vllm and vllm.submodule_search_locations:
        folder.mkdir()
        for place in vllm.submodule_search_locations:
            shutil.copy(Path(place) / "third_party" / "pynvml.py", folder)
        mine["PYTHONPATH"] = os.pathsep.join([*filter(None, [mine.get("PYTHONPATH")]), f"{folder}"])
    return mine


def done(folder: Path) -> list[dict[str, Any]]:
    """The steps that a folder has, none before the first."""
    try:
        raw = json.loads((folder / run.NAME).read_text())
    except (OSError, ValueError):
        return []
    return [step for step in raw["steps"] if step["state"] == "done"]


def measure(words: list[str], env: dict[str, str], folder: Path, log: Path) -> Iterator[str]:
    """Run the benchmark in two parts, and say what is wrong."""
    with log.open("w") as output:
        first = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT)
        end = time.monotonic() + LIMIT
        while len(done(folder)) < STEPS and first.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        code = first.wait(timeout=60)
        if code != INTERRUPTED:
            yield f"the first part ended with {code}"
        kept = done(folder)
        if not kept:
            yield "the first part has kept no step"
        second = subprocess.run(
            words, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
        )
    if second.returncode:
        yield f"the second part ended with {second.returncode}"
    if done(folder)[: len(kept)] != kept:
        yield "a step that was done was run again"
    try:
        report = run.read(folder)
    except BadFileError as error:
        yield error.message
        return
    other = [one for one in report.steps if one.state != "done"]
    yield from (f"{one.name}: {one.state}: {one.why}" for one in other)
    yield from (f"{one.level}: {one.step}: {one.text}" for one in report.findings)
    if report.verdict != "passed":
        yield f"the verdict is {report.verdict}"
    if not report.host.gpus or report.host.gpus[0].power_limit is None:
        yield f"no facts of the GPU: {report.host.unseen}"
    if not any(gpu.watts for step in report.steps for gpu in step.gpus):
        yield "no samples of the GPU"
    figures = next((one.figures for one in report.steps if one.kind == "serve"), {})
    yield from (
        f"no {name}" for name in ("median_tpot_ms", "median_itl_ms") if not figures.get(name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=serve.MODELS, default="smoke")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--preset", choices=[*presets.load().presets], default="smoke")
    parser.add_argument("--tools", type=Path, help="a folder with the tools' wheels")
    parser.add_argument("--fetch", type=Path, metavar="TOOLS", help="fill such a folder, and end")
    parser.add_argument("--python", default="3.12", help="of the host (default: 3.12)")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    if options.fetch:
        return fetch(options.fetch, options.python)
    if not options.out:
        parser.error("--out or --fetch")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    model = serve.MODELS[options.model]
    wrong = ["the server did not start"]
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "model"
        model.make(weights, options.layers)
        server = serve.start(
            serve.command(
                weights,
                model,
                port=serve.PORT,
                utilization="0.6",
                graphs=options.graphs,
                flags=options.serve,
            ),
            options.out.with_suffix(".log"),
        )

        def end(*_: object) -> None:
            server.kill()
            sys.exit(143)

        signal.signal(signal.SIGTERM, end)
        try:
            up = serve.healthy(server, lambda: serve.call("GET", "/health")[0] == 200)
            if up is None:
                return 2
            words = [sys.executable, "-P", "-m", "sm12x", "bench", serve.ADDRESS]
            words += ["--preset", options.preset, "--out", f"{folder}", "--swaps", "2"]
            words += ["--random-weights", "--tokenizer", f"{weights}"]
            words += ["--gpus", os.environ.get("CUDA_VISIBLE_DEVICES", "all")]
            words += ["--skip", "tools", "--skip", "gsm8k"] if options.preset != "smoke" else []
            words += ["--tools", f"{options.tools}"] if options.tools else []
            env = with_nvml(Path(scratch) / "nvml")
            wrong = [*measure(words, env, folder, options.out.with_suffix(".bench.txt"))]
        finally:
            server.stop()
            result = {"wrong": wrong, "steps": done(folder)}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
