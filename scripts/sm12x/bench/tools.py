"""The tools: their environment, command lines, and what their own result files say."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import platform
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import requests
from pydantic import BaseModel, Field, ValidationError

from sm12x import layout
from sm12x.bench import presets
from sm12x.bench.presets import Preset
from sm12x.bench.report import Cell, Metric
from sm12x.core import files, pipconfig, process
from sm12x.core.errors import BadFileError, FetchError, ToolFailedError
from sm12x.core.lockfile import read as read_lock

# llama-benchy's default text, its name here, and seconds that fetching it may take.
BOOK, BOOK_NAME = "https://www.gutenberg.org/files/1661/1661-0.txt", "llama-benchy's book"
_BOOK_WITHIN = 30.0
_BOOK_BEGINS = "*** START OF THE PROJECT GUTENBERG EBOOK"
# English prose that every Python has, where the book cannot be fetched.
_TOPICS = "pydoc_data.topics of Python"
# It takes the API key as an argument alone, which any user of the host can read, and no seed.
_BENCHY = """\
import os, runpy, sys
import numpy
numpy.random.seed(int(os.environ["SM12X_BENCH_SEED"]))
sys.argv[0] = "llama-benchy"
key = os.environ.pop("SM12X_BENCH_KEY", "")
sys.argv += ["--api-key", key] if key else []
runpy.run_module("llama_benchy", run_name="__main__")
"""
_MOST, _LOG = 256 << 20, "read the tool's log"
# Without what else is on the path: a package there would count as installed.
_ALONE: Mapping[str, str | None] = {"PYTHONPATH": None}


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools' environment: its ``python``, their ``versions`` and a ``home`` of their own."""

    python: Path
    home: Path
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that is asked. ``address`` is without /v1; ``tokenizer`` is a folder or a name.

    ``shown`` is the model's name in results.
    """

    address: str
    model: str
    shown: str
    tokenizer: str
    key: str
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tool's run: ``result`` is the file that it writes, beside further ``kept`` ones."""

    argv: tuple[str, ...]
    result: Path
    env: Mapping[str, str | None] = field(default_factory=dict)
    cwd: Path | None = None
    kept: tuple[Path, ...] = ()


def install(wheels: Path | None, say: Callable[[str], None]) -> Tools:
    """Return the tools' environment, which is made where it is not there.

    Args:
        wheels: a folder with all wheels of the lock, for a host without a package index.

    Raises:
        FetchError: a package cannot be fetched, or is not in ``wheels``.
    """
    lock = presets.folder() / "requirements.lock"
    pins = read_lock(lock).versions
    versions = {name: pins[name] for name in presets.load().tools}
    digest = files.sha256(lock)[:12]
    place = layout.cache() / "bench"
    folder = place / f"tools-{digest}-{platform.python_version()}-{platform.machine()}"
    python = folder / "bin" / "python"
    place.mkdir(parents=True, exist_ok=True)
    with files.locked(place, wait=True):
        if not (folder / "complete").is_file():
            say(f"installing {' and '.join(versions)} in {folder}")
            # pip is installed into no environment: that of this Python, or uv, fills it.
            words: list[str | Path] = ["-m", "venv", "--clear", "--without-pip", folder]
            process.run([sys.executable, *words], env=_ALONE)
            _fill(python, lock, wheels)
            (folder / "complete").touch()
    home = place / "home"
    home.mkdir(exist_ok=True)
    return Tools(python=python, home=home, versions=versions)


def _fill(python: Path, lock: Path, wheels: Path | None) -> None:
    options: list[str | Path] = ["--require-hashes", "--only-binary", ":all:", "-r", lock]
    if wheels:
        options += ["--no-index", "--find-links", wheels]
    env: Mapping[str, str | None] = _ALONE
    argv: list[str | Path]
    if importlib.util.find_spec("uv"):
        argv = [pipconfig.find_uv(), "pip", "install", "--quiet", "--python", python]
        env = {**_ALONE, **pipconfig.load().uv_environment()}
    else:
        argv = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    try:
        process.run([*argv, *options], env=env)
    except ToolFailedError as error:
        raise FetchError(
            f"the benchmark's tools cannot be installed: {error.message}",
            next_step="check the network and the settings of pip, or give --tools FOLDER with the "
            "wheels of sm12x/data/bench/requirements.lock (pip download -r)",
        ) from None


