"""The health check against a real server, and the probes with real libraries and processes."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sm12x.core import process
from sm12x.core.errors import ToolFailedError
from sm12x.runtime import health
from sm12x.runtime.check import native

# Stands where torch would: the probe asks it for nothing but the operator registry.
TORCH = """\
class _C:
    @staticmethod
    def _dispatch_get_all_op_names():
        return ["_C::one"]
"""
MODULE = """\
#include <Python.h>
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", 0, -1, 0}};
{extra}
PyMODINIT_FUNC PyInit_{name}(void) {{ {body} return PyModule_Create(&definition); }}
"""


@contextmanager
def serving(
    answers: dict[str, tuple[int, bytes]], keys: list[str | None] | None = None
) -> Iterator[int]:
    """A server's port; ``keys`` gets the Authorization of each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if keys is not None:
                keys.append(self.headers["Authorization"])
            if self.path not in answers:
                # As an engine in the middle of /sleep: it takes the request and says nothing.
                release.wait(30)
                return
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    release = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def verdict(port: int) -> health.Verdict:
    return health.check(health.Listener(host="127.0.0.1", port=port), health.get_http)


def test_a_sleeping_server_is_healthy() -> None:
    with serving({"/health": (200, b""), "/is_sleeping": (200, b'{"is_sleeping": true}')}) as port:
        assert verdict(port) == health.Verdict(code=0, text=f"127.0.0.1:{port} sleeps")


@pytest.mark.parametrize(
    ("given", "variable", "sent"),
    [("", "", None), ("k", "", "Bearer k"), ("", "v", "Bearer v"), ("k", "v", "Bearer k")],
)
def test_the_key_of_the_server_is_sent(
    given: str, variable: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    seen: list[str | None] = []
    with serving({"/is_sleeping": (200, b"{}")}, seen) as port:
        health.get_http(health.Listener(host="127.0.0.1", port=port, key=given), "/is_sleeping", 5)
    assert seen == [sent]


def test_an_engine_that_is_deaf_while_it_falls_asleep_is_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "SLEEP_SECONDS", 0.2)
    with serving({"/health": (200, b"")}) as port:
        assert verdict(port) == health.Verdict(code=0, text=f"127.0.0.1:{port} answers")


def test_a_dead_engine_and_a_closed_port_are_not_healthy() -> None:
    with serving({"/health": (503, b""), "/is_sleeping": (500, b"")}) as port:
        assert verdict(port).code == 1
    assert "is not open" in verdict(port).text


@pytest.mark.xdist_group("vllm serve")
def test_the_command_finds_the_server_that_runs_here(tmp_path: Path) -> None:
    # A process that looks as `vllm serve` does, and serves /health.
    script = tmp_path / "vllm"
    script.write_text(
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "s = http.server.HTTPServer(('127.0.0.1', int(sys.argv[2])), H)\n"
        "print(s.server_address[1], flush=True)\n"
        "s.serve_forever()\n"
    )
    with serving({}) as port:
        pass
    argv = [sys.executable, str(script), "serve", str(port), "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        done = process.run([sys.executable, "-P", "-m", "sm12x.runtime", "health"], check=False)
    finally:
        server.terminate()
        server.communicate()
    assert (done.returncode, done.stdout) == (0, f"127.0.0.1:{port} answers\n")


Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    include = process.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
    ).stdout.strip()

    def one(name: str, *, body: str = "", extra: str = "", link: tuple[str, ...] = ()) -> str:
        source = tmp_path / f"{name}.c"
        source.write_text(MODULE.format(name=name, body=body, extra=extra))
        out = tmp_path / f"{name}.abi3.so"
        process.run(["gcc", "-shared", "-fPIC", f"-I{include}", "-o", out, source, *link])
        return out.name

    return one


def loaded(tmp_path: Path, *libraries: str, env: dict[str, str | None] | None = None) -> object:
    question = {"site": str(tmp_path), "libraries": list(libraries)}
    answer = native.prober(tmp_path)("modules", question, env or {})
    assert answer["ops"] == ["_C::one"]
    return answer["libraries"]


def test_real_modules_load_or_say_why_not(tmp_path: Path, build: Build) -> None:
    good = build("good")
    broken = build("broken", body="not_there();", extra="void not_there(void);")
    plain = tmp_path / "plain.so"
    process.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", plain, "/dev/null"])
    (tmp_path / "_C.cpython-310-x86_64-linux-gnu.so").write_bytes(b"")
    found = loaded(
        tmp_path, good, broken, "plain.so", "_C.cpython-310-x86_64-linux-gnu.so", "missing.so"
    )
    assert isinstance(found, dict)
    assert found[good] == ""
    assert "undefined symbol: not_there" in found[broken]
    assert found["plain.so"] == ""
    assert found["_C.cpython-310-x86_64-linux-gnu.so"] == "other-python"
    assert "No such file" in found["missing.so"]


