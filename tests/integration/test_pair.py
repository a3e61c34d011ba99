"""`pair` with real processes: two servers that stand in for vLLM, a swap, and an end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.runtime import health

# Another test looks at what serves on this machine (test_runtime.py).
pytestmark = pytest.mark.xdist_group("vllm serve")

# What vLLM does on these paths. It starts a child, as vLLM does, which must end with it.
VLLM = """\
#!{python}
import http.server, json, subprocess, sys
asleep = False
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body=b""):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(json.dumps({{"is_sleeping": asleep}}).encode())
    def do_POST(self):
        global asleep
        asleep = self.path.startswith("/sleep?level=1")
        self.answer()
    def log_message(self, *args):
        pass
print("serving", sys.argv, flush=True)
subprocess.Popen(["sleep", "1234"])
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
RECIPE = """\
recipe_version: "1"
name: {name}
container: vllm-sm12x
defaults:
  port: {port}
command: vllm serve {name} --host 127.0.0.1 --port {{port}} --enable-sleep-mode
sm12x:
  hardware: [any]
  gpus: 1
  sleep: {{level: 1}}
  status: {{state: untested, source: a test}}
"""


@pytest.fixture
def ports() -> tuple[int, int]:
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return found[0], found[1]


@pytest.fixture
def pair(tmp_path: Path, ports: tuple[int, int]) -> Iterator[subprocess.Popen[str]]:
    programs, recipes = tmp_path / "bin", tmp_path / "root" / "recipes"
    programs.mkdir()
    recipes.mkdir(parents=True)
    vllm = programs / "vllm"
    vllm.write_text(VLLM.format(python=sys.executable))
    vllm.chmod(0o755)
    for name, port in zip(("first", "second"), ports, strict=True):
        (recipes / f"{name}.yaml").write_text(RECIPE.format(name=name, port=port))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "sm12x.runtime", "pair", "first", "+", "second"],
        env={
            **{name: value for name, value in os.environ.items() if name != "MAX_JOBS"},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(layout.root() / "scripts"),
            "SM12X_IMAGE_ROOT": str(tmp_path / "root"),
            "SM12X_IMAGE_CACHE": str(tmp_path / "cache"),
            "HOME": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def asleep(port: int) -> bool | None:
    try:
        _, body = health.get_http(health.Listener(host="127.0.0.1", port=port), "/is_sleeping", 5)
    except (OSError, http.client.HTTPException):
        return None
    found: bool = json.loads(body)["is_sleeping"]
    return found


def children(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_one_sleeps_while_the_other_serves_and_all_end_together(
    pair: subprocess.Popen[str], ports: tuple[int, int], tmp_path: Path
) -> None:
    assert pair.stdout is not None
    said = []
    for line in pair.stdout:
        if line.startswith("pair:"):
            said.append(line.strip())
        if line.endswith("the rest sleep\n"):
            break
    assert (asleep(ports[0]), asleep(ports[1])) == (False, True)
    pair.send_signal(signal.SIGTERM)
    assert pair.wait(60) == 0
    # Each is told how many compilers fit in the memory that is there when it starts.
    jobs = [line for line in said if line.startswith("pair: MAX_JOBS=")]
    assert len(jobs) == 2
    assert [line for line in said if line not in jobs] == [
        f"pair: starting second on 127.0.0.1:{ports[1]}",
        "pair: second sleeps",
        f"pair: starting first on 127.0.0.1:{ports[0]}",
        "pair: first serves, the rest sleep",
    ]
    assert children(f"SM12X_IMAGE_ROOT={tmp_path}") == []


def test_when_one_dies_the_other_is_stopped(
    pair: subprocess.Popen[str], ports: tuple[int, int], tmp_path: Path
) -> None:
    until(lambda: asleep(ports[0]) is False and asleep(ports[1]) is True)
    for number in children(f"SM12X_IMAGE_ROOT={tmp_path}"):
        if b"vllm\0serve\0second" in Path(f"/proc/{number}/cmdline").read_bytes():
            os.kill(number, signal.SIGKILL)
    assert pair.wait(60) == 13
    assert pair.stdout is not None
    assert "error: second ended with -9, so the others are stopped too" in pair.stdout.read()
    assert children(f"SM12X_IMAGE_ROOT={tmp_path}") == []