def corpus(tools: Tools, given: Path | None, say: Callable[[str], None]) -> tuple[str, str, Path]:
    """Return name, sha256 and place of the text that prompts are made of.

    The place is where llama-benchy looks for a text that it has fetched. Raises BadFileError.
    """
    name, text = _text(tools, given, say)
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    # llama-benchy names a text by this hash of its address; here the address is the text's sha256.
    key = hashlib.md5(f"sha256:{digest}".encode(), usedforsecurity=False).hexdigest()
    path = tools.home / ".cache" / "llama-benchy" / f"{key}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        files.write_text(path, text)
    return name, digest, path


def _text(tools: Tools, given: Path | None, say: Callable[[str], None]) -> tuple[str, str]:
    if given:
        try:
            return given.name, given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadFileError(
                f"{given} cannot be read: {error}", next_step="give --corpus a text in UTF-8"
            ) from None
    book = tools.home / "book.txt"
    if not book.is_file():
        try:
            answer = requests.get(BOOK, timeout=_BOOK_WITHIN)
            answer.raise_for_status()
            begin = max(0, answer.text.find(_BOOK_BEGINS))
            files.write_text(book, answer.text[begin:])
        except (requests.RequestException, OSError, UnicodeError):
            from pydoc_data.topics import topics

            say("the book of llama-benchy cannot be fetched: prompts are of Python's own text")
            return _TOPICS, "\n".join(topics[name] for name in sorted(topics))
    return BOOK_NAME, book.read_text(encoding="utf-8")


def _direct(address: str) -> dict[str, str]:
    """Return variables with which no proxy stands between a tool and the server."""
    host = urlsplit(address).hostname or ""
    return {
        name: ",".join(filter(None, (os.environ.get(name), host)))
        for name in ("no_proxy", "NO_PROXY")
    }


def _environment(tools: Tools, address: str) -> dict[str, str | None]:
    """A home of the tools' own; tokenizers are in the user's cache of Hugging Face."""
    hub = os.environ.get("HF_HOME") or str(files.home() / ".cache" / "huggingface")
    mine = {"HOME": str(tools.home), "HF_HOME": hub, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**_ALONE, **mine, **_direct(address), "NO_COLOR": "1", "COLUMNS": "100"}


def benchy(
    tools: Tools,
    target: Target,
    preset: Preset,
    text_sha256: str,
    out: Path,
    *,
    depth: int,
    concurrency: int,
    seed: int,
) -> Job:
    """Return llama-benchy's run of one cell."""
    result = out / f"benchy-d{depth}-c{concurrency}.json"
    words = [
        *("--base-url", f"{target.address}/v1", "--model", target.shown),
        *("--served-model-name", target.model, "--tokenizer", target.tokenizer),
        *("--book-url", f"sha256:{text_sha256}"),
        *("--pp", str(preset.prompt), "--tg", str(preset.output), "--depth", str(depth)),
        *("--concurrency", str(concurrency), "--runs", str(preset.runs)),
        # Every request has as many tokens as its cell says, and verify's canary judges the text. A
        # latency that is taken off can be longer than a short prefill.
        *("--exact-tg", "--skip-coherence", "--latency-mode", "none"),
        "--enable-prefix-caching" if preset.prefix_caching else "--no-cache",
        *("--format", "json", "--save-result", str(result)),
    ]
    env = _environment(tools, target.address) | {"SM12X_BENCH_SEED": str(seed)}
    if target.key:
        env["SM12X_BENCH_KEY"] = target.key
    return Job(argv=(str(tools.python), "-c", _BENCHY, *words), result=result, env=env)


