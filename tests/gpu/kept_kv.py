"""KV that is kept over a sleep, on real servers: python -m tests.gpu.kept_kv RUN --out REPORT

RUN is one of

    conversation  seconds to the first token of a conversation: cold, cached, after a swap that
                  keeps the KV cache and after one that drops it; the next token of a frozen
                  stream; sleeps and wake-ups with much KV, and with nothing cached
    kinds         a model of one kind: texts and log probabilities after swaps that keep, streams
                  that are frozen in the middle, a wake-up that is refused
    swap          two servers whose weights stay, and whose KV caches take turns
    soak          two servers that take turns many times, each with a stream in the middle

Everything is on the first visible GPU. Printed and written as JSON: steps with their seconds and
the memory in use, `figures`, and `wrong`, which is empty where nothing is wrong. Exit code 1 where
something is wrong, 2 where a server did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import checkpoint, serve

from sm12x.core import process

GIB = 1 << 30
# The options of a server that keeps; the command of tests.gpu.serve has no prefix cache.
KEEP = ("--sleep-mode-backend", "keep", "--enable-prefix-caching", "--sleep-keep-kv")
# Of the tokenizer of the recipe `smoke` any of these is a token.
TOKENS = range(5, 250)
CONVERSATION = 40_000
REPEATS = 3
# Tokens of a stream that a sleep is to meet: some seconds.
FROZEN = 2000
# Seconds a swap may take of a server that does not answer any more.
STREAM_LIMIT = 120.0
# MiB that a hundred swaps may add, of the GPU and of the host.
GROWTH = 64
COPY = """
import json, sys, time, torch
size = int(sys.argv[1])
host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
there = torch.empty(size, dtype=torch.uint8, device="cuda")
seconds = []
for target, source in ((host, there), (there, host)):
    best = 1e9
    for _ in range(3):
        torch.cuda.synchronize(); began = time.perf_counter()
        target.copy_(source, non_blocking=True); torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    seconds.append(best)
print(json.dumps(seconds))
"""


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(TOKENS, k=length)  # noqa: S311


@dataclass
class Stream:
    """A greedy completion whose tokens are read as they come.

    ``times`` has the moment of each token; ``text`` and ``logprobs`` are complete once it is over.
    """

    port: int
    prompt: Sequence[int]
    tokens: int
    model: str = "model"
    times: list[float] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began if self.times else STREAM_LIMIT

    def until(self, count: int) -> None:
        """Wait until so many tokens have come, or it is over."""
        end = time.monotonic() + STREAM_LIMIT
        while len(self.times) < count and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.0005)

    def finish(self) -> Stream:
        self._thread.join(STREAM_LIMIT)
        if self._thread.is_alive():
            self.error = f"no end after {STREAM_LIMIT:g} s"
        return self

    def _read(self) -> None:
        body = {
            "model": self.model,
            "prompt": [*self.prompt],
            "temperature": 0,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
        }
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STREAM_LIMIT)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f"HTTP {answer.status}: {answer.read()[:300].decode()}"
                return
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    self.error = f"{event}"[:300]
                    return
                for choice in event["choices"]:
                    self.text += choice["text"]
                    probabilities = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    self.logprobs += probabilities
                    self.times += [time.monotonic()] * max(1, len(probabilities))
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"


class Server:
    """One server, with its port and its process."""

    def __init__(self, words: Sequence[str], port: int, log: Path) -> None:
        self.words, self.port, self.log = words, port, log
        self.process: process.Background | None = None

    def start(self) -> float | None:
        """The seconds until it answers, None where it does not."""
        self.process = serve.start(self.words, self.log)
        return serve.healthy(self.process, lambda: self.call("GET", "/health")[0] == 200)

    def call(self, method: str, path: str) -> tuple[int, str, float]:
        with at(self.port):
            return serve.call(method, path)

    def stream(self, words: Sequence[int], tokens: int, model: str = "model") -> Stream:
        return Stream(self.port, words, tokens, model)

    def ask(self, words: Sequence[int], tokens: int, model: str = "model") -> Stream:
        return self.stream(words, tokens, model).finish()

    def stop(self) -> None:
        if self.process:
            self.process.stop()
            self.process = None

    def host_mib(self) -> int:
        """MiB of host memory of all its processes; what they share is counted for each."""
        return sum(_resident(pid) for pid in _family(f"--port\0{self.port}\0"))


@contextlib.contextmanager
def at(port: int) -> Iterator[None]:
    """Let the calls of tests.gpu.serve go to this port."""
    before, serve.ADDRESS = serve.ADDRESS, f"http://127.0.0.1:{port}"
    try:
        yield
    finally:
        serve.ADDRESS = before


def _family(words: str) -> list[int]:
    """The process that was started with these words, and all that descend from it."""
    parents: dict[int, int] = {}
    family: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid = int(stat.parent.name)
            parents[pid] = int(stat.read_text().rpartition(")")[2].split()[1])
            if words in stat.with_name("cmdline").read_text():
                family.append(pid)
    for pid in family:
        family += [c for c, parent in parents.items() if parent == pid and c not in family]
    return family


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) // 1024
    return 0


class Report(serve.Steps):
    """Steps, and figures that the issue's table asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, Any] = {}

    def figure(self, name: str, value: Any) -> None:
        self.figures[name] = round(value, 4) if isinstance(value, float) else value
        print(json.dumps({"figure": name, "value": self.figures[name]}), flush=True)

    def sleep(self, server: Server, name: str, query: str = "", **more: Any) -> float:
        status, text, seconds = server.call("POST", f"/sleep?level=1{query}")
        self.add(f"{name} asleep", seconds, status=status, kv=kv_of(text), **more)
        self.expect(status == 200, f"{name}: /sleep answers {status}: {text[:300]}")
        return seconds

    def wake(self, server: Server, name: str) -> float:
        status, text, seconds = server.call("POST", "/wake_up")
        self.add(f"{name} awake", seconds, status=status, kv=kv_of(text))
        self.expect(status == 200, f"{name}: /wake_up answers {status}: {text[:300]}")
        return seconds

    def over(self, stream: Stream, name: str) -> Stream:
        self.expect(not stream.error, f"{name}: {stream.error}")
        return stream


