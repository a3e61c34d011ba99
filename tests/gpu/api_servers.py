"""Several API servers of one engine through sleep and wake: python -m tests.gpu.api_servers --help

    python -m tests.gpu.api_servers --out REPORT --serve --sleep-mode-backend keep

`vllm serve --api-server-count` serves the model of the recipe `smoke` on the first visible GPU. Its
processes listen on one port: which of them has a connection is read from the kernel, and each gets
a few that stay open. The engine is put to sleep through each of them in turn, and woken up through
the next one. Once a sleep has returned, all requests to all of them have to be refused with 503 at
once; once a wake-up has, all of them have to answer as before. Requests that come beside the two
calls have to be answered or refused. The same holds while the sleeping engine answers nothing
(SIGSTOP). A wake-up through one calls off a sleep through another that waits for a long request,
which goes on. `wrong` says what was not so.

Exit code 1 where something is wrong, 2 where the server did not start.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import serve

HOST = "127.0.0.1"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
# Connections that each API server gets, and how many are made until each has them.
EACH, MOST = 2, 400
# Seconds in which a request to a sleeping engine is refused, and one that is not refused is left.
AT_ONCE, LEFT = 0.25, 20.0
# Requests to each API server, one after the other, after each sleep.
REFUSED = 20
# Tokens of a request that a sleep waits for, and seconds before what comes beside it.
LONG, PAUSE = 1500, 0.5
ENGINE = re.compile(r"\(EngineCore\S* pid=(\d+)\)")
# What API servers close connections after that nothing comes on: more than the run takes.
SETTINGS = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "900"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status 0 where none came in time."""

    status: int
    text: str
    seconds: float

    @property
    def completion(self) -> str:
        """The text of a completion, "" of any other answer."""
        return json.loads(self.text)["choices"][0]["text"] if self.status == 200 else ""


class Line:
    """One connection that stays open, so one API server answers on it."""

    def __init__(self) -> None:
        self._connection = http.client.HTTPConnection(HOST, serve.PORT, timeout=LEFT)
        self._connection.connect()
        self._connection.auto_open = 0
        self.port: int = self._connection.sock.getsockname()[1]

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One request. A line whose answer did not come in time has no further one."""
        data = None if body is None else json.dumps(body)
        began = time.monotonic()
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            status, text = answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        return Answer(status=status, text=text, seconds=time.monotonic() - began)

    def complete(self, **settings: Any) -> Answer:
        body = {"model": "model", "prompt": serve.PROMPTS[0], "temperature": 0}
        settings = {"max_tokens": serve.TOKENS, **settings}
        return self.send("POST", "/v1/completions", {**body, **settings})

    def close(self) -> None:
        self._connection.close()


def owner(port: int) -> int | None:
    """The process that serves the connection from this port."""
    tables = [table for table in map(Path, TABLES) if table.is_file()]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    ends = f":{serve.PORT:04X}", f":{port:04X}"
    sockets = {f"socket:[{row[9]}]" for row in rows if (row[1][-5:], row[2][-5:]) == ends}
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        # A process may end, or close a file, meanwhile.
        with contextlib.suppress(OSError):
            if f"{entry.readlink()}" in sockets:
                return int(entry.parts[2])
    return None


def connect(count: int) -> dict[int, list[Line]]:
    """EACH connections of each of ``count`` API servers, by process; fewer where MOST do not do."""
    lines: dict[int, list[Line]] = collections.defaultdict(list)
    for _ in range(MOST):
        line = Line()
        # The connection is the server's once it has answered on it.
        line.send("GET", "/health")
        pid = owner(line.port)
        if pid is None or len(lines[pid]) >= EACH:
            line.close()
        else:
            lines[pid].append(line)
        if len(lines) == count and all(len(each) == EACH for each in lines.values()):
            break
    return lines


class Beside:
    """Requests in a thread, on the second line of each API server, while a call is in flight."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.answers: list[Answer] = []
        self._lines = lines
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(line,)) for line in lines]

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, line: Line) -> None:
        while not self._stop.is_set():
            self.answers.append(line.complete())
            if self.answers[-1].status == 0:
                return


def refused(report: serve.Steps, lines: Mapping[int, Sequence[Line]], when: str) -> None:
    """Requests to all, one each at a time: all have to be refused at once."""
    answers = [each[0].complete() for _ in range(REFUSED) for each in lines.values()]
    seconds = [answer.seconds for answer in answers]
    statuses = collections.Counter(answer.status for answer in answers)
    report.add(
        f"{len(answers)} requests {when}",
        sum(seconds),
        statuses=dict(statuses),
        median=round(statistics.median(seconds), 4),
        slowest=round(max(seconds), 4),
    )
    report.expect({*statuses} == {503}, f"{when}: {dict(statuses)} in place of 503")
    report.expect(max(seconds) <= AT_ONCE, f"{when}: a refusal took {max(seconds):.2f} s")


def told(report: serve.Steps, lines: Mapping[int, Sequence[Line]], when: str) -> None:
    """All have to say that the engine sleeps."""
    for number, each in enumerate(lines.values()):
        said = each[0].send("GET", "/is_sleeping").text
        report.expect('"is_sleeping":true' in said, f"{when}: API server {number} says {said}")