def tool_calls(tools: Tools, target: Target, out: Path, *, seed: int, gsm8k: int = 0) -> Job:
    """Return tool-eval-bench's run: its 15 core scenarios, or so many questions of GSM8K."""
    name = "gsm8k" if gsm8k else "tools"
    result, reports = out / f"{name}.json", out / f"{name}-reports"
    words = [
        *("--base-url", target.address, "--model", target.model, "--backend", "vllm"),
        *("--seed", str(seed), "--timeout", f"{target.timeout:.0f}", "--no-live", "--redact-url"),
        *("--output-dir", str(reports)),
    ]
    if gsm8k:
        words += ["--gsm8k-only", "--gsm8k-limit", str(gsm8k), "--json"]
    else:
        words += ["--short", "--json-file", str(result)]
    env = _environment(tools, target.address) | {"TOOL_EVAL_API_KEY": target.key or None}
    module = presets.load().tools["tool-eval-bench"]
    argv = (str(tools.python), "-m", module, *words)
    # Data sets are kept below the working folder.
    return Job(argv=argv, result=result, env=env, cwd=tools.home)


def serve(target: Target, preset: Preset, out: Path, image: str, *, seed: int) -> Job | str:
    """Return the run of `vllm bench serve`: this Python's, or that of ``image``; or why none."""
    load = preset.serve
    result = out / "serve.json"
    here = importlib.util.find_spec("vllm") is not None
    inside = Path("/sm12x-bench") if not here else out
    words = [
        *("bench", "serve", "--backend", "vllm", "--base-url", target.address),
        *("--model", target.shown, "--served-model-name", target.model),
        *("--tokenizer", target.tokenizer, "--dataset-name", "random", "--seed", str(seed)),
        *("--random-input-len", str(load.input), "--random-output-len", str(load.output)),
        *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
        *("--num-warmups", str(load.concurrency), "--ignore-eos", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"),
        *("--result-dir", str(inside), "--result-filename", result.name),
    ]
    key = {"OPENAI_API_KEY": target.key or None}
    env: dict[str, str | None] = {**key, **_direct(target.address)}
    if here:
        argv = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words)
        return Job(argv=argv, result=result, env=env)
    engine = process.which("docker") or process.which("podman")
    if not image or engine is None:
        return "vLLM is not installed here, and no --image with a container engine is given"
    tokenizer = Path(target.tokenizer)
    mounts = ["-v", f"{out.resolve()}:{inside}"]
    if tokenizer.is_dir():
        mounts += ["-v", f"{tokenizer.resolve()}:{tokenizer.resolve()}:ro"]
    user = f"{os.getuid()}:{os.getgid()}"
    options = ["run", "--rm", "--network", "host", "--user", user, "-e", "OPENAI_API_KEY"]
    argv = (str(engine), *options, *mounts, "--entrypoint", "vllm", image, *words)
    return Job(argv=argv, result=result, env=env)


def vllm_version() -> str:
    """Return the version of the vLLM in this Python, "" without one."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ""


# What is read of the tools' results; they say more.
class _Values(BaseModel):
    values: list[float]


class _BenchyRun(BaseModel):
    concurrency: Annotated[int, Field(ge=1)]
    context_size: Annotated[int, Field(ge=0)]
    prompt_size: Annotated[int, Field(ge=0)]
    response_size: Annotated[int, Field(ge=0)]
    is_context_prefill_phase: bool = False
    pp_throughput: _Values | None = None
    pp_req_throughput: _Values | None = None
    est_ppt: _Values | None = None
    tg_throughput: _Values | None = None
    tg_req_throughput: _Values | None = None
    peak_throughput: _Values | None = None
    peak_req_throughput: _Values | None = None
    ttfr: _Values | None = None
    e2e_ttft: _Values | None = None


class _Benchy(BaseModel):
    latency_ms: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    benchmarks: Annotated[list[_BenchyRun], Field(min_length=1)]


class _Serve(BaseModel):
    completed: Annotated[float, Field(gt=0)]
    failed: float | None = None
    duration: float | None = None
    request_throughput: float | None = None
    output_throughput: float | None = None
    total_token_throughput: float | None = None
    spec_decode_acceptance_rate: float | None = None
    spec_decode_acceptance_length: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    median_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    median_e2el_ms: float | None = None
    p99_e2el_ms: float | None = None
    spec_decode_per_position_acceptance_rates: list[float] = []


class _ToolCalls(BaseModel):
    error: str = ""
    final_score: Annotated[float, Field(ge=0, le=100)] | None = None
    total_scenarios: float | None = None
    deployability: float | None = None
    responsiveness: float | None = None


class _Gsm8k(BaseModel):
    accuracy: Annotated[float, Field(ge=0, le=100)]
    correct: float | None = None
    total: float | None = None


class _RunSaved(BaseModel):
    """An event in tool-eval-bench's log."""

    run_id: str


