"""Two servers that take turns on the same GPUs, and the end of either of them:

    python -m tests.gpu.rotate --out REPORT

Two random models of one kind, one with fewer layers, are served on the visible GPUs, each with its
share of them while the other sleeps. `sm12x verify URL URL` lets them take turns; REPORT gets its
report as `verify`. Then the server that sleeps is killed (SIGKILL): the other must go on as before.
It is started again, takes its turn and is killed while it is awake: the one that sleeps must wake
up and answer as before. `wrong` says what was not so. With --turns the run ends after the turns.

With --replies, which takes several GPUs, more turns follow those of `sm12x verify`. In each every
rank of the one that is awake replies to a `collective_rpc` with so many MiB, beside requests. The
replies have to be those of the ranks, in their order and to this call; texts, sleep and wake-up
have to be as before.

Exit code 1 where something is wrong, 2 where a server did not start.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu import replies, serve

from sm12x.core import process
from sm12x.core.errors import ServerError
from sm12x.verify.client import Access, Server

# The second model has so many layers fewer.
FEWER = 2
# Turns with large replies.
TURNS = 4
# Seconds in which the driver takes back what a killed process held.
GRACE = 20.0


class StartError(Exception):
    """A server did not start; its last words are printed."""


@dataclass(kw_only=True)
class Member:
    """One server, with what it is started with and its answers before anything happened to it."""

    name: str
    words: list[str]
    port: int
    log: Path
    prompts: Sequence[str]
    process: process.Background | None = None
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        access = Access(timeout=serve.CALL_LIMIT)
        self.server = Server(self.name, f"http://127.0.0.1:{self.port}", access)

    def start(self) -> float:
        """Seconds until it answers. Raises StartError."""
        self.process = serve.start(self.words, self.log)
        seconds = serve.healthy(self.process, self._is_up)
        if seconds is None:
            raise StartError(self.name)
        self.server.identify()
        return seconds

    def ask(self) -> tuple[str, ...]:
        """The greedy text of each prompt. Raises ServerError."""
        return tuple(self.server.complete(prompt, serve.TOKENS).text for prompt in self.prompts)

    def reply(self, number: int, mib: int) -> tuple[float, list[Any]]:
        """Seconds and what the engine received of each rank. Raises ServerError."""
        body = {"method": "large_reply", "args": [number, mib]}
        answer = self.server.call("POST", "/collective_rpc", body=body)
        return answer.seconds, json.loads(answer.text)["results"]

    def kill(self) -> None:
        if self.process:
            self.process.stop()
            self.process = None

    def _is_up(self) -> bool:
        try:
            self.server.call("GET", "/health", timeout=5)
        except ServerError:
            return False
        return True


class Report(serve.Steps):
    """The steps of both servers, and the report of `sm12x verify`."""

    def __init__(self) -> None:
        super().__init__()
        self.verify: dict[str, Any] = {}

    def same(self, member: Member, when: str) -> None:
        self.expect(member.ask() == member.texts, f"{member.name} answers differently {when}")


def settle(most: int) -> None:
    """Wait until no more than ``most`` MiB are in use, for GRACE seconds at most."""
    end = time.monotonic() + GRACE
    while serve.used() > most and time.monotonic() < end:
        time.sleep(0.5)


def verify(
    first: Member, second: Member, flags: Sequence[str], out: Path
) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `sm12x verify` with both, turn by turn."""
    path = out.with_suffix(".verify.json")
    words = [sys.executable, "-m", "sm12x", "verify", second.server.url, first.server.url]
    words += ["--random-weights", "--save", f"{path}"]
    words += ["--save", f"{out.with_suffix('.verify.md')}", *flags]
    # Other runs of the host have the other GPUs, and the checks are of all that are looked at.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words += ["--gpus", visible] if visible else []
    done = subprocess.run(words, check=False)
    return done.returncode, json.loads(path.read_text()) if path.is_file() else {}


def turns(
    report: Report,
    first: Member,
    second: Member,
    flags: Sequence[str],
    out: Path,
    *,
    dummy: bool,
) -> int:
    """Start both servers and let them take turns. ``flags`` are of `sm12x verify`.

    ``dummy`` as --dummy.

    Returns:
        The MiB in use by the first one asleep, before the second one was started.

    Raises:
        StartError: a server did not start.
        ServerError: a server failed a call.
    """
    report.add(f"{first.name} started", first.start())
    first.texts = first.ask()
    report.same(first, "without a sleep")
    asleep = report.add(f"{first.name} asleep", first.server.sleep(1))
    report.add(f"{second.name} started", second.start())
    second.texts = second.ask()
    # Weights of --load-format dummy are so small that text depends on its last token alone.
    apart = dummy or second.texts != first.texts
    report.expect(apart, "both models answer alike: nothing tells them apart")

    code, report.verify = verify(first, second, flags, out)
    report.expect(code == 0, f"`sm12x verify` ends with {code}")
    report.same(second, "after the turns")
    return asleep


