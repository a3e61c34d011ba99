"""`sm12x bench` as a process, with the real tools, against a server that plays vLLM."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.integration.test_verify import HERE, KEY, started

from sm12x import layout
from sm12x.bench import presets, run
from sm12x.core import declared
from sm12x.runtime import tiny
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.wheel.ledger import Ledger, PatchEntry

RECIPE = "gpt-oss-120b-rtx-pro-6000"
# Plays `vllm bench serve`: checks how it is called, and writes a result.
SERVE = """\
import json, os, pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["bench", "serve"], words
given = {name: value for name, value in zip(words, words[1:]) if name.startswith("--")}
assert os.environ["OPENAI_API_KEY"] == KEY and KEY not in " ".join(words)
result = {"completed": int(given["--num-prompts"]), "median_tpot_ms": 9.1, "median_itl_ms": 9.0,
          "spec_decode_per_position_acceptance_rates": [0.8, 0.6], "host": os.environ["USER"]}
pathlib.Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(result))
print("served", given["--base-url"])
"""


def release() -> str:
    return bases.default()


def write_ledger(path: Path) -> str:
    """The ledger of this checkout's stack, and the version of a server with it."""
    folder = layout.patches() / release()
    names = [one.name for one in series.load(bases.load(release())).patches]
    shas = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    texts = (
        *("sdist", "sdist_sha256", "official_wheel", "official_wheel_sha256", "machine", "python"),
        *("arch_list", "cmake_archs", "compiler", "nvcc", "lock_sha256"),
    )
    plain = ("subject", "upstream", "drop_when", "witness", "state", "native")
    rest: Any = dict.fromkeys(texts, "")
    more: Any = dict.fromkeys(plain, "")
    ledger = Ledger(
        base_version=release(),
        stack_id=series.read_id(folder),
        patches=tuple(PatchEntry(name=name, sha256=sha, **more) for name, sha in shas.items()),
        mode="quick",
        files=(),
        libraries=(),
        dependencies={},
        **rest,
    )
    declared.write_json(path, ledger)
    return ledger.wheel_version


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Path]:
    """A checkout with recipes of its own, an image's ledger, a model, and a stand-in of vLLM."""
    root = tmp_path / "root"
    shutil.copytree(layout.recipes(), root / "recipes")
    (root / "patches").symlink_to(layout.patches())
    image = tmp_path / "image"
    image.mkdir()
    module = tmp_path / "path" / "vllm" / "entrypoints" / "cli"
    module.mkdir(parents=True)
    for folder in (module, *module.parents[:2]):
        (folder / "__init__.py").touch()
    (module / "main.py").write_text(f"KEY = {KEY!r}\n{SERVE}")
    tiny.make(tmp_path / "model")
    (tmp_path / "gpu").mkdir()
    return {"root": root, "image": image, "model": tmp_path / "model", "path": tmp_path / "path"}


@pytest.fixture
def environment(place: dict[str, Path], tmp_path: Path) -> dict[str, str]:
    paths = [str(HERE / "nvml"), str(place["path"]), str(layout.root() / "scripts")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_GPU": str(tmp_path / "gpu"),
        "SM12X_ROOT": str(place["root"]),
        "SM12X_IMAGE_ROOT": str(place["image"]),
        "SM12X_CACHE": str(layout.cache()),
        "VLLM_API_KEY": KEY,
        "USER": "joe-of-the-lab",
        # A proxy must not come between.
        **dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:1"),
    }


