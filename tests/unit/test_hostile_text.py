"""Text of strangers on the way out: through `main`, as a user runs each verb that prints some."""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import Machine

from sm12x import cli, layout
from sm12x.commands import doctor as doctor_command
from sm12x.core import progress, text
from sm12x.runtime import entry
from sm12x_dev import cli as dev

KERNELS = Path(__file__).parent / "data" / "kernels.so"
# OSC 52 writes to the clipboard; with an 8-bit C1 as well, DEL, CSI, and an override of direction.
CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
NASTY = f"{CLIPBOARD}\x9b31m\x7f\x1b[2J\u202egnp.exe\u2066\b"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command, and returns the exit status with all that it wrote."""

    def ran(*words: str, main: Callable[[], Any] = cli.main) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            patched.setattr(sys, "argv", ["sm12x", *words])
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out.getvalue() + err.getvalue()

    return ran


def clean(said: str) -> bool:
    """Whether no character is a control or a format one, but newline and tab."""
    return not any(
        unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\n\t"
        for char in said
    )


@pytest.mark.parametrize("where", ["name", "description", "command", "key", "list", "comment"])
@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["lint"],
        *(["render", "--to", target] for target in ("docker", "compose", "shell", "nomad")),
        ["import"],
    ],
)
def test_a_recipe_with_control_characters_is_refused(
    tmp_path: Path, run: Callable[..., tuple[int, str]], where: str, words: list[str]
) -> None:
    path = tmp_path / f"a{CLIPBOARD}.yaml"
    content: dict[str, Any] = {
        "recipe_version": "1",
        "name": "theirs",
        "model": "some/model",
        "container": "vllm-sm12x",
        "defaults": {"port": 8000},
        "command": "vllm serve {model} --port {port}",
        "env": {"A": "1"},
    }
    if where == "key":
        content["env"] = {NASTY: "1"}
    elif where == "list":
        content["mods"] = ["ok", NASTY]
    elif where != "comment":
        content[where] = NASTY
    made = json.dumps(content, indent=1)
    path.write_text(made + ("\n# \u202eok\n" if where == "comment" else ""), encoding="utf-8")
    code, said = run("recipe", *words, str(path))
    assert code in (1, 4)
    assert "control character" in said
    assert clean(said)
    code, said = run(str(path), main=entry.main)
    assert code != 0
    assert clean(said)


@pytest.mark.parametrize("word", [f"port={NASTY}", f"served_model_name={NASTY}"])
@pytest.mark.parametrize("target", ["docker", "shell", "compose", "nomad"])
def test_a_rendered_command_has_no_control_character(
    run: Callable[..., tuple[int, str]], target: str, word: str
) -> None:
    for words in ([word], ["--", "--seed", NASTY]):
        code, said = run("recipe", "render", "--to", target, "smoke", *words)
        # YAML and HCL have escapes of their own, a shell's quotes have none.
        assert code == 2 or target in ("compose", "nomad")
        assert clean(said)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_audit_of_files_with_nasty_names(
    tmp_path: Path, run: Callable[..., tuple[int, str]], words: list[str]
) -> None:
    name = NASTY.replace("/", "")
    shutil.copy(KERNELS, tmp_path / f"{name}.so")
    with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
        archive.write(KERNELS, f"{name}/a.so")
    for subject in (tmp_path, tmp_path / f"{name}.whl", tmp_path / f"{name}.gone"):
        code, said = run("audit", str(subject), *words)
        assert code in (0, 1, 4)
        assert clean(said)
        assert "52;c;" in said


def _server(monkeypatch: pytest.MonkeyPatch, echo: str) -> None:
    """A server that says ``echo`` in each field that `verify` reads, and the key as a tag."""
    asleep = False

    def answer(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        nonlocal asleep
        path = request.url.path
        if path in ("/sleep", "/wake_up"):
            asleep = path == "/sleep"
            return httpx.Response(200)
        if path == "/metrics":
            return httpx.Response(200, content=f"# HELP {echo}\n".encode())
        tags = {echo: 1, f"{'x' * 190}{echo}": 2, "weights": 0}
        rank = {"dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "host_copy_bytes": 0}
        return httpx.Response(
            200,
            json={
                "/version": {"version": echo},
                "/v1/models": {"data": [{"id": echo}]},
                "/is_sleeping": {
                    "is_sleeping": asleep,
                    "ranks": [{**rank, "asleep_bytes": tags, "awake_bytes": tags}],
                },
                "/v1/completions": {
                    "choices": [{"text": f"{echo} {'word ' * 40}{echo}"}],
                    "usage": {"completion_tokens": 3},
                },
            }[path],
        )

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)


def test_what_a_server_says_drives_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    _server(monkeypatch, NASTY)
    path = tmp_path / "report.md"
    words = ["http://x:8000", "--cycles", "2", "--gpus", "none", "--force", "--save", str(path)]
    _, said = run("verify", *words)
    assert clean(said)
    assert clean(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "VLLM_SLEEP_ADMIN_KEY", "mine"])
def test_a_secret_that_a_server_echoes_is_in_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., tuple[int, str]], name: str
) -> None:
    secret = "sk-very-secret-0123456789"  # noqa: S105
    monkeypatch.setenv(name, secret)
    _server(monkeypatch, secret)
    paths = [tmp_path / "report.json", tmp_path / "report.md"]
    words = ["http://x:8000", "--cycles", "2", "--gpus", "none", "--force"]
    words += [f"--save={path}" for path in paths]
    words += ["--key-variable", name] if name == "mine" else []
    for more in ([], ["--json"]):
        code, said = run("verify", *words, *more)
        assert code in (0, 1, 16, 17), said
        for written in (said, *(path.read_text(encoding="utf-8") for path in paths)):
            # Nor a part of it, which a text that is cut short would leave.
            assert secret[:8] not in written
    report = json.loads(paths[0].read_text(encoding="utf-8"))
    assert report["servers"][0]["model"] == f"<{name}>"
    assert report["turns"][0]["ranks"], report["turns"]


def test_tools_and_files_that_the_doctor_asks_drive_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    answers = dict.fromkeys(("docker", "podman", "dmesg"), NASTY)
    machine = Machine(
        root=tmp_path,
        answers={**answers, **fake.docker(ServerVersion=NASTY, Runtimes={NASTY: {}})},
        files=dict.fromkeys(("/proc/cmdline", "/proc/sys/kernel/osrelease"), NASTY),
        env={"HF_HOME": NASTY, "VLLM_CACHE_ROOT": f"/{NASTY}"},
    )
    monkeypatch.setattr(doctor_command, "Host", machine.host)
    for words in ([], ["--json"]):
        _, said = run("doctor", *words)
        assert clean(said)


def test_subjects_of_patches_drive_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(layout.patches(), folder)
    base = folder / (folder / "default").read_text().strip()
    for path in sorted(base.glob("*.patch")):
        path.write_text(path.read_text().replace("Subject: [PATCH", f"Subject: {NASTY}[PATCH", 1))
    monkeypatch.setattr(layout, "patches", lambda: folder)
    for words in (["list"], ["check", "--messages-only"]):
        _, said = run(*words, main=dev.main)
        assert clean(said)
        assert said


def test_words_of_the_command_line_come_back_visible(run: Callable[..., tuple[int, str]]) -> None:
    for words in ([NASTY], ["recipe", "show", NASTY], ["audit", f"/{NASTY}"], ["plan", NASTY]):
        code, said = run(*words)
        assert code
        assert clean(said)
    code, said = run(NASTY, main=entry.main)
    assert code
    assert clean(said)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_only_the_programs_own_escapes_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich moves its bars with escapes; what it is given to show has none."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    text.guard_streams()
    console = progress.stderr_console()
    assert console.is_terminal
    console.print(NASTY, markup=False, soft_wrap=True)
    with Live(console=console, transient=True) as live:
        live.update(Text(NASTY, style="red"))
        sys.stderr.write(NASTY)
    with progress.bar(NASTY, 10) as moved:
        moved(10)
    with progress.spinner(NASTY):
        pass
    said = terminal.getvalue()
    assert "\x1b[" in said
    for piece in ("\x1b]", "\x07", "\x9b", "\x7f", "\x1b[2J\\u202e", "\u202e", "\b"):
        assert piece not in said
    # A console of rich as it is lets all of that through.
    plain = Console(file=(raw := io.StringIO()))
    plain.print(NASTY, markup=False)
    assert "\x1b]" in raw.getvalue()


def test_a_coloured_word_is_all_that_passes() -> None:
    stream = text.VisibleStream(out := io.StringIO())
    stream.writelines(["\x1b[31mBAD\x1b[0m a\tb\n", "\x1b[31m\x1b]52;\x1b[0m", "\udcff\r\n"])
    assert out.getvalue() == ("\x1b[31mBAD\x1b[0m a\tb\n\\x1b[31m\\x1b]52;\\x1b[0m\\xff\\x0d\n")
    with pytest.raises(AttributeError):
        _ = stream.buffer


ODD = (
    *("", "\0", "[]", "null", "3", "NaN", "[" * 100_000, "9" * 100_000, "x" * 1_000_000),
    *('{"a":' * 50_000, '{"ServerVersion": [], "Runtimes": 3}', "-1\n" * 1000, CLIPBOARD),
    *('{"Runtimes": {"nvidia": 1e999}, "DockerRootDir": {}}', "9" * 30 + " kB", "/\0", "/x\ny"),
)
TOOLS = ("docker info", "docker volume", "docker", "podman", "dmesg")
FILES = (
    *("/proc/meminfo", "/proc/cmdline", "/proc/self/cgroup", "/proc/self/limits"),
    *("/sys/devices/system/cpu/online", "/proc/driver/nvidia/version"),
    *("/proc/sys/kernel/osrelease", "/proc/sys/vm/swappiness"),
    "/proc/sys/vm/overcommit_memory",
)


@pytest.mark.parametrize("seed", range(12))
def test_the_doctor_survives_what_tools_and_files_say(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    run: Callable[..., tuple[int, str]],
    seed: int,
) -> None:
    """A word of a megabyte was wrapped for hours, and a NUL in a volume's path a traceback."""
    chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
    answers = {name: chance.choice(ODD) for name in TOOLS if chance.random() < 0.7}
    files = {name: chance.choice(ODD) for name in FILES if chance.random() < 0.5}
    if seed == 0:
        answers |= {**fake.docker(), "docker volume": "/\0"}
        files["/proc/sys/kernel/osrelease"] = "x" * 1_000_000
    machine = Machine(
        root=tmp_path,
        answers=answers,
        files={name: said.replace("\0", "") for name, said in files.items()},
    )
    monkeypatch.setattr(doctor_command, "Host", machine.host)
    for words in ([], ["--json"]):
        code, said = run("doctor", *words)
        assert code in (0, 1)
        assert clean(said)
        assert len(said) < 1_000_000
