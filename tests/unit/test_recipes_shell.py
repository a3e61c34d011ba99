"""Commands with shell text: what is read of them, where arguments go, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.unit.test_recipes_lint import write

from sm12x.commands import recipe as verb
from sm12x.core.errors import BadFileError
from sm12x.deploy import container, local
from sm12x.plan import server as plan_server
from sm12x.recipes import edit, lint, load
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered, render
from sm12x.runtime import serve

REVISION = "0123456789abcdef0123456789abcdef01234567"
PIN = ("--revision", REVISION)
EXTRA = ("--seed", "1 2")


def recipe(folder: Path, command: str, revision: str = "", **keys: object) -> Recipe:
    """A recipe with a command as it runs; its braces are doubled here."""
    top = {"recipe_version": "1", "name": "x", "container": "y:1", **keys}
    if revision:
        top["model_revision"] = revision
    top["command"] = command.replace("{", "{{").replace("}", "}}")
    return load.load(write(folder, yaml.safe_dump(top, allow_unicode=True), "x"))


def rendered(one: Recipe, *extra: str, solo: bool = False) -> Rendered:
    return render(one, settings={}, extra=extra, environ={}, solo=solo)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve m --port 1\n# why it's 1\n", "m --port 1"),
        ("vllm serve m --port 1 # not --port 2", "m --port 1"),
        ("vllm serve m \\\n  --port 1 \\\n  # why\n", "m --port 1"),
        ("# it's first\nvllm serve m", "m"),
        ("vllm serve m \\ \n  --port 1", "m --port 1"),
        ("vllm serve m \\\n\\\n --port 1 \\", "m --port 1"),
        ("vllm serve m --served-model-name n\\\n    --port 1", "m --served-model-name n --port 1"),
        ("vllm serve m --x a#b '#c' \\#d", "m --x a#b #c #d"),
        ("vllm serve 'm'\"n\"\\o ''", "mno "),
        ("vllm serve m --x 'a \\\nb'", "m --x a \\\nb"),
        ('vllm serve m --x "a \\\nb\\"c\\d"', 'm --x a b"c\\d'),
        ("vllm serve m --x {} [1] a{b}", "m --x {} [1] a{b}"),
        ("exec /opt/bin/vllm serve m", "m"),
        ("uv run vllm serve m", "m"),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", "--model m"),
        ("python3 -m vllm.entrypoints.cli.main serve m", "m"),
        ("bash -c 'vllm serve m'", "m"),
    ],
)
def test_one_command_is_run_without_a_shell(tmp_path: Path, command: str, words: str) -> None:
    out = rendered(recipe(tmp_path, command, REVISION), *EXTRA)
    assert out.serve is not None
    assert " ".join(out.serve[:-4]) == words
    assert out.argv[-4:] == out.serve[-4:] == (*PIN, *EXTRA)
    assert out.argv[0] not in ("bash", "exec")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("vllm serve m 2>&1 | tee log", "vllm serve m@ 2>&1 | tee log"),
        ("vllm serve m > log # --port 2", "vllm serve m@ > log"),
        ("vllm serve m &\nwait $!", "vllm serve m@ &\nwait $!"),
        ("cd /x && exec vllm serve m; echo bye", "cd /x && exec vllm serve m@; echo bye"),
        ("A='x y' vllm serve m || sleep 9", "A='x y' vllm serve m@ || sleep 9"),
        ("set -e\nexport A=1\nexec vllm serve $M", "set -e\nexport A=1\nexec vllm serve $M@"),
        ('vllm serve m -tp "$(ls | wc -l)"', 'vllm serve m -tp "$(ls | wc -l)"@'),
        ("vllm serve m --x `a 'b` # c", "vllm serve m --x `a 'b`@"),
        ("(cd x; vllm serve m) 2>&1", "(cd x; vllm serve m@) 2>&1"),
        ("if a; then vllm serve m; fi", "if a; then vllm serve m@; fi"),
        ("while :; do vllm serve m; done", "while :; do vllm serve m@; done"),
        (
            "cat <<E >f\nvllm serve 'x\nE\nvllm serve m",
            "cat <<E >f\nvllm serve 'x\nE\nvllm serve m@",
        ),
        ("cat <<<'x'; true\nvllm serve m", "cat <<<'x'; true\nvllm serve m@"),
        ("echo vllm serve x\nvllm serve m", "echo vllm serve x\nvllm serve m@"),
        ("sh -c 'vllm serve m | cat'", "vllm serve m@ | cat"),
        (
            'export A="${B:-${C}}" D=${E:-\'}\'}; vllm serve m --x "${F:-"}"}"',
            'export A="${B:-${C}}" D=${E:-\'}\'}; vllm serve m --x "${F:-"}"}"@',
        ),
        ("vllm serve m --x {a,b} *", "vllm serve m --x {a,b} *@"),
    ],
)
def test_arguments_go_to_the_server_wherever_it_stands(
    tmp_path: Path, command: str, text: str
) -> None:
    out = rendered(recipe(tmp_path, command, REVISION), *EXTRA)
    assert out.argv == ("bash", "-c", text.replace("@", f" {' '.join(PIN)} --seed '1 2'"))
    assert out.serve is not None
    assert out.serve[-4:] == (*PIN, *EXTRA)
    assert not out.unpinned


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve a &\nvllm serve b",
        "f() { vllm serve m; }; f",
        "case $X in a) vllm serve m;; esac",
        "A=(1 2); vllm serve m",
        "bash -lc 'pip install x && vllm serve m'",
        "vllm serve m --x $(( $(echo 1) << 2 ))",
        "diff <(ls) x; vllm serve m",
    ],
)
def test_what_is_not_read_runs_as_it_is_and_takes_no_arguments(
    tmp_path: Path, command: str
) -> None:
    out = rendered(recipe(tmp_path, command))
    assert out.argv[:2] in (("bash", "-c"), ("bash", "-lc"))
    assert out.argv[2] in (command, "pip install x && vllm serve m")
    assert (out.serve, out.unpinned) == (None, "")
    assert out.unchecked
    for one, extra in (
        (recipe(tmp_path, command), EXTRA),
        (recipe(tmp_path, command, REVISION), ()),
    ):
        with pytest.raises(BadFileError) as error:
            rendered(one, *extra)
        assert "x.yaml:" in error.value.message
        assert (REVISION if not extra else "--seed '1 2'") in error.value.message
        assert out.unchecked in error.value.message
    path = write(tmp_path, recipe(tmp_path, command).path.read_text(), "pin")
    with pytest.raises(BadFileError):
        edit.pin(path, revision=REVISION)
    assert "model_revision" not in path.read_text()


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("vllm serve m \\\n  # a comment\n  --port 1", 3),
        ("vllm serve m\n--port 1", 2),
        ("vllm serve m \\\n\n  --port 1", 3),
        ("vllm serve 'm", 1),
        ('vllm serve \\\n"m', 2),
        ("vllm serve $(m", 0),
        ("# nothing", 0),
        ("", 0),
    ],
)
def test_what_no_shell_runs_is_a_fault(tmp_path: Path, command: str, line: int) -> None:
    one = recipe(tmp_path, command)
    with pytest.raises(BadFileError) as error:
        rendered(one)
    assert f"line {line}" in error.value.message or not line
    _, (found,) = lint.lint(one.path)
    assert found.level == lint.ERROR


@pytest.mark.parametrize("command", ["uvicorn a", "cd x && serve", "if a; then uvicorn b; fi"])
def test_a_pin_that_is_not_applied_is_said(tmp_path: Path, command: str) -> None:
    one = recipe(tmp_path, command, REVISION)
    out = rendered(one)
    assert REVISION not in " ".join(out.argv)
    assert out.unpinned
    _, found = lint.lint(one.path)
    lines = [finding.line for finding in found if finding.level == lint.WARNING]
    assert one.lines["model_revision"] in lines
    _, remarks = serve.prepare(one, [], {})
    assert any(out.unpinned in remark for remark in remarks)
    assert out.unpinned in local.docker(one, image="", settings={}, extra=())
    done = CliRunner().invoke(
        verb.command, ["pin", str(one.path), "--model-revision", REVISION], catch_exceptions=False
    )
    assert out.unpinned in done.output


def test_words_for_another_program_go_to_the_last_one_or_nowhere(tmp_path: Path) -> None:
    out = rendered(recipe(tmp_path, "cd x && uvicorn a # b"), *EXTRA)
    assert out.argv == ("bash", "-c", "cd x && uvicorn a --seed '1 2'")
    for command in ("uvicorn a | tee b", "uvicorn a &", "if a; then uvicorn b; fi", "a || b"):
        with pytest.raises(BadFileError):
            rendered(recipe(tmp_path, command), *EXTRA)


@pytest.mark.parametrize(
    "end", ["", " # --gpu-memory-utilization 0.95", " 2>&1 | tee x", " &\nwait"]
)
def test_options_are_those_of_the_server(tmp_path: Path, end: str) -> None:
    command = "vllm serve m --host ::1 --gpu-memory-utilization 0.5 -tp 2 --enable-sleep-mode"
    one = recipe(tmp_path, f"{command}{end}")
    assert plan_server.from_recipe(one).utilization == 0.5
    assert "  machines: 2\n" in edit.imported(one.path)
    assert "    level: 1\n" in edit.imported(one.path)
    _, found = lint.lint(one.path)
    assert one.lines["command"] not in [finding.line for finding in found]
    text = f"vllm serve m # --distributed-executor-backend ray{end}"
    assert not container.uses_ray(recipe(tmp_path, text))


def test_a_single_machine_drops_the_backend_that_stands_on_two_lines(tmp_path: Path) -> None:
    text = "vllm serve m --distributed-executor-backend \\\n ray --port 1"
    assert rendered(recipe(tmp_path, text), solo=True).serve == ("m", "--port", "1")


@pytest.mark.parametrize(
    ("key", "secret"),
    [("$KEY", 0), ("${KEY}", 0), ('"$KEY"', 0), ("${KEY:?}", 0), ("abc", 1), ("${K:-abc}", 1)],
)
@pytest.mark.parametrize("option", ["--api-key ", "--api-key=", "--hf-token "])
def test_a_variable_is_no_secret(tmp_path: Path, option: str, key: str, secret: int) -> None:
    _, found = lint.lint(recipe(tmp_path, f"vllm serve m {option}{key}").path)
    assert len([finding for finding in found if "every reader" in finding.text]) == secret


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("vllm serve m --port {port} --served-model-name a b", "a"),
        ("vllm serve m --port {port} --served-model-name=a | cat", "a"),
        ("vllm serve /models/m --port {port}", "/models/m"),
        ("vllm serve --port {port} --model o/m", "o/m"),
        ("serve --port {port}", "repo/x"),
    ],
)
def test_llama_swap_has_the_name_that_the_server_knows(
    tmp_path: Path, command: str, name: str
) -> None:
    text = (
        "recipe_version: '1'\nname: x\ncontainer: y:1\nmodel: repo/x\n"
        f"defaults: {{port: 8000, served_model_name: unused}}\ncommand: {command}\n"
    )
    one = load.load(write(tmp_path, text, "x"))
    made = local.llama_swap(one, image="", settings={}, extra=())
    assert list(yaml.safe_load(made)["models"]) == [name]
    if name != "repo/x":
        made = local.llama_swap(one, image="", settings={}, extra=("--served-model-name", "z"))
        assert list(yaml.safe_load(made)["models"]) == ["z"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("x-a: 1\nservices:\n  a: {image: b}\n", 2, "compose"),
        ("models:\n  a: {cmd: b}\n", 1, "llama-swap"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", 1, "Kubernetes"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    one, faults = load.inspect(write(tmp_path, text, "x"))
    assert one is None
    (fault,) = faults
    assert fault.line == line
    assert what in fault.text
    assert fault.next_step


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("rec", "\ufeffrec"), ("serve m", "serve\tm")])
def test_files_of_other_editors(tmp_path: Path, change: tuple[str, str]) -> None:
    text = "recipe_version: '1'\nname: x\ncontainer: y\ncommand: |\n  vllm serve m \\\n    --a 1\n"
    path = tmp_path / "x.yaml"
    path.write_bytes(text.replace(*change).encode())
    assert rendered(load.load(path)).argv == ("vllm", "serve", "m", "--a", "1")