def large_replies(
    report: Report, awake: Member, asleep: Member, sizes: Sequence[int], ranks: int
) -> None:
    """Turns with replies of ``sizes`` MiB in between. Raises ServerError."""
    number = 0
    for _ in range(TURNS):
        for mib in sizes:
            number += 1
            with concurrent.futures.ThreadPoolExecutor() as pool:
                beside = pool.submit(awake.ask)
                seconds, received = awake.reply(number, mib)
                texts = beside.result()
            report.add(f"{awake.name}: {mib} MiB of each rank", seconds, number=number)
            sent = [asdict(replies.LargeReply(n, number, mib).received()) for n in range(ranks)]
            report.expect(received == sent, f"replies to call {number} are {received}, not {sent}")
            report.expect(
                texts == awake.texts, f"{awake.name} answers differently beside call {number}"
            )
        report.same(awake, f"after call {number}")
        report.add(f"{awake.name} asleep", awake.server.sleep(1))
        report.add(f"{asleep.name} awake", asleep.server.wake_up())
        awake, asleep = asleep, awake
        report.same(awake, f"after the other's call {number}")


def ends(report: Report, first: Member, second: Member, asleep: int) -> None:
    """The end of the first server, once asleep and once awake; ``asleep`` and errors as above."""
    awake = report.add("after the turns", 0)

    first.kill()
    settle(awake - 1)
    left = report.add(f"{first.name} killed asleep", 0)
    report.expect(left < awake, f"nothing is given back of {first.name}'s {asleep} MiB")
    report.same(second, "with its peer killed asleep")

    slept = report.add(f"{second.name} asleep", second.server.sleep(1))
    report.add(f"{first.name} started again", first.start())
    report.same(first, "started again")
    first.kill()
    settle(slept + serve.SLACK)
    left = report.add(f"{first.name} killed awake", 0)
    report.expect(
        left <= slept + serve.SLACK, f"{left - slept} MiB more in use than before it started"
    )
    report.add(f"{second.name} awake", second.server.wake_up())
    report.same(second, "with its peer killed awake")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    parser.add_argument("--model", choices=serve.MODELS, default="qwen3-moe")
    parser.add_argument("--layers", type=int, default=14, help="of the first (default: 14)")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument(
        "--verify",
        action="append",
        default=[],
        metavar="FLAG",
        help="a further flag of `sm12x verify`, such as --verify=--min-speed=0 (repeatable)",
    )
    parser.add_argument("--turns", action="store_true", help="without the end of a server")
    parser.add_argument(
        "--replies", nargs="+", type=int, default=[], metavar="MIB", help="turns with large replies"
    )
    parser.add_argument(
        "--dummy", action="store_true", help="weights of --load-format dummy, which take no disk"
    )
    parser.add_argument("--utilization", default="0.6", help="of the GPUs' memory (default: 0.6)")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, without torch.compile")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    options = parser.parse_args()
    if options.layers <= FEWER:
        parser.error(f"--layers takes more than {FEWER}")
    model = serve.MODELS[options.model]
    flags = [*options.serve]
    if options.dummy:
        flags += ["--load-format", "dummy"]
    looks = [f"--cycles={options.cycles}", *options.verify]
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        members = []
        for number, layers in enumerate((options.layers, options.layers - FEWER)):
            name = f"{options.model} of {layers} layers"
            folder = Path(scratch) / f"{number}"
            model.make(folder, layers, dummy=options.dummy)
            port = serve.PORT + 50 * number
            words = serve.command(
                folder,
                model,
                port=port,
                utilization=options.utilization,
                graphs=options.graphs,
                flags=flags,
            )
            log = options.out.with_suffix(f".{number}.log")
            members.append(
                Member(name=name, words=words, port=port, log=log, prompts=model.prompts)
            )
        first, second = members
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            asleep = turns(report, first, second, looks, options.out, dummy=options.dummy)
            if options.replies:
                # An even number of turns: the same one is awake.
                ranks = len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","))
                large_replies(report, second, first, options.replies, ranks)
            if not options.turns:
                ends(report, first, second, asleep)
            report.finished = True
        except StartError:
            return 2
        except ServerError as error:
            report.expect(False, f"{error}")
        finally:
            for member in members:
                member.kill()
            result = {"finished": report.finished, "wrong": report.wrong, "steps": report.steps}
            options.out.write_text(json.dumps({**result, "verify": report.verify}, indent=1) + "\n")
    print(json.dumps({"wrong": report.wrong}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
