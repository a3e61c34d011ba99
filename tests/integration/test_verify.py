"""`sm12x verify` as a process, against real HTTP servers that play vLLM, well and ill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm12x import layout

HERE = Path(__file__).parent / "vllmserver"
KEY = "sk-very-secret-key"
# Neither speed nor times are those of a server: the machine may be at work on other tests.
FAST = ("--requests", "4", "--concurrency", "2", "--min-speed", "0", "--max-sleep", "60")
QUICK = (*FAST, "--max-wake", "60", "--max-swap", "120")


@dataclass(kw_only=True)
class Playing:
    """A server that plays vLLM."""

    process: subprocess.Popen[str]
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # S310 is about a scheme that somebody else chose: this one is http on this host.
        request = urllib.request.Request(self.url + path, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    @property
    def asleep(self) -> bool:
        return bool(self.get("/is_sleeping")["is_sleeping"])

    def changes(self) -> list[str]:
        calls = self.get("/calls")
        return [call for call in calls if call.startswith("POST") and "completions" not in call]


Play = Callable[..., Playing]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Starts servers: ``play(garbage_after=2)``."""
    running: list[subprocess.Popen[str]] = []
    (tmp_path / "gpu").mkdir()

    def start(**settings: Any) -> Playing:
        memory = tmp_path / "gpu" / f"{len(running)}.json"
        words = [sys.executable, str(HERE / "serve.py")]
        words.append(json.dumps({"memory": str(memory), **settings}))
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        return Playing(process=process, port=port, key=settings.get("key", ""))

    yield start
    for process in running:
        process.kill()
        process.wait()


@dataclass(kw_only=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        schema = json.loads((layout.data() / "schemas" / "verify-1.json").read_text())
        jsonschema.validate(found, schema)
        return found

    def check(self, name: str, server: str = "A") -> dict[str, Any]:
        (found,) = (
            one for one in self.report["checks"] if one["check"] == name and one["server"] == server
        )
        return dict(found)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process with one GPU, on which the servers' memory lies, and without an API key."""
    mine = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    paths = [str(HERE / "nvml"), str(layout.root() / "scripts")]
    proxy = "http://127.0.0.1:1"
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_GPU": str(tmp_path / "gpu"),
        # A proxy must not come between, nor the key of a .netrc.
        "HTTP_PROXY": proxy,
        "http_proxy": proxy,
        "NO_PROXY": "",
        "no_proxy": "",
    }


Verify = Callable[..., Ended]


def started(
    words: tuple[str, ...], env: dict[str, str], verb: str = "verify"
) -> subprocess.Popen[str]:
    # A shell's background has SIGINT ignored, and verify leaves what is ignored so: a program that
    # was started there, pytest too, hands that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sm12x", verb, *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def until_said(process: subprocess.Popen[str], words: str) -> str:
    """Read what the process says up to these words."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def ended(process: subprocess.Popen[str], said: str = "") -> Ended:
    out, err = process.communicate(timeout=120)
    err = said + err
    assert "Traceback" not in err
    assert KEY not in out + err
    return Ended(code=process.returncode, out=out, err=err)


@pytest.fixture
def verify(environment: dict[str, str]) -> Verify:
    def run(*words: str, **variables: str) -> Ended:
        return ended(started(words, {**environment, **variables}))

    return run


def test_a_sound_server_passes_and_everything_is_written(
    play: Play, verify: Verify, tmp_path: Path
) -> None:
    server = play(speculates=True, key=KEY)
    paths = [tmp_path / f"report.{ending}" for ending in ("json", "md", "png")]
    words = [word for path in paths for word in ("--save", str(path))]
    found = verify(server.url, "--cycles", "4", *words, *QUICK, "--json", VLLM_API_KEY=KEY)
    assert found.code == 0, found.err
    report = found.report
    assert report["verdict"] == "passed"
    assert {one["verdict"] for one in report["checks"]} == {"ok"}
    assert found.check("acceptance")["found"] == 1
    assert found.check("residue")["found"] == 2
    assert found.check("growth")["found"] == 0
    assert report["turns"][0]["before"] == [
        {"gpu": 0, "used": (40 << 30) + (300 << 20), "held": 40 << 30}
    ]
    assert json.loads(paths[0].read_text()) == report
    assert paths[1].read_text().startswith("# sm12x verify: passed\n")
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert not any(KEY.encode() in path.read_bytes() for path in paths)
    assert server.changes() == ["POST /sleep?level=1", "POST /wake_up"] * 4
    assert "cycle 4" in found.err


def test_two_servers_take_turns(play: Play, verify: Verify) -> None:
    first, second = play(), play(asleep=True)
    found = verify(first.url, second.url, "--cycles", "2", *QUICK, "--json")
    assert found.code == 0, found.err
    turns = found.report["turns"]
    assert [turn["sleeps"] + turn["wakes"] for turn in turns] == ["AB", "BA", "AB", "BA"]
    assert all(turn["swap_seconds"] > 0 for turn in turns)
    assert found.check("later swaps to it", "B")["verdict"] == "ok"
    assert (first.asleep, second.asleep) == (False, True)


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ({"garbage_after": 2}, "garbage", "!!!!!"),
        ({"other_text_after": 1}, "answers", "loud"),
        ({"leak_mib": 8}, "growth", "+16.0 MiB"),
        ({"keeps": True}, "freed", "0%"),
        ({"residue_gib": 7.5}, "residue", "7.50 GiB"),
        ({"forgets_draft_after": 1, "speculates": True}, "acceptance", "5%"),
        ({"refuse": {"completions:10": 500}}, "requests", "1 of 8 failed"),
    ],
)
def test_a_fault_of_the_server_is_a_breach(
    play: Play, verify: Verify, fault: dict[str, Any], check: str, words: str
) -> None:
    server = play(**fault)
    found = verify(server.url, "--cycles", "4", *QUICK, "--json")
    assert found.code == 1, found.err + found.out
    assert found.report["verdict"] == "breached"
    assert found.check(check)["verdict"] == "breach"
    assert words in found.check(check)["text"]
    assert not server.asleep


@pytest.mark.parametrize(("fault", "code"), [({}, 0), ({"other_text_after": 1}, 1)])
def test_a_reader_that_left_does_not_change_the_verdict(
    play: Play, environment: dict[str, str], fault: dict[str, Any], code: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [play(**fault).url, "--cycles", "1", *QUICK]
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "sm12x", "verify", *words],
            env=environment,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_slow_wake_up_is_a_breach_of_the_limit_that_was_given(play: Play, verify: Verify) -> None:
    found = verify(play(wake_up=0.3).url, "--cycles", "1", *FAST, "--max-wake", "0.2", "--json")
    assert found.code == 1
    assert found.check("wake-ups")["verdict"] == "breach"
    assert "--max-wake" in found.err


def test_in_a_container_the_memory_of_all_is_judged(play: Play, verify: Verify) -> None:
    found = verify(play().url, "--cycles", "1", *QUICK, "--json", FAKE_CONTAINER="1")
    assert found.code == 0
    assert found.report["trends"][0]["of_server"] is False
    assert "of all processes" in found.check("residue")["text"]


@pytest.mark.parametrize(
    ("fault", "said", "asleep"),
    [
        ({"routes": False}, "--enable-sleep-mode --enable-sleep-routes", None),
        ({"refuse": {"wake_up:2": 500}}, "both addresses", False),
        ({"refuse": {"sleep:2": 409}}, "with 409", False),
        ({"nonsense": {"version": "<html>"}}, "GET /version", False),
        ({"ignores_sleep": True}, "/sleep", False),
        ({"busy": 3}, "--force", False),
        ({"key": KEY}, "VLLM_API_KEY", False),
    ],
)
def test_what_ends_a_run_says_the_next_step(
    play: Play, verify: Verify, fault: dict[str, Any], said: str, asleep: bool | None
) -> None:
    server = play(**fault)
    found = verify(server.url, "--cycles", "3", *QUICK, "--json")
    assert found.code == 17, found.err
    assert said in found.err
    assert found.report["verdict"] == "stopped"
    stopped = found.report["stopped"]
    assert said in f"{stopped['why']} {stopped['next_step']}"
    assert asleep is None or server.asleep is asleep


def test_a_wrong_key_is_not_printed_even_if_the_server_does(play: Play, verify: Verify) -> None:
    server = play(key="another-key", echoes_key=True)
    found = verify(server.url, *QUICK, "--json", VLLM_API_KEY=KEY)
    assert found.code == 17
    assert "<VLLM_API_KEY>" in found.err


@pytest.mark.parametrize("die", ["sleep:2", "wake_up:2", "completions:20"])
def test_a_server_that_dies_leaves_what_was_measured(
    play: Play, verify: Verify, tmp_path: Path, die: str
) -> None:
    path = tmp_path / "x.md"
    found = verify(play(die=die).url, "--cycles", "3", "--save", str(path), *QUICK, "--json")
    assert found.code == 17, found.err
    report = found.report
    assert report["verdict"] == "stopped"
    assert report["turns"][0]["answers"] is not None
    assert "cycle 2 of 3" in report["stopped"]["during"]
    assert "stopped at: cycle 2 of 3" in path.read_text()


def test_a_server_that_hangs_is_given_up(play: Play, verify: Verify) -> None:
    server = play(hang="wake_up:1")
    found = verify(server.url, "--cycles", "1", "--timeout", "2", *QUICK, "--json")
    assert found.code == 17
    assert "--timeout" in found.report["stopped"]["next_step"]
    assert found.report["turns"][0]["sleep_seconds"] is not None
    # The call that hangs is in flight there, so it cannot be woken up, and that is said.
    assert f"curl -X POST '{server.url}/wake_up'" in found.report["left"][0]


def test_a_sleep_that_ends_after_the_time_out_is_waited_for(play: Play, verify: Verify) -> None:
    server = play(sleep=4.0)
    found = verify(server.url, "--cycles", "1", "--timeout", "3", *QUICK, "--json")
    assert found.code == 17
    assert "--timeout" in found.report["stopped"]["next_step"]
    assert not server.asleep


def test_an_answer_that_comes_byte_by_byte_is_given_up(play: Play, verify: Verify) -> None:
    server = play(drip="sleep:1")
    began = time.monotonic()
    found = verify(server.url, "--cycles", "1", "--timeout", "2", *QUICK, "--json")
    assert time.monotonic() - began < 60
    assert found.code == 17
    assert "--timeout" in found.report["stopped"]["next_step"]
    assert not server.asleep


def test_requests_that_hang_are_given_up(play: Play, verify: Verify) -> None:
    words = ("--timeout", "2", "--cycles", "1", "--json")
    found = verify(play(hang="completions:9").url, *words, *QUICK)
    assert found.code == 1
    assert found.check("requests")["found"] == 1


@pytest.mark.parametrize("word", ["http://127.0.0.1:1", "http://no-such-host.invalid:8000"])
def test_a_wrong_address(verify: Verify, word: str) -> None:
    found = verify(word, "--json")
    assert found.code == 17
    assert found.report["servers"] == []


def test_what_does_not_speak_http(verify: Verify) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(65536)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.close()

        threading.Thread(target=speak, daemon=True).start()
        port = listener.getsockname()[1]
        found = verify(f"127.0.0.1:{port}")
        assert found.code == 17
        found = verify(f"https://127.0.0.1:{port}")
        assert found.code == 17


def test_a_key_is_not_sent_on_by_a_redirection(verify: Verify) -> None:
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{port}/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = verify(f"http://127.0.0.1:{port}", VLLM_API_KEY=KEY)
        server.shutdown()
    assert found.code == 17
    assert asked == ["/version"]


def test_level_2_loads_the_weights_again(play: Play, verify: Verify) -> None:
    server = play(dev=True)
    found = verify(server.url, "--level", "2", "--cycles", "1", *QUICK, "--json")
    assert found.code == 0, found.err
    assert server.changes() == [
        "POST /sleep?level=2",
        "POST /wake_up?tags=weights",
        "POST /collective_rpc",
        "POST /wake_up?tags=kv_cache",
    ]
    found = verify(play().url, "--level", "2", "--cycles", "1", *QUICK)
    assert found.code == 17
    assert "VLLM_SERVER_DEV_MODE=1" in found.err


def test_a_server_that_sleeps_at_the_start_sleeps_at_the_end(play: Play, verify: Verify) -> None:
    server = play(asleep=True)
    found = verify(server.url, "--cycles", "1", *QUICK)
    assert found.code == 0, found.err
    assert server.asleep


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_in_a_sleep_it_waits_and_wakes_the_server_up(
    play: Play, environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    gate, path = tmp_path / "gate", tmp_path / "x.json"
    server = play(gate=str(gate))
    process = started((server.url, "--save", str(path), *QUICK, "--json"), environment)
    until(lambda: bool(server.changes()))
    process.send_signal(number)
    said = until_said(process, "the sleep of A")
    gate.touch()
    found = ended(process, said)
    assert found.code == 130, found.err
    assert server.changes() == ["POST /sleep?level=1", "POST /wake_up"]
    assert not server.asleep
    report = found.report
    assert (report["verdict"], report["stopped"]["interrupted"]) == ("stopped", True)
    assert "cycle 1 of 5" in report["stopped"]["during"]
    assert json.loads(path.read_text()) == report


def test_a_second_interrupt_leaves_at_once_and_says_what_may_be_asleep(
    play: Play, environment: dict[str, str]
) -> None:
    server = play(hang="sleep")
    process = started((server.url, *QUICK), environment)
    until(lambda: bool(server.changes()))
    process.send_signal(signal.SIGINT)
    said = until_said(process, "the sleep of A")
    # Within a second it would be taken for the same one.
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    found = ended(process, said)
    assert found.code == 130
    assert f"curl -X POST '{server.url}/wake_up'" in found.err


def test_interrupted_while_a_request_hangs_it_ends_at_once(
    play: Play, environment: dict[str, str]
) -> None:
    server = play(hang="completions:9")
    process = started((server.url, "--timeout", "600", *QUICK), environment)
    until(lambda: len(server.get("/calls")) > 12)
    process.send_signal(signal.SIGINT)
    found = ended(process)
    assert found.code == 130
    assert server.changes() == []


def test_killed_it_leaves_what_was_known(
    play: Play, environment: dict[str, str], tmp_path: Path
) -> None:
    server = play(hang="sleep:2")
    path = tmp_path / "x.json"
    process = started((server.url, "--save", str(path), *QUICK), environment)

    until(lambda: server.changes().count("POST /sleep?level=1") == 2)
    process.kill()
    process.communicate()
    report = json.loads(path.read_text())
    assert report["verdict"] == "running"
    assert report["turns"][0]["answers"] is not None


def test_the_image_has_it_as_a_verb(
    play: Play, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [
        sys.executable,
        "-P",
        "-m",
        "sm12x.runtime",
        "verify",
        play().url,
        "--cycles",
        "1",
        *QUICK,
    ]
    env = {**environment, "SM12X_IMAGE_ROOT": str(tmp_path), "SM12X_IMAGE_CACHE": str(tmp_path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
