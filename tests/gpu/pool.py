"""Two servers behind the pool, on the visible GPUs: python -m tests.gpu.pool --out REPORT

`sm12x.pool` starts servers of two random models, one with fewer layers, and clients ask for both by
the one address. In turn: swaps by request at level 1, and with the KV cache alone after a reload;
clients that stream from both at once; a stream that is frozen while the other model serves, and has
to go on (`--sleep-keep-kv`); memory that another process has taken, which must be named;
a server that is killed asleep and one that is killed awake (SIGKILL), which must come back while
the other serves. Texts have to be as they were before the first sleep.

REPORT has for each rung what the requests waited beside what `/sleep` and `/wake_up` took, which is
what `sm12x verify` measures, and the steps of the swaps; `wrong` says what was not so.

Exit code 1 where something is wrong, 2 where the pool did not start.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.gpu import serve

from sm12x.core import process, yamltext

KEYS = {"VLLM_API_KEY": "a-user's", "SM12X_POOL_ADMIN_KEY": "the-admin's"}
NAMES = ("large", "small")
# The second model has so many layers fewer.
FEWER = 2
PROMPTS = ("The capital of France is", "1 2 3 4 5 6")
# Bytes that the foreign process leaves.
LEFT = 4 << 30
# Tokens of a stream that is frozen.
STREAM = 400


class Client:
    """The pool by its address, with a user's key; ``steer`` takes that of administration."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=serve.CALL_LIMIT, trust_env=False
        )

    def call(self, path: str, body: Any = None, *, admin: bool = False) -> httpx.Response:
        key = KEYS["SM12X_POOL_ADMIN_KEY" if admin else "VLLM_API_KEY"]
        headers = {"Authorization": f"Bearer {key}"}
        method = "GET" if body is None else "POST"
        return self._http.request(method, path, json=body or None, headers=headers)

    def ask(self, name: str, **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, **more}
        return self.call("/v1/completions", body)

    def text(self, name: str) -> list[str]:
        """The greedy texts of a model, or the statuses of answers without one."""
        answers = [self.ask(name, prompt=prompt, max_tokens=16) for prompt in PROMPTS]
        return [
            one.json()["choices"][0]["text"]
            if one.status_code == 200
            else f"HTTP {one.status_code}"
            for one in answers
        ]

    def pool(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("/pool").json()
        return answer

    def states(self) -> dict[str, str]:
        return {one["model"]: one["state"] for one in self.pool()["models"]}

    def ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


class Report:
    """Facts by step, and what is wrong."""

    def __init__(self, out: Path) -> None:
        self.out, self.facts, self.wrong = out, dict[str, Any](), list[str]()
        self.finished = False

    def expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.wrong.append(otherwise)
            print(f"wrong: {otherwise}", flush=True)

    def add(self, step: str, facts: Any) -> None:
        self.facts[step] = facts
        print(json.dumps({step: facts}), flush=True)
        self.write()

    def write(self) -> None:
        text = json.dumps({"finished": self.finished, "wrong": self.wrong, **self.facts}, indent=1)
        self.out.write_text(text + "\n")


def until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def settings(scratch: Path, words: dict[str, list[str]], rung: str, running: str = "drain") -> str:
    """The configuration of a pool whose models change places as soon as they are asked for."""
    environment = {**serve.ENVIRONMENT}
    del environment["VLLM_SERVER_DEV_MODE"]
    content = {
        "port": serve.PORT,
        "engine_port": serve.PORT + 1000,
        "run_folder": str(scratch / "run"),
        "models": {
            name: {"command": words[name], "env": environment, "sleep": rung, "running": running}
            for name in NAMES
        },
        "policy": {
            "residency_swaps": 0,
            "least_residency_seconds": 0.01,
            "burst_swaps": 100,
        },
        "limits": {"load_seconds": serve.START_LIMIT, "hold_seconds": serve.CALL_LIMIT},
        "canary": {"random_weights": True},
    }
    return yamltext.dump(content)


def swaps(
    report: Report, client: Client, texts: dict[str, list[str]], rung: str, count: int
) -> None:
    """Swaps by request, alone: what a request waits beside the calls that it waits for."""
    holds, calls, canaries, rows = [], [], [], []
    for number in range(count):
        name = NAMES[number % 2]
        answer = client.ask(name)
        report.expect(answer.status_code == 200, f"{rung}: {name} answers {answer.text[:200]}")
        swap = client.pool()["swaps"][-1]
        report.expect(swap["to"] == name and swap["rung"] == rung, f"{rung}: no swap to {name}")
        if answer.status_code != 200 or swap["to"] != name:
            continue
        seconds = swap["seconds"]
        rows.append({"hold": int(answer.headers["X-Pool-Wait-Ms"]) / 1000, **seconds})
        # The first sleep of each takes host memory.
        if number >= 2:
            holds.append(rows[-1]["hold"])
            calls.append(seconds["sleep"] + seconds["wake"])
            canaries.append(seconds["canary"])
    for name in NAMES:
        report.expect(client.text(name) == texts[name], f"{rung}: {name} answers differently")
    medians = [statistics.median(one) for one in (holds, calls, canaries)] if holds else [0.0] * 3
    hold, call, canary = medians
    facts = {
        "swaps": rows,
        "median_hold_seconds": hold,
        "median_sleep_and_wake_seconds": call,
        "median_canary_seconds": canary,
        "hold_by_calls": hold / call if call else None,
        "hold_without_canary_by_calls": (hold - canary) / call if call else None,
        "freed_bytes": client.pool()["swaps"][-1]["freed_bytes"],
    }
    report.add(rung, facts)


def traffic(report: Report, client: Client, texts: dict[str, list[str]], seconds: float) -> None:
    """Clients that ask for both models at once, half of them with streams."""
    end = time.monotonic() + seconds
    statuses: dict[str, int] = {}
    waits: list[float] = []
    whole = {
        name: [one["choices"][0]["text"] for one in events(client, name, 24)] for name in NAMES
    }

    def one(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 - whom to ask
        while time.monotonic() < end:
            name = chance.choice(NAMES)
            if number % 2:
                pieces = [one["choices"][0]["text"] for one in events(client, name, 24)]
                good = len("".join(pieces)) == len("".join(whole[name]))
                statuses["stream"] = statuses.get("stream", 0) + 1
                # Of other requests in the same batch the text may differ, its length not.
                report.expect(good or bool(pieces), f"a stream of {name} has no tokens")
            else:
                answer = client.ask(name)
                code = str(answer.status_code)
                statuses[code] = statuses.get(code, 0) + 1
                waits.append(int(answer.headers.get("X-Pool-Wait-Ms", "0")) / 1000)
                report.expect(answer.status_code == 200, f"{name}: {answer.text[:200]}")

    before = len(client.pool()["swaps"])
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(one, number) for number in range(8)]:
            done.result()
    swaps = [swap["result"] for swap in client.pool()["swaps"]][before:]
    report.expect(set(statuses) <= {"200", "stream"}, f"answers beside 200: {statuses}")
    report.add(
        "traffic",
        {"answers": statuses, "longest_wait": max(waits, default=0.0), "swaps": swaps},
    )
    for name in NAMES:
        report.expect(client.text(name) == texts[name], f"{name} answers differently after traffic")


def frozen(report: Report, client: Client) -> None:
    """A stream of one model stops while the other serves, and goes on with the same tokens."""
    whole = events(client, "large", STREAM)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        began = time.monotonic()
        stream = threads.submit(events, client, "large", STREAM)
        time.sleep(0.3)
        answer = client.ask("small")
        between = not stream.done()
        pieces = stream.result()
    text, same = ("".join(one["choices"][0]["text"] for one in some) for some in (pieces, whole))
    report.expect(answer.status_code == 200, f"beside a stream: {answer.text[:200]}")
    report.expect(between, "the stream had ended before the other model was asked")
    report.expect(len(pieces) == len(whole) > 0, f"{len(pieces)} of {len(whole)} pieces came")
    report.expect(text == same, "the frozen stream went on with other text")
    wait = int(answer.headers.get("X-Pool-Wait-Ms", "0")) / 1000
    report.add("frozen", {"wait": wait, "stream_seconds": time.monotonic() - began})


def events(client: Client, name: str, tokens: int) -> list[dict[str, Any]]:
    answer = client.ask(name, stream=True, max_tokens=tokens, ignore_eos=True)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return []
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def tenant() -> Iterator[subprocess.Popen[str]]:
    """A process that takes all of the GPU's free memory but LEFT."""
    words = [sys.executable, "-c", serve.TENANT, str(LEFT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        yield taker
        taker.kill()


def foreign(report: Report, client: Client, texts: dict[str, list[str]]) -> None:
    """Memory that a process has taken while both sleep: refused, and named."""
    awake = next(name for name, state in client.states().items() if state == "awake")
    other = next(name for name in NAMES if name != awake)
    client.call(f"/pool/models/{awake}/sleep", {}, admin=True)
    report.expect("awake" not in client.states().values(), "both were to sleep")
    with tenant() as taker:
        answer = client.ask(other)
        message = answer.json()["error"]["message"] if answer.status_code == 503 else ""
        facts = {"status": answer.status_code, "message": message, "pid": taker.pid}
        report.expect(answer.status_code == 503, f"foreign memory: {answer.text[:200]}")
        # In a container the driver lists no processes.
        facts["named"] = f"process {taker.pid}" in message
        facts["states"] = client.states()
    report.add("foreign", facts)
    report.expect(
        until(lambda: client.text(other) == texts[other], 90), f"{other} does not serve after that"
    )


def kill(report: Report, client: Client, texts: dict[str, list[str]], scratch: Path) -> None:
    """kill -9 of the server that sleeps, then of the one that is awake."""
    for asleep in (True, False):
        states = client.states()
        wanted = "asleep" if asleep else "awake"
        victim = next(name for name, state in states.items() if state == wanted)
        other = next(name for name in NAMES if name != victim)
        pid = next(
            json.loads(path.read_text())["pid"]
            for path in (scratch / "run").glob(f"{victim}-*.json")
        )
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        seen = until(lambda name=victim: client.states()[name] in ("stopped", "starting"), 20)  # type: ignore[misc]
        report.expect(seen, f"{victim}: its end was not seen")
        noticed = time.monotonic() - killed
        same = client.text(other) == texts[other]
        report.expect(same, f"{other} answers differently with {victim} killed {wanted}")
        served = time.monotonic() - killed
        # It is asked for, so it is started; the other sleeps meanwhile.
        answer = client.ask(victim)
        report.expect(
            answer.status_code == 200, f"{victim} does not come back: {answer.text[:200]}"
        )
        report.expect(client.text(victim) == texts[victim], f"{victim} answers differently, again")
        facts = {
            "noticed_seconds": noticed,
            "other_served_seconds": served,
            "back_seconds": time.monotonic() - killed,
        }
        report.add(f"killed {wanted}", facts)


def run(report: Report, scratch: Path, words: dict[str, list[str]], options: Any) -> int:
    """Start the pool and take the steps; the exit code."""
    path = scratch / "pool.yaml"
    path.write_text(settings(scratch, words, "level_1"))
    began = time.monotonic()
    pool = process.Background(
        [sys.executable, "-m", "sm12x.pool", "--config", str(path)],
        log=options.out.with_suffix(".log"),
        env={**os.environ, **KEYS, "SM12X_IMAGE_CACHE": str(scratch / "cache")},
    )
    client = Client(serve.PORT)
    try:
        ready = until(lambda: pool.poll() is not None or client.ready(), 2 * serve.START_LIMIT)
        if not ready or pool.poll() is not None:
            print(pool.log.read_text()[-4000:])
            return 2
        report.add("start", {"seconds": time.monotonic() - began, "states": client.states()})
        # Before its first sleep the small one was asked by the pool alone.
        texts = {name: client.text(name) for name in NAMES}
        report.expect(texts["large"] != texts["small"] or options.dummy, "both answer alike")
        swaps(report, client, texts, "level_1", options.swaps)
        if not options.no_foreign:
            foreign(report, client, texts)
        path.write_text(settings(scratch, words, "level_1", "freeze"))
        again = client.call("/pool/reload", {}, admin=True)
        report.expect(again.json().get("kept") == [*NAMES], f"reload: {again.text[:200]}")
        frozen(report, client)
        path.write_text(settings(scratch, words, "kv_cache"))
        again = client.call("/pool/reload", {}, admin=True)
        report.expect(again.json().get("kept") == [*NAMES], f"reload: {again.text[:200]}")
        # The one that sleeps has its weights in host memory until its next turn.
        for name in (*NAMES, *NAMES):
            client.ask(name)
        swaps(report, client, texts, "kv_cache", options.swaps)
        traffic(report, client, texts, options.seconds)
        kill(report, client, texts, scratch)
        report.finished = True
    finally:
        pool.terminate()
        pool.wait(40)
        pool.stop()
    return 1 if report.wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--model", choices=serve.MODELS, default="qwen3-moe")
    parser.add_argument("--layers", type=int, default=14, help="of the large one (default: 14)")
    parser.add_argument("--swaps", type=int, default=12, help="of each rung")
    parser.add_argument("--seconds", type=float, default=10, help="of traffic")
    parser.add_argument("--dummy", action="store_true", help="weights of --load-format dummy")
    parser.add_argument("--no-foreign", action="store_true", help="take no memory of the GPU")
    parser.add_argument("--utilization", default="0.5", help="of the GPUs' memory (default: 0.5)")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, without torch.compile")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args(argv)
    model = serve.MODELS[options.model]
    flags = ["--enable-sleep-routes", "--sleep-keep-kv", *options.serve]
    flags += ["--load-format", "dummy"] if options.dummy else []
    report = Report(options.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        words = {}
        for number, name in enumerate(NAMES):
            place = Path(folder) / f"{number}"
            model.make(place, options.layers - FEWER * number, dummy=options.dummy)
            words[name] = serve.command(
                place,
                model,
                port=serve.PORT,
                utilization=options.utilization,
                graphs=options.graphs,
                flags=[*flags, "--served-model-name", name],
            )
        try:
            code = run(report, Path(folder), words, options)
        except (httpx.HTTPError, StopIteration, KeyError) as error:
            report.expect(False, f"{error!r}")
            code = 1
        finally:
            report.write()
    print(json.dumps({"wrong": report.wrong}))
    return code


if __name__ == "__main__":
    sys.exit(main())