def kv_of(text: str) -> Any:
    """What an answer says of the KV cache of the first rank."""
    with contextlib.suppress(ValueError):
        ranks = json.loads(text).get("ranks") or [{}]
        return ranks[0].get("kv")
    return None


def copies(size: int) -> tuple[float, float]:
    """Seconds of one copy of so many bytes to the host and of one back."""
    words = [sys.executable, "-c", COPY, f"{size}"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    there, back = json.loads(done.stdout)
    return there, back


# -- conversation -------------------------------------------------------------------------------


def conversation(report: Report, server: Server, many_gib: float) -> None:
    warm = server.ask(prompt(1, 3000), 16)
    report.over(warm, "the first answer")

    def reset() -> None:
        server.call("POST", "/reset_prefix_cache")

    # A first sleep prepares what later ones have.
    report.sleep(server, "first")
    report.wake(server, "first")
    words = prompt(2, CONVERSATION)
    found: dict[str, list[float]] = {"cold": [], "cached": [], "kept": [], "dropped": []}
    for _ in range(REPEATS):
        reset()
        cold = report.over(server.ask(words, 8), "cold")
        cached = report.over(server.ask(words, 8), "cached")
        again = report.over(server.ask(words, 8), "cached")
        found["cold"].append(cold.first)
        found["cached"] += [cached.first, again.first]
        report.sleep(server, "conversation kept")
        report.wake(server, "conversation kept")
        kept = report.over(server.ask(words, 8), "kept")
        found["kept"].append(kept.first)
        report.expect(kept.text == again.text, "another text after a swap that keeps")
        report.sleep(server, "conversation dropped", "&keep_kv=false")
        report.wake(server, "conversation dropped")
        found["dropped"].append(report.over(server.ask(words, 8), "dropped").first)
    for name, seconds in found.items():
        report.figure(f"first token {name} s", statistics.median(seconds))
    report.expect(
        statistics.median(found["kept"]) < 0.5 * statistics.median(found["cold"]),
        f"a kept conversation takes {found['kept']} s, a cold one {found['cold']}",
    )
    frozen(report, server, words)
    much(report, server, many_gib)
    nothing(report, server, reset)


def frozen(report: Report, server: Server, words: Sequence[int]) -> None:
    """The next token of a stream that a sleep froze."""
    server.ask(words, 1)
    undisturbed = report.over(server.ask(words, FROZEN), "undisturbed")
    if len(undisturbed.times) > 1:
        rate = (undisturbed.times[-1] - undisturbed.times[0]) / (len(undisturbed.times) - 1)
        report.figure("a token of the stream s", rate)
    for query, name in (("", "kept"), ("&keep_kv=false", "dropped")):
        seconds = []
        for _ in range(REPEATS):
            stream = server.stream(words, FROZEN)
            stream.until(24)
            before = len(stream.times)
            report.sleep(server, f"stream {name}", f"&mode=keep{query}")
            stopped = len(stream.times)
            report.wake(server, f"stream {name}")
            answered = time.monotonic()
            stream.until(stopped + 1)
            report.over(stream.finish(), f"stream {name}")
            # The next token may be there before the answer of /wake_up is read.
            later = [moment - answered for moment in stream.times[stopped:]]
            report.add(f"stream {name} over", 0, before=before, stopped=stopped, later=len(later))
            report.expect(bool(later), f"the stream was over before its sleep, {name}")
            seconds += [max(0.0, moment) for moment in later[:1]]
            if name == "kept":
                report.expect(stream.text == undisturbed.text, "a frozen stream has another text")
        if seconds:
            report.figure(f"frozen stream {name}: next token s", statistics.median(seconds))


def much(report: Report, server: Server, gib: float) -> None:
    """A sleep and a wake-up with so much KV, beside the bare copies and a sleep without."""
    server.call("POST", "/reset_prefix_cache")
    size = 0.0
    seed = 100
    while size < gib * GIB and seed < 140:
        report.over(server.ask(prompt(seed, CONVERSATION), 1), "filling")
        seed += 1
        # What one conversation has, as the last sleep said.
        size = (seed - 100) * kept_bytes(report)
    sleeps, wakes, plain = [], [], []
    for _ in range(REPEATS):
        sleeps.append(report.sleep(server, "much KV"))
        wakes.append(report.wake(server, "much KV"))
    state = report.steps[-1]["kv"] or {}
    report.figure("much KV: bytes", state.get("kept_bytes", 0))
    for _ in range(REPEATS):
        first = report.sleep(server, "much KV dropped", "&keep_kv=false")
        plain.append((first, report.wake(server, "much KV dropped")))
    report.figure("much KV: sleep s", min(sleeps))
    report.figure("much KV: wake-up s", min(wakes))
    report.figure("without: sleep s", min(first for first, _ in plain))
    report.figure("without: wake-up s", min(second for _, second in plain))


def kept_bytes(report: Report) -> int:
    """Bytes of KV of one conversation, from the steps so far."""
    sizes = [(step.get("kv") or {}).get("kept_bytes", 0) for step in report.steps]
    return max(sizes, default=0) or GIB


def nothing(report: Report, server: Server, reset: Callable[[], None]) -> None:
    for query, name in (("", "keeping"), ("&keep_kv=false", "not keeping")):
        pairs = []
        for _ in range(2 * REPEATS):
            reset()
            asleep = report.sleep(server, f"nothing cached, {name}", query)
            pairs.append((asleep, report.wake(server, f"nothing cached, {name}")))
        report.figure(f"nothing cached, {name}: sleep s", statistics.median(a for a, _ in pairs))
        report.figure(f"nothing cached, {name}: wake-up s", statistics.median(b for _, b in pairs))


# -- kinds --------------------------------------------------------------------------------------


def kinds(report: Report, server: Server, longest: int, models: Sequence[str], loud: float) -> None:
    prompts = [prompt(seed, length) for seed, length in ((1, 40), (2, 700), (3, longest))]
    cases = [(model, words) for model in models for words in prompts]

    def ask() -> list[Stream]:
        return [report.over(server.ask(words, 48, model), "an answer") for model, words in cases]

    for _ in range(2):
        ask()
    # What is cached takes other tiles than what is not: these two are both cached.
    first, again = ask(), ask()
    steady = [a.text == b.text for a, b in zip(first, again, strict=True)]
    noise = [_distance(a, b) for a, b in zip(first, again, strict=True)]
    report.add("undisturbed", 0, steady=steady, noise=noise)
    report.expect(any(steady), "no text is the same twice without a sleep")
    report.expect(len({one.text for one in first}) > 1, "one text for all prompts")

    def same(now: Sequence[Stream], when: str) -> None:
        for number, stream in enumerate(now):
            distance = _distance(first[number], stream)
            if steady[number]:
                report.expect(stream.text == first[number].text, f"{when}: text {number} differs")
            most = loud + 2 * noise[number]
            report.expect(distance <= most, f"{when}: {number} is {distance:.4f} away")

    for cycle in range(2):
        for query in ("", "&tags=kv_cache"):
            report.sleep(server, f"cycle {cycle}{query}", query)
            report.wake(server, f"cycle {cycle}{query}")
            kept = (report.steps[-1]["kv"] or {}).get("restored_tokens", 0)
            report.expect(kept > 0, f"cycle {cycle}{query}: nothing was restored")
            same(ask(), f"cycle {cycle}{query}")
    # A stream for each prompt, frozen twice.
    streams = []
    for model, words in cases:
        stream = server.stream(words, 48, model)
        for count in (6, 24):
            stream.until(count)
            report.sleep(server, f"frozen at {len(stream.times)}", "&mode=keep")
            report.wake(server, "frozen")
        streams.append(report.over(stream.finish(), "a frozen stream"))
    same(streams, "frozen")
    refused(report, server)
    same(ask(), "after a refused wake-up")
    # What was dropped is computed again.
    report.sleep(server, "dropped", "&keep_kv=false")
    report.wake(server, "dropped")
    ask()
    same(ask(), "after a sleep that drops")


def _distance(one: Stream, other: Stream) -> float:
    """How far log probabilities of the common beginning of two texts are from each other."""
    pairs = zip(one.logprobs, other.logprobs, strict=False)
    same = len(one.text) == len(other.text) and one.text == other.text
    return max((abs(a - b) for a, b in pairs), default=0.0) if same else 0.0


def refused(report: Report, server: Server) -> None:
    """A wake-up that another process is in the way of, and the same one later."""
    report.sleep(server, "before a tenant")
    words = [sys.executable, "-c", serve.TENANT, f"{1024 * serve.MIB}"]
    tenant = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tenant.stdout is not None
    tenant.stdout.readline()
    status, text, seconds = server.call("POST", "/wake_up")
    report.add("wake-up refused", seconds, status=status, error=text[:300])
    report.expect(status == 500, f"a wake-up without memory answers {status}")
    tenant.communicate("")
    report.wake(server, "after the tenant")
    kept = (report.steps[-1]["kv"] or {}).get("restored_tokens", 0)
    report.expect(kept > 0, "nothing was restored after a refused wake-up")


# -- two servers --------------------------------------------------------------------------------


def swap(report: Report, servers: Sequence[Server]) -> None:
    """KV caches of two servers take turns while both have their weights."""
    awake, asleep = servers
    for server in servers:
        name = f"{server.port}"
        seconds = server.start()
        if seconds is None:
            raise SystemExit(2)
        report.add(f"{name} started", seconds)
        report.over(server.ask(prompt(server.port, 2000), 8), name)
        if server is awake:
            report.sleep(server, name, "&tags=kv_cache")
    awake, asleep = asleep, awake
    for query, name in (("&keep_kv=false", "dropping"), ("", "keeping"), ("", "keeping 40k")):
        sleeps, wakes = [], []
        if name == "keeping 40k":
            report.over(awake.ask(prompt(9, CONVERSATION), 1), name)
        for _ in range(10):
            sleeps.append(report.sleep(awake, name, f"&tags=kv_cache{query}"))
            wakes.append(report.wake(asleep, name))
            awake, asleep = asleep, awake
        report.figure(f"{name}: sleep s", statistics.median(sleeps))
        report.figure(f"{name}: wake-up s", statistics.median(wakes))
        pairs = [a + b for a, b in zip(sleeps, wakes, strict=True)]
        report.figure(f"{name}: swap s", statistics.median(pairs))


def soak(report: Report, servers: Sequence[Server], swaps: int) -> None:
    """Each swap freezes a stream of one server and lets that of the other go on."""
    prompts = {
        server.port: [prompt(100 * number + n, 400 * n + 300) for n in range(4)]
        for number, server in enumerate(servers)
    }
    texts: dict[tuple[int, int], str] = {}
    for server in servers:
        seconds = server.start()
        if seconds is None:
            raise SystemExit(2)
        report.add(f"{server.port} started", seconds)
        for number, words in enumerate(prompts[server.port]):
            server.ask(words, 1)
            one, other = server.ask(words, 64), server.ask(words, 64)
            report.over(one, "a text")
            if one.text == other.text:
                texts[server.port, number] = one.text
        if server is servers[0]:
            report.sleep(server, f"{server.port}")
    report.expect(len(texts) > 4, f"{len(texts)} of 8 texts are the same twice without a sleep")
    asleep, awake = servers
    running: dict[int, tuple[int, Stream]] = {}
    checked = swaps_so_far = 0
    memory: list[tuple[int, int]] = []
    began = time.monotonic()
    for number in range(swaps):
        if awake.port in running:
            which, stream = running.pop(awake.port)
            report.over(stream.finish(), f"swap {number}")
            right = texts.get((awake.port, which))
            report.expect(right in (None, stream.text), f"swap {number}: text {which} differs")
            checked += right is not None
        which = number // 2 % 4
        stream = awake.stream(prompts[awake.port][which], 64)
        stream.until(8 + number % 40)
        running[awake.port] = which, stream
        status, text, _ = awake.call("POST", "/sleep?level=1&mode=keep")
        report.expect(status == 200, f"swap {number}: /sleep answers {status} {text[:200]}")
        kv = kv_of(text) or {}
        report.expect(kv.get("kept_tokens", 0) > 0, f"swap {number} keeps nothing: {kv}")
        status, text, _ = asleep.call("POST", "/wake_up")
        report.expect(status == 200, f"swap {number}: /wake_up answers {status} {text[:200]}")
        awake, asleep = asleep, awake
        swaps_so_far += 1
        if number in (swaps // 5 // 2 * 2, (swaps - 1) // 2 * 2):
            memory.append((serve.used(), sum(server.host_mib() for server in servers)))
        if len(report.wrong) > 20:
            break
    report.add("soaked", time.monotonic() - began, swaps=swaps_so_far, texts=checked)
    report.figure("swaps", swaps_so_far)
    report.figure("texts compared", checked)
    if len(memory) == 2:
        names = ("GPU MiB", "host MiB")
        for name, early, late in zip(names, *memory, strict=True):
            report.figure(f"growth of {name}", late - early)
            report.expect(late - early <= GROWTH, f"{name}: {early} grew to {late}")


# -- the command --------------------------------------------------------------------------------


def layers_of(run: str, model: str) -> int:
    if run in ("conversation", "swap"):
        return 14
    return {"qwen3-moe": 4, "hybrid": 8}.get(model, 8)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=("conversation", "kinds", "swap", "soak"))
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--model", choices=serve.MODELS, default="qwen3-moe")
    parser.add_argument("--layers", type=int, help="default: what the run needs")
    parser.add_argument("--lora", action="store_true", help="kinds: with an adapter too")
    parser.add_argument("--longest", type=int, default=1800, help="kinds: of a prompt, in tokens")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="conversation: much KV")
    parser.add_argument("--swaps", type=int, default=100, help="soak (default: 100)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    model = serve.MODELS[options.model]
    dummy = options.run in ("conversation", "swap")
    layers = options.layers or layers_of(options.run, options.model)
    flags = [*KEEP]
    if dummy:
        flags += ["--load-format", "dummy", "--max-model-len", f"{CONVERSATION + 4096}"]
    if options.run == "swap":
        flags += ["--kv-cache-memory-bytes", f"{30 * GIB}"]
    utilization = {"conversation": "0.5", "swap": "0.4", "soak": "0.3"}.get(options.run, "0.4")
    report = Report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        names = ["model"]
        if options.run == "conversation":
            there, back = copies(int(options.kv_gib * GIB))
            report.figure("bare copy to the host s", there)
            report.figure("bare copy to the GPU s", back)
        servers = []
        for number in range(2 if options.run in ("swap", "soak") else 1):
            folder = Path(scratch) / f"{number}"
            fewer = 2 * number if options.run == "soak" else 0
            model.make(folder, layers - fewer, dummy=dummy)
            if dummy:
                # The tables of positions are made as long as the configuration says.
                path = folder / "config.json"
                config = json.loads(path.read_text())
                longer = {"max_position_embeddings": CONVERSATION + 4096}
                path.write_text(json.dumps({**config, **longer}, indent=1))
            more = [*flags]
            if options.lora:
                adapter = Path(scratch) / "adapter"
                checkpoint.make_adapter(folder, adapter)
                more += ["--enable-lora", "--max-lora-rank", f"{checkpoint.RANK}"]
                more += ["--lora-modules", f"adapter={adapter}"]
                names.append("adapter")
            port = serve.PORT + 50 * number
            words = serve.command(
                folder,
                model,
                port=port,
                utilization=utilization,
                graphs=True,
                flags=[*more, *options.serve],
            )
            servers.append(Server(words, port, options.out.with_suffix(f".{number}.log")))
        try:
            if options.run == "swap":
                swap(report, servers)
            elif options.run == "soak":
                soak(report, servers, options.swaps)
            else:
                seconds = servers[0].start()
                if seconds is None:
                    return 2
                report.add("healthy", seconds)
                if options.run == "conversation":
                    conversation(report, servers[0], options.kv_gib)
                else:
                    loud = serve.EXACT if model.steady else serve.LOUD
                    kinds(report, servers[0], options.longest, names, loud)
            log = servers[0].log.read_text(errors="replace")
            kept = re.findall(r"(?:Keeping|Restored|Dropped) the [^\n]*", log)
            report.figure("log lines", kept[-4:])
            report.finished = True
        finally:
            for server in servers:
                server.stop()
            result = {"finished": report.finished, "wrong": report.wrong}
            result |= {"figures": report.figures, "steps": report.steps}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"wrong": report.wrong, "figures": report.figures}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