def served(report: serve.Steps, lines: Mapping[int, Sequence[Line]], text: str, when: str) -> None:
    """A request to each: all have to answer as before."""
    for number, each in enumerate(lines.values()):
        answer = each[0].complete()
        name = f"API server {number} answers {when}"
        report.add(name, answer.seconds, status=answer.status)
        same = answer.status == 200 and answer.completion == text
        report.expect(same, f"{name} with {answer.status}: {answer.text[:200]}")


def turns(report: serve.Steps, lines: Mapping[int, Sequence[Line]], cycles: int) -> str:
    """Sleeps through each API server in turn, and wake-ups through the next one.

    Returns:
        The text that all of them answer with.
    """
    order = list(lines.values())
    text = order[0][0].complete().completion
    report.expect(bool(text), "no answer before the first sleep")
    served(report, lines, text, "before the first sleep")
    for cycle in range(cycles):
        sleeps = cycle % len(order)
        wakes = (cycle + 1) % len(order)
        for call, number in (("sleep", sleeps), ("wake_up", wakes)):
            name = f"{call} {cycle + 1} through API server {number}"
            with Beside([each[1] for each in order]) as beside:
                answer = order[number][0].send("POST", f"/{call}")
                report.add(name, answer.seconds, status=answer.status)
                report.expect(answer.status == 200, f"{name}: {answer.status} {answer.text[:200]}")
                if call == "sleep":
                    refused(report, lines, f"after {name}")
                    told(report, lines, f"after {name}")
            statuses = dict(collections.Counter(one.status for one in beside.answers))
            report.add(f"requests beside {name}", 0, statuses=statuses)
            # Their texts are no matter: a sleep cuts them off, and each is in a batch of its own.
            report.expect({*statuses} <= {200, 503}, f"beside {name}: {statuses}")
            if call == "wake_up":
                served(report, lines, text, f"after {name}")
    return text


def silent(
    report: serve.Steps, lines: Mapping[int, Sequence[Line]], text: str, engine: int
) -> None:
    """Requests to a sleeping ``engine`` that answers nothing."""
    first, *_, last = lines.values()
    report.expect(first[0].send("POST", "/sleep").status == 200, "no sleep of an engine to stop")
    os.kill(engine, signal.SIGSTOP)
    try:
        refused(report, lines, "with the engine stopped")
    finally:
        os.kill(engine, signal.SIGCONT)
    report.expect(last[0].send("POST", "/wake_up").status == 200, "no wake-up of a stopped engine")
    served(report, lines, text, "after the engine was stopped")


def called_off(report: serve.Steps, lines: Mapping[int, Sequence[Line]], text: str) -> None:
    """A sleep that waits for a long request, and a wake-up through another API server."""
    first, *_, last = lines.values()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(first[1].complete, max_tokens=LONG, ignore_eos=True)
        time.sleep(PAUSE)
        asleep = pool.submit(first[0].send, "POST", "/sleep?mode=wait")
        time.sleep(PAUSE)
        beside = last[0].complete()
        awake = last[1].send("POST", "/wake_up")
        going = not long.done()
        answers = {
            "request": beside, "wake_up": awake, "sleep": asleep.result(), "long": long.result()
        }  # fmt: skip
    for name, answer in answers.items():
        report.add(f"{name} beside a sleep that waits", answer.seconds, status=answer.status)
    statuses = {name: answer.status for name, answer in answers.items()}
    report.expect(going, "the long request had ended before the wake-up: nothing waited for it")
    expected = {"request": 503, "wake_up": 200, "sleep": 409, "long": 200}
    report.expect(statuses == expected, f"beside a sleep that waits: {statuses}")
    ended = json.loads(answers["long"].text) if answers["long"].status == 200 else {}
    tokens = ended.get("usage", {}).get("completion_tokens")
    report.expect(tokens == LONG, f"the long request has {tokens} tokens")
    served(report, lines, text, "after a sleep was called off")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--count", type=int, default=2, help="API servers (default: 2)")
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--utilization", default="0.3", help="of the GPU's memory (default: 0.3)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = serve.Steps()
    model = serve.MODELS["smoke"]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "model"
        model.make(folder, 0)
        words = serve.command(
            folder,
            model,
            port=serve.PORT,
            utilization=options.utilization,
            graphs=False,
            flags=["--api-server-count", f"{options.count}", *options.serve],
            module=("vllm.entrypoints.cli.main", "serve"),
        )
        server = serve.start(words, options.out.with_suffix(".log"), SETTINGS)
        try:
            seconds = serve.healthy(server, lambda: serve.call("GET", "/health")[0] == 200)
            if seconds is None:
                return 2
            report.add("healthy", seconds)
            serve.first_answers(report, model.prompts[:1])
            lines = connect(options.count)
            for each in lines.values():
                for line in each:
                    stack.callback(line.close)
            held = sorted(len(each) for each in lines.values())
            report.add("connections", 0, held=held)
            if held == [EACH] * options.count:
                text = turns(report, lines, options.cycles)
                called_off(report, lines, text)
                engine = ENGINE.search(server.log.read_text(errors="replace"))
                report.expect(engine is not None, "the log names no process of the engine")
                if engine:
                    silent(report, lines, text, int(engine[1]))
                report.finished = True
            else:
                report.expect(False, f"{options.count} API servers have {held} connections")
        finally:
            server.stop()
            result = {"finished": report.finished, "wrong": report.wrong, "steps": report.steps}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"wrong": report.wrong}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