def test_a_module_that_crashes_is_named(tmp_path: Path, build: Build) -> None:
    crash = build("crash", body="__builtin_trap();")
    with pytest.raises(ToolFailedError, match=f"loading {crash}"):
        loaded(tmp_path, crash)


def test_modules_of_an_extra_are_imported_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sound.py").write_text("import os\nprint('hello')\n")
    (tmp_path / "broken.py").write_text("import absent\n")
    (tmp_path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = native.prober(tmp_path)
    assert ask("imports", ("sound", "broken"), {}) == {
        "sound": "",
        "broken": "ModuleNotFoundError: No module named 'absent'",
    }
    with pytest.raises(ToolFailedError, match="importing deadly"):
        ask("imports", ("sound", "deadly"), {})


def test_the_stand_in_is_found_by_the_probe_alone(tmp_path: Path, build: Build) -> None:
    folder = tmp_path / "check"
    folder.mkdir()
    stand_in = folder / "libcuda.so.1"
    source = tmp_path / "cuda.c"
    source.write_text("int cuInit(unsigned f) { return 100; }\n")
    process.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stand_in, source])
    user = build("user", body="cuInit(0);", extra="int cuInit(unsigned);", link=(str(stand_in),))
    env: dict[str, str | None] = {"LD_LIBRARY_PATH": str(folder)}
    assert loaded(tmp_path, user, env=env) == {user: ""}
    ask = native.prober(tmp_path)
    assert ask("driver", None, env) == str(stand_in)
    found = ask("driver", None, {"LD_LIBRARY_PATH": None})
    assert found is None or not Path(found).samefile(stand_in)


def test_a_command_takes_the_place_of_the_entry_point() -> None:
    """Signals reach what was started: it has the entry point's own process id."""
    started = subprocess.Popen(
        [sys.executable, "-P", "-m", "sm12x.runtime", "sh", "-c", "echo $$; exec sleep 60"],
        stdout=subprocess.PIPE,
        env={**os.environ, "SM12X_IMAGE_ROOT": "/nowhere"},
    )
    assert started.stdout is not None
    assert int(started.stdout.readline()) == started.pid
    started.terminate()
    started.communicate()
    assert started.returncode == -15


def test_a_wrong_word_is_one_line_and_exit_2() -> None:
    done = process.run([sys.executable, "-P", "-m", "sm12x.runtime", "no-such-word"], check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'no-such-word' is neither a recipe")
    assert done.stderr.count("\n") == 1


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "for-another-machine"
    program.write_bytes(b"\x7fELF of another kind")
    program.chmod(0o755)
    (tmp_path / "recipes").mkdir()
    env = {**os.environ, "SM12X_IMAGE_ROOT": str(tmp_path)}
    words = [sys.executable, "-P", "-m", "sm12x.runtime"]
    for word, code, said in (
        (str(program), 13, "cannot be started: exec format error"),
        ("n" * 300, 4, "file name too long"),
    ):
        done = subprocess.run([*words, word], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*words, "recipes"],
            env=env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [*words, "recipes"],
            env=env,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_check_without_a_ledger_is_one_line(tmp_path: Path) -> None:
    done = process.run(
        [sys.executable, "-P", "-m", "sm12x.runtime", "check"],
        env={"SM12X_IMAGE_ROOT": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 4
    assert "ledger.json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_probe_keeps_what_is_printed_out_of_its_answer(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('hello from a library')\n" + TORCH)
    done = process.run(
        [sys.executable, "-P", "-m", "sm12x.runtime.check.probe", "modules"],
        env={"PYTHONPATH": str(tmp_path)},
        stdin=json.dumps({"site": str(tmp_path), "libraries": []}),
    )
    assert json.loads(done.stdout)["libraries"] == {}
    assert "hello from a library" in done.stderr


@pytest.mark.parametrize("words", [["health"], ["recipes"], ["no-such-word"]])
def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, words: list[str]) -> None:
    """A model's folder, or a volume, with modules of the names that the entry point imports."""
    told = tmp_path / "imported"
    for name in ("json", "click", "yaml", "vllm", "sm12x"):
        (tmp_path / name).mkdir()
        text = f"open({str(told)!r}, 'a').write({name!r})\n"
        (tmp_path / name / "__init__.py").write_text(text)
    env = {"SM12X_IMAGE_ROOT": str(tmp_path), "PYTHONPATH": None}
    command = [sys.executable, "-P", "-m", "sm12x.runtime", *words]
    process.run(command, cwd=tmp_path, env=env, check=False)
    assert not told.exists()
    # The control: without -P they are.
    process.run([command[0], *command[2:]], cwd=tmp_path, env=env, check=False)
    assert told.exists()