_Read = TypeVar("_Read", bound=BaseModel)


def _read(kind: type[_Read], path: Path) -> _Read:
    """Read a tool's result. Raises ToolFailedError."""
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it has more than {_MOST >> 20} MiB")
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, fault['loc'])) or 'the JSON'}: {fault['msg']}"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise ToolFailedError(f"{path.name} is no result of its tool: {why}", next_step=_LOG)


def _metric(raw: _Values | None) -> Metric | None:
    good = tuple(value for value in raw.values if math.isfinite(value)) if raw else ()
    return Metric(values=good) if good else None


def _figures(read: BaseModel) -> dict[str, float]:
    numbers = {name: value for name, value in read if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def cells(path: Path, preset: Preset) -> tuple[Cell, ...]:
    """Read llama-benchy's result. Raises ToolFailedError where it has no usable cell."""
    raw = _read(_Benchy, path)
    result = []
    for one in raw.benchmarks:
        first, asked = _metric(one.e2e_ttft), preset.runs * one.concurrency
        result.append(
            Cell(
                depth=one.context_size,
                prompt=one.prompt_size,
                output=one.response_size,
                concurrency=one.concurrency,
                context_phase=one.is_context_prefill_phase,
                requests=asked,
                failed=max(0, asked - len(first.values if first else ())),
                latency_ms=raw.latency_ms,
                prefill=_metric(one.pp_throughput),
                prefill_each=_metric(one.pp_req_throughput),
                prefill_ms=_metric(one.est_ppt),
                decode=_metric(one.tg_throughput),
                decode_each=_metric(one.tg_req_throughput),
                peak=_metric(one.peak_throughput),
                peak_each=_metric(one.peak_req_throughput),
                first_response_ms=_metric(one.ttfr),
                first_token_ms=first,
            )
        )
    if not any(cell.decode for cell in result):
        raise ToolFailedError(f"{path.name}: no request was answered", next_step=_LOG)
    return tuple(result)


def serve_figures(path: Path) -> dict[str, Any]:
    """Read the result of `vllm bench serve`, as fields of a step. Raises ToolFailedError."""
    raw = _read(_Serve, path)
    rates = raw.spec_decode_per_position_acceptance_rates
    accepted = tuple(rate for rate in rates if math.isfinite(rate))
    return {"figures": _figures(raw), "acceptance_by_position": accepted}


def tool_figures(path: Path) -> dict[str, float]:
    """Read tool-eval-bench's result: a score of 100. Raises ToolFailedError."""
    raw = _read(_ToolCalls, path)
    if raw.final_score is None:
        raise ToolFailedError(f"no score: {raw.error or 'none in its result'}", next_step=_LOG)
    return _figures(raw)


def gsm8k_figures(tools: Tools, log: Path, result: Path) -> dict[str, float]:
    """Write the scores of a run of GSM8K to ``result``, and return them.

    tool-eval-bench writes no result file for it: its log names the run, which its database has.
    Raises ToolFailedError.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        event = next(line for line in reversed(lines) if '"run_id"' in line)
        run = _RunSaved.model_validate_json(event[event.index("{") :]).run_id
        database = tools.home / "data" / "benchmarks.sqlite"
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            query = "SELECT scores_json FROM scenario_runs WHERE run_id = ?"
            scores = connection.execute(query, (run,)).fetchone()[0]
        files.write_text(result, scores)
    except (OSError, ValueError, StopIteration, TypeError, sqlite3.Error) as error:
        raise ToolFailedError(
            f"no result of GSM8K ({reason(log) or error})",
            next_step="read tools/gsm8k.log; its questions are fetched from huggingface.co once",
        ) from None
    return _figures(_read(_Gsm8k, result))


def reason(log: Path) -> str:
    """Return the last line of a log, "" without one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
