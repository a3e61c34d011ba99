"""`sm12x fetch` against a real HTTP server on this machine, and once against the real index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import index, pipconfig
from sm12x.core.errors import FetchError

SDIST = bytes(range(256)) * 4096
WHEEL = os.urandom(3 * 1024 * 1024 + 17)


class Server(ThreadingHTTPServer):
    """A Simple index with relative addresses; the attributes make it misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut_after: int | None = None  # bytes of a body after which the line breaks
        self.pause = 0.0  # seconds between two pieces of a body
        self.failures = 0  # this many requests for files are answered 503 first
        self.asked: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        name = self.path.rpartition("/")[2]
        if self.path == "/simple/vllm/":
            links = "".join(f'<a href="../../files/{n}">{n}</a>' for n in self.server.files)
            self._send(200, f"<html>{links}</html>".encode(), {"Content-Type": "text/html"})
        elif self.path.startswith("/files/") and name in self.server.files:
            self._file(self.server.files[name])
        else:
            self._send(404, b"", {})

    def _file(self, body: bytes) -> None:
        if self.server.failures:
            self.server.failures -= 1
            self._send(503, b"", {})
            return
        asked = self.headers.get("Range")
        if not asked:
            self._send(200, body, {})
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        else:
            where = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self._send(206, body[start:], {"Content-Range": where})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        limit = self.server.cut_after if self.path.startswith("/files/") else None
        cut = body if limit is None else body[:limit]
        for start in range(0, len(cut), 65536):
            try:
                self.wfile.write(cut[start : start + 65536])
            except OSError:
                self.close_connection = True
                return
            time.sleep(self.server.pause)
        if len(cut) < len(body):
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


class Checkout:
    """A root whose base 1.0.0 pins two small files, and the command run on it."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.root = folder / "root"
        self.cache = folder / "cache"
        self.server = server
        real = sorted(layout.patches().glob("*/base.toml"))[-1]
        text = re.sub(r'(?m)^version = ".*"', 'version = "1.0.0"', real.read_text())
        sdist, wheel = "vllm-1.0.0.tar.gz", "vllm-1.0.0-py3-none-any.whl"
        for table, name, body in (("sdist", sdist, SDIST), ("wheel.x86_64", wheel, WHEEL)):
            server.files[name] = body
            text = re.sub(
                rf'(?m)^(\[{re.escape(table)}\]\n)name = ".*"\nsha256 = ".*"',
                rf'\1name = "{name}"\nsha256 = "{hashlib.sha256(body).hexdigest()}"',
                text,
            )
        target = self.root / "patches" / "1.0.0" / "base.toml"
        target.parent.mkdir(parents=True)
        target.write_text(text)
        self.sdist = self.cache / "files" / hashlib.sha256(SDIST).hexdigest() / sdist
        self.wheel = self.cache / "files" / hashlib.sha256(WHEEL).hexdigest() / wheel

    def start(self, *more: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "sm12x", "fetch", "--base", "1.0.0", *more],
            env={
                **kept,
                "SM12X_ROOT": str(self.root),
                "SM12X_CACHE": str(self.cache),
                "PIP_INDEX_URL": self.server.address,
                "NO_PROXY": "127.0.0.1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *more: str) -> tuple[int, str, str]:
        process = self.start(*more)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


@pytest.fixture
def checkout(tmp_path: Path, server: Server) -> Checkout:
    return Checkout(tmp_path, server)


def test_both_files_come_and_a_second_run_asks_nobody(checkout: Checkout) -> None:
    code, out, err = checkout.run()
    assert (code, err) == (0, "")
    assert out.split() == [str(checkout.sdist), str(checkout.wheel)]
    assert checkout.wheel.read_bytes() == WHEEL
    asked = len(checkout.server.asked)
    assert checkout.run()[0] == 0
    assert len(checkout.server.asked) == asked


def test_a_line_that_keeps_breaking(checkout: Checkout) -> None:
    checkout.server.cut_after = 1_000_000
    code, _, err = checkout.run()
    assert (code, err) == (0, "")
    resumed = [where for path, where in checkout.server.asked if path.endswith(".whl") and where]
    assert resumed == [f"bytes={n}-" for n in (1_000_000, 2_000_000, 3_000_000)]


def test_a_server_that_is_busy_at_first(checkout: Checkout) -> None:
    checkout.server.failures = 2
    assert checkout.run()[0] == 0


def test_nobody_there(checkout: Checkout) -> None:
    checkout.server.shutdown()
    checkout.server.server_close()
    code, _, err = checkout.run()
    assert code == 6
    assert err.count("\n") == 1
    assert "Connection refused" in err


def test_a_run_that_is_killed_resumes(checkout: Checkout) -> None:
    checkout.server.pause = 0.02
    for number, expected in ((signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = checkout.start()
        part = checkout.wheel.with_name(checkout.wheel.name + ".part")
        before = part.stat().st_size if part.exists() else 0
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > before + 300_000):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == expected
        if number == signal.SIGTERM:
            assert err.strip() == "interrupted: run the same command again to resume"
        assert not checkout.wheel.exists()
    left = part.stat().st_size
    checkout.server.pause = 0
    assert checkout.run()[0] == 0
    assert checkout.wheel.read_bytes() == WHEEL
    assert checkout.server.asked[-1][1] == f"bytes={left}-"


def test_three_at_once_fetch_once(checkout: Checkout) -> None:
    checkout.server.pause = 0.005
    running = [checkout.start() for _ in range(3)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert out.split()[1] == str(checkout.wheel)
    assert checkout.wheel.read_bytes() == WHEEL
    assert sum(path.startswith("/files/") for path, _ in checkout.server.asked) == 2
    assert [entry.name for entry in checkout.wheel.parent.iterdir()] == [checkout.wheel.name]


def test_a_disk_that_fills_up(checkout: Checkout) -> None:
    checkout.cache.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("needs root, to mount a small file system")
    argv = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(checkout.cache)]
    if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        code, _, err = checkout.run()
        assert code == 7
        assert re.fullmatch(r"error: .*\.whl.*\n", err)
        assert checkout.sdist.read_bytes() == SDIST
    finally:
        subprocess.run(["umount", str(checkout.cache)], check=True)


def test_the_real_index(tmp_path: Path) -> None:
    name = "iniconfig-2.1.0-py3-none-any.whl"
    sha = "9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760"
    try:
        path = index.fetch("iniconfig", name, sha, cache=tmp_path)
    except FetchError as error:
        if "no connection to" in str(error):
            pytest.skip(f"{pipconfig.without_credentials(pipconfig.load().indexes[0])}: {error}")
        raise
    assert path.stat().st_size == 6050