@pytest.fixture
def play(place: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server, and returns its address: ``play(token=0.01)``."""
    running: list[subprocess.Popen[str]] = []

    def start(**settings: Any) -> str:
        version = write_ledger(place["image"] / "ledger.json")
        known = {
            "key": KEY,
            "version": version,
            "root": str(place["model"]),
            "max_model_len": 4096,
            "caching": "True",
            "speculates": True,
            "memory": str(tmp_path / "gpu" / "0.json"),
            **settings,
        }
        words = [sys.executable, str(HERE / "serve.py"), json.dumps(known)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in running:
        process.kill()
        process.wait()


def bench(words: tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "sm12x", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr
    return done


def steps(folder: Path) -> dict[str, str]:
    try:
        raw = json.loads((folder / run.NAME).read_text())
    except (OSError, ValueError):
        return {}
    return {step["name"]: step["state"] for step in raw["steps"]}


def test_a_run_that_is_killed_goes_on_and_becomes_evidence(
    play: Callable[..., str], environment: dict[str, str], place: dict[str, Path], tmp_path: Path
) -> None:
    url, out = play(token=0.01), tmp_path / "out"
    words = ("bench", url, "--recipe", RECIPE, "--out", str(out), "--swaps", "1")
    first = started(words[1:], environment, "bench")
    end = time.monotonic() + 200
    while "benchy-d0-c1" not in steps(out) and time.monotonic() < end:
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 130
    kept = run.read(out)
    assert kept.verdict == "stopped"
    assert steps(out)["canary-before"] == "done"
    done = bench(words, environment)
    assert done.returncode == 0, done.stderr
    report = run.read(out)
    assert report.verdict == "passed"
    assert report.steps[:2] == kept.steps[:2]
    assert report.begun == kept.begun
    jsonschema.validate(
        json.loads((out / run.NAME).read_text()),
        json.loads((layout.schemas() / "bench-1.json").read_text()),
    )
    (gpu,) = report.host.gpus
    assert (gpu.hardware, gpu.power_limit) == ("rtx-pro-6000", 600.0)
    sample = next(one.gpus[0] for one in report.steps if one.kind == "benchy")
    assert sample.celsius == (41.0, 41.0, 41.0)
    serve = next(one for one in report.steps if one.kind == "serve")
    assert serve.acceptance_by_position == (0.8, 0.6)
    assert report.swap is not None
    assert report.swap.verdict == "passed"

    texts = {path: path.read_text(errors="replace") for path in out.rglob("*") if path.is_file()}
    for text in texts.values():
        for secret in (KEY, "joe-of-the-lab", str(tmp_path / "out")):
            assert secret not in text
    assert (out / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert '"host": "<user>"' in (out / "tools" / "serve.json").read_text()
    assert [one.hidden for one in serve.files if one.name == "serve.json"] == [True]

    added = bench(("evidence", "add", str(out), "--json"), environment)
    assert added.returncode == 0, added.stderr
    entry = json.loads(added.stdout)
    assert (entry["gpus"], entry["stack_id"]) == (1, report.stack.stack_id)
    linted = bench(("recipe", "lint", RECIPE), environment)
    assert "evidence" not in linted.stdout
    assert "verified (20" in bench(("recipe", "list"), environment).stdout
    (path,) = (place["root"] / "recipes" / "evidence" / RECIPE).glob("*.json")
    path.write_text(path.read_text().replace('"gpus": 1', '"gpus": 2'))
    linted = bench(("recipe", "lint", RECIPE), environment)
    assert linted.returncode == 1
    assert "takes 1 GPUs of a machine, not 2" in linted.stdout

    arena_is_as_the_tool_writes_it(out)


def arena_is_as_the_tool_writes_it(out: Path) -> None:
    """llama-benchy itself makes the same table of the same cells."""
    (python,) = (layout.cache() / "bench").glob("tools-*/bin/python")
    script = """\
import json, pathlib, sys
from llama_benchy.results import BenchmarkReport, BenchmarkResults
results = BenchmarkResults()
for path in sorted(pathlib.Path(sys.argv[1]).glob("benchy-*.json")):
    report = BenchmarkReport(**json.loads(path.read_text()))
    results.runs += report.benchmarks
    results.model_name, results.metadata = report.model, report
results.metadata.max_concurrency = max(run.concurrency for run in results.runs)
results.save_report(sys.argv[2], "csv", results.metadata.max_concurrency)
"""
    theirs = out.parent / "theirs.csv"
    words = [str(python), "-c", script, str(out / "tools"), str(theirs)]
    subprocess.run(words, check=True, capture_output=True)
    ours = (out / "spark-arena" / "benchmark.csv").read_text().splitlines()
    lines = theirs.read_text().splitlines()
    assert ours[0] == lines[0]
    assert len(ours) == len(lines) == 1 + 2 * len(presets.load().presets["smoke"].concurrency)
    for mine, their in zip(ours[1:], lines[1:], strict=True):
        for one, other in zip(mine.split(",")[1:], their.split(",")[1:], strict=True):
            if one and one[0].isdigit():
                assert float(one) == pytest.approx(float(other), abs=1e-6)
            else:
                assert one == other


def test_a_server_that_dies_stops_the_run_and_a_folder_of_another_is_refused(
    play: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    done = bench(("bench", play(die="completions:9"), "--out", out), environment)
    assert done.returncode == 17
    assert "goes on" in done.stderr
    assert run.read(tmp_path / "out").verdict == "stopped"
    other = bench(("bench", play(), "--out", out, "--preset", "rtx"), environment)
    assert other.returncode == 2
    assert "preset" in other.stderr
    # The same run, of the same hardware: compared, and still no complete one.
    again = bench(("bench", out, "--against", out), environment)
    assert again.returncode == 16
    assert "Against the earlier run" in (tmp_path / "out" / "report.md").read_text()


def test_an_address_without_version_and_sleep_routes_is_measured(
    play: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    """As a gateway's, and with a terminal that closes: no tool goes on asking."""
    url, out = (
        play(refuse={"version": 404, "metrics": 404}, routes=False, token=0.05),
        tmp_path / "out",
    )
    first = started((url, "--out", str(out), "--skip", "serve"), environment, "bench")
    end = time.monotonic() + 200
    while "canary-before" not in steps(out) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(2)
    first.send_signal(signal.SIGHUP)
    assert first.wait(timeout=60) == 130
    assert not [one for one in processes() if str(out) in one]
    report = run.read(out)
    assert (report.verdict, report.server.version, report.server.prefix_caching) == (
        "stopped",
        "",
        None,
    )


def processes() -> list[str]:
    """The command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines
