"""`pool` with real processes: start, swap, kill -9 of servers and of the pool, reload, the end."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sm12x import layout

# Another test looks at what serves on this machine (test_runtime.py).
pytestmark = pytest.mark.xdist_group("vllm serve")

RECIPE = """\
recipe_version: "1"
name: {name}
container: vllm-sm12x
defaults:
  port: 8000
command: >-
  vllm serve {name} --host 127.0.0.1 --port {{port}} --enable-sleep-mode --enable-sleep-routes
sm12x:
  hardware: [any]
  gpus: 1
  sleep: {{level: 1}}
  status: {{state: untested, source: a test}}
"""
KEYS = {"VLLM_API_KEY": "user", "SM12X_POOL_ADMIN_KEY": "admin"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


class Running:
    """`pool` in a process, with a stand-in for vLLM on its PATH."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.port = folder, free_port()
        programs, recipes = folder / "bin", folder / "root" / "recipes"
        programs.mkdir()
        recipes.mkdir(parents=True)
        (folder / "tmp").mkdir()
        vllm = programs / "vllm"
        root = layout.root()
        # It has a child, as vLLM has, which must end with it.
        played = f'exec {sys.executable} -m tests.integration.pool.played "$@"'
        vllm.write_text(f"#!/bin/sh\nsleep 1234 &\n{played}\n")
        vllm.chmod(0o755)
        for name in ("first", "second"):
            (recipes / f"{name}.yaml").write_text(RECIPE.format(name=name))
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SM12X_")},
            **KEYS,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{root / 'scripts'}:{root}",
            "SM12X_IMAGE_ROOT": str(folder / "root"),
            "SM12X_IMAGE_CACHE": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder),
            "PLAYED_LOG": str(folder / "starts"),
        }
        self.words = ["--port", str(self.port), *words] if "--help" not in words else [*words]
        self.log = folder / "log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sm12x.runtime", "pool", *self.words],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def call(
        self, path: str, method: str = "GET", key: str = "user", **more: Any
    ) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, url, headers=headers, timeout=30, trust_env=False, **more)

    def ask(self, model: str) -> httpx.Response:
        return self.call("/v1/completions", "POST", json={"model": model, "prompt": "x"})

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.call("/health").status_code == 200
        except httpx.TransportError:
            return False

    def states(self) -> dict[str, str]:
        try:
            return {one["model"]: one["state"] for one in self.call("/pool").json()["models"]}
        except httpx.TransportError:
            return {}

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith('{"event"')]
        return [one for one in map(json.loads, lines) if one["event"] == kind]

    def servers(self) -> dict[str, int]:
        """The process of each server, by its model."""
        result = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
                ours = str(self.folder) in (path.parent / "environ").read_text(errors="replace")
            except OSError:
                continue
            if ours and "tests.integration.pool.played" in words:
                result[words[words.index("serve") + 1]] = int(path.parent.name)
        return result

    def left(self) -> list[str]:
        """The command lines of all processes of this pool."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if str(self.folder) in path.read_text(errors="replace"):
                    lines.append((path.parent / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
        return lines


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path, "first", "+", "second")
    yield one
    one.process.kill()
    one.process.wait()
    for pid in one.servers().values():
        os.killpg(pid, signal.SIGKILL)


def test_start_swap_and_end(pool: Running) -> None:
    until(pool.is_ready)
    assert pool.states() == {"first": "awake", "second": "asleep"}
    answer = pool.ask("second")
    assert (answer.status_code, answer.headers["X-Pool-Model"]) == (200, "second")
    assert int(answer.headers["X-Pool-Wait-Ms"]) > 0
    assert pool.states() == {"first": "asleep", "second": "awake"}
    # The last one is loaded first, and each is told how many compilers fit in memory.
    starts = [json.loads(line) for line in (pool.folder / "starts").read_text().splitlines()]
    assert [start["argv"][1] for start in starts] == ["second", "first"]
    for start in starts:
        assert start["argv"][-4:-2] == ["--host", "127.0.0.1"]
        assert "SM12X_POOL_ADMIN_KEY" not in start["env"]
        assert start["env"]["CUDA_VISIBLE_DEVICES"] == "0"
        assert int(start["env"]["MAX_JOBS"]) > 0
        # A key of the pool's own: users cannot pass it by.
        assert start["env"]["VLLM_API_KEY"] == start["env"]["VLLM_SLEEP_API_KEY"] != "user"
        assert len(start["env"]["VLLM_API_KEY"]) >= 32
        url = f"http://127.0.0.1:{start['argv'][-1]}/sleep"
        for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}):
            assert httpx.post(url, headers=headers, trust_env=False).status_code == 401
    health = [sys.executable, "-P", "-m", "sm12x.runtime", "health"]
    done = subprocess.run(health, env=pool.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert str(pool.port) in done.stdout
    pool.process.send_signal(signal.SIGTERM)
    assert pool.process.wait(30) == 0
    assert pool.left() == []


@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_server_that_is_killed_starts_again_while_the_other_serves(
    pool: Running, victim: str
) -> None:
    until(pool.is_ready)
    before = pool.servers()
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: pool.states().get(victim) == "stopped")
    other = "second" if victim == "first" else "first"
    assert pool.ask(other).status_code == 200
    until(lambda: pool.states().get(victim) in ("awake", "asleep"))
    assert pool.servers()[victim] != before[victim]
    assert pool.servers()[other] == before[other]
    assert pool.ask(victim).status_code == 200
    (end,) = pool.events("end")
    assert end["model"] == victim


def test_after_a_kill_the_pool_takes_its_servers_over_by_asking_them(pool: Running) -> None:
    until(pool.is_ready)
    assert pool.ask("second").status_code == 200
    before = pool.servers()
    pool.process.kill()
    pool.process.wait()
    assert pool.servers() == before
    pool.start()
    until(pool.is_ready)
    assert pool.servers() == before
    assert pool.states() == {"first": "asleep", "second": "awake"}
    assert pool.ask("first").status_code == 200
    assert len((pool.folder / "starts").read_text().splitlines()) == 2


def test_reload_restarts_only_what_has_changed(pool: Running, tmp_path: Path) -> None:
    until(pool.is_ready)
    pool.process.send_signal(signal.SIGTERM)
    assert pool.process.wait(30) == 0
    path = tmp_path / "pool.yaml"
    text = f"port: {pool.port}\nmodels:\n  first: {{recipe: first}}\n  second: {{recipe: second}}\n"
    path.write_text(text)
    pool.words = ["--config", str(path)]
    pool.start()
    until(pool.is_ready)
    before = pool.servers()
    path.write_text(text.replace("recipe: second", "recipe: sekond"))
    assert pool.call("/pool/reload", "POST", "user").status_code == 403
    answer = pool.call("/pool/reload", "POST", "admin")
    assert answer.status_code == 422
    assert "sekond" in answer.json()["error"]["message"]
    assert pool.ask("second").status_code == 200
    path.write_text(text.replace("recipe: second", "recipe: second, arguments: [--seed, '3']"))
    pool.process.send_signal(signal.SIGHUP)
    until(lambda: bool(pool.events("reload")))
    assert pool.events("reload")[0]["restarted"] == ["second"]
    assert pool.events("reload")[0]["kept"] == ["first"]
    until(lambda: pool.servers().get("second", before["second"]) != before["second"])
    assert pool.servers()["first"] == before["first"]
    assert pool.ask("second").status_code == 200
    path.write_text(text.split("  second")[0])
    assert pool.call("/pool/reload", "POST", "admin").json()["removed"] == ["second"]
    assert list(pool.servers()) == ["first"]
    assert pool.ask("second").status_code == 404


def test_models_that_cannot_sleep_stop_and_start(pool: Running, tmp_path: Path) -> None:
    until(pool.is_ready)
    before = pool.servers()
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"port: {pool.port}\nmodels:\n  first: {{recipe: first, sleep: stop}}\n"
        "  second: {recipe: second, sleep: stop}\n"
    )
    pool.process.kill()
    pool.process.wait()
    pool.words = ["--config", str(path)]
    pool.start()
    until(pool.is_ready)
    # The one that sleeps is woken up as it was put to sleep, and stopped from then on.
    assert pool.ask("second").status_code == 200
    assert list(pool.servers()) == ["second"]
    assert pool.states() == {"first": "stopped", "second": "awake"}
    assert pool.ask("first").status_code == 200
    assert list(pool.servers()) == ["first"]
    assert pool.servers()["first"] != before["first"]


def test_a_model_may_wait_for_its_first_request(pool: Running, tmp_path: Path) -> None:
    until(pool.is_ready)
    pool.process.send_signal(signal.SIGTERM)
    assert pool.process.wait(30) == 0
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"port: {pool.port}\nmodels:\n  first: {{recipe: first}}\n"
        "  second: {recipe: second, preload: false}\n"
    )
    pool.words = ["--config", str(path)]
    pool.start()
    until(pool.is_ready)
    assert list(pool.servers()) == ["first"]
    assert pool.states() == {"first": "awake", "second": "stopped"}
    assert pool.ask("second").status_code == 200
    assert pool.states() == {"first": "asleep", "second": "awake"}


def test_the_pool_is_killed_at_random_points_of_its_swaps(pool: Running) -> None:
    chance = random.Random(3)  # noqa: S311 - when it is killed
    until(pool.is_ready)
    before = pool.servers()
    over = threading.Event()
    wrong: list[str] = []

    def client(model: str) -> None:
        while not over.is_set():
            try:
                answer = pool.ask(model)
            except httpx.TransportError:
                # The pool has ended, or is not there yet.
                time.sleep(0.05)
                continue
            if answer.status_code not in (200, 503):
                wrong.append(answer.text)

    threads = [threading.Thread(target=client, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            time.sleep(chance.uniform(0.2, 1.5))
            pool.process.kill()
            pool.process.wait()
            pool.start()
            until(pool.is_ready)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert pool.servers() == before
    for name in ("first", "second"):
        assert pool.ask(name).status_code == 200
    key = next((pool.folder / "tmp").glob("sm12x-pool-*/key")).read_text()
    starts = [
        json.loads(line)["argv"] for line in (pool.folder / "starts").read_text().splitlines()
    ]
    for words in starts:
        url = f"http://127.0.0.1:{words[-1]}/is_sleeping"
        headers = {"Authorization": f"Bearer {key}"}
        asleep = httpx.get(url, headers=headers, trust_env=False).json()["is_sleeping"]
        assert pool.states()[words[1]] == ("asleep" if asleep else "awake")


@pytest.mark.parametrize(
    ("words", "code", "words_of_error"),
    [
        (["first", "+"], 2, "missing beside a +"),
        (["--what", "first"], 2, "--what"),
        (["first", "+", "third"], 2, "third"),
        (["--host", "0.0.0.0", "first"], 2, "no variable"),  # noqa: S104
        (["--config", "absent.yaml"], 4, "absent.yaml"),
    ],
)
def test_what_cannot_serve_ends_at_once(
    tmp_path: Path, words: list[str], code: int, words_of_error: str
) -> None:
    one = Running(tmp_path, "--help")
    assert one.process.wait(30) == 0
    env = {name: value for name, value in one.env.items() if name not in KEYS}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sm12x.runtime", "pool", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert words_of_error in done.stderr
    assert "Traceback" not in done.stderr
