"""Recipe files: what is read, what is refused, what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError, UsageError
from sm12x.recipes import load
from sm12x.recipes.model import Memory, MemoryTerm, Recipe
from sm12x.recipes.render import Rendered, render, settings_from

MINIMAL = """\
recipe_version: "1"
name: Small
container: some-image
defaults:
  port: 8000
  tensor_parallel: 2
  gpu_memory_utilization: "0.5g"
env:
  HERE: $BASE/one
  THERE: ${HERE}/two/$NOWHERE
command: |
  vllm serve some/model \\
    --port {port} -tp {tensor_parallel} \\
    --gpu-memory-utilization {gpu_memory_utilization} \\
    --distributed-executor-backend ray \\
    --compilation-config '{{"mode": 3}}' \\
"""


def recipe(tmp_path: Path, text: str = MINIMAL) -> Recipe:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return load.load(path)


def rendered(
    one: Recipe, *extra: str, settings: dict[str, str] | None = None, solo: bool = False
) -> Rendered:
    return render(one, settings=settings or {}, extra=extra, environ={"BASE": "/b"}, solo=solo)


def test_a_command_is_filled_in_and_split_as_a_shell_would(tmp_path: Path) -> None:
    out = rendered(recipe(tmp_path), "--seed", "1 2", settings={"port": "9"})
    assert out.argv == (
        *("vllm", "serve", "some/model", "--port", "9", "-tp", "2"),
        *("--gpu-memory-utilization", "0.5g", "--distributed-executor-backend", "ray"),
        *("--compilation-config", '{"mode": 3}', "--seed", "1 2"),
    )
    assert out.serve == out.argv[2:]


def test_env_expands_in_order_and_an_unset_name_is_empty(tmp_path: Path) -> None:
    assert rendered(recipe(tmp_path)).env == {"HERE": "/b/one", "THERE": "/b/one/two/"}
    assert rendered(recipe(tmp_path), settings={"HERE": ""}).env == {"HERE": "", "THERE": "/two/"}


def test_solo_forces_one_gpu_unless_it_is_asked_for(tmp_path: Path) -> None:
    argv = rendered(recipe(tmp_path), solo=True).argv
    assert argv[argv.index("-tp") + 1] == "1"
    assert "--distributed-executor-backend" not in argv
    assert "ray" not in argv
    argv = rendered(recipe(tmp_path), solo=True, settings={"tensor_parallel": "4"}).argv
    assert argv[argv.index("-tp") + 1] == "4"


def test_a_command_that_needs_a_shell_gets_one(tmp_path: Path) -> None:
    text = MINIMAL.split("command:")[0] + 'command: cd $HOME && exec serve "a b" --port {port}\n'
    out = rendered(recipe(tmp_path, text), "--x", "y z")
    assert out.argv == ("bash", "-c", "cd $HOME && exec serve \"a b\" --port 8000 --x 'y z'")
    assert out.serve is None


def test_a_setting_the_recipe_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no setting 'prot'; perhaps you meant port"):
        rendered(recipe(tmp_path), settings={"prot": "1"})


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"SM12X_PORT": "1", "SM12X_ROOT": "/x", "SM12X_TENSOR_PARALEL": "2", "PORT": "3"}
    found, remarks = settings_from(environ, recipe(tmp_path))
    assert found == {"port": "1"}
    assert remarks == [
        "SM12X_TENSOR_PARALEL is not a setting of small; perhaps you meant SM12X_TENSOR_PARALLEL"
    ]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("container: some-image\n", "", "small.yaml:1: container is missing"),
        ('recipe_version: "1"', 'recipe_version: "3"', "small.yaml:1: recipe_version is '3'"),
        ("defaults:", "default:", "4: default is not a known key; perhaps you meant defaults"),
        ("{port}", "{prot}", "11: command asks for {prot}, defaults has none; perhaps .* port"),
        ("'{{\"mode\": 3}}'", "'{\"mode\": 3}'", "11: command has .*: double the braces of JSON"),
        ("{port}", "{port", "11: command is not a str.format template"),
        ("$BASE/one", "[true]", "9: env.HERE is not a string or number: put it in quotes"),
        ("$BASE/one", "$(id)", "9: env.HERE runs a command"),
        ("some-image", '"a; id"', "3: container is 'a; id', which names no image"),
        ("some-image", "--privileged", "3: container is '--privileged'"),
        ("some-image", '""', "3: container is ''"),
        ("  HERE:", "  A B; id:", "9: env.A B; id is not a variable's name"),
        ("  HERE:", "  A.B:", "9: env.A.B is not a variable's name"),
        ("$BASE/one", '"\\0"', "9: has a control character"),
        ("name: Small", "name: [Small", "small.yaml:3: is not YAML"),
        ("name: Small", "name: 3", "2: name has the wrong type"),
        ("  port: 8000", "  port: [8000]", "5: defaults.port is not a string, number or truth"),
        ("name: Small", "name: Small\nname: Large", "3: name is given twice, first on line 2"),
        ("name: Small", "name: Small\nmods: one", "3: mods is not a list of strings"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in MINIMAL
    with pytest.raises(BadFileError, match=fault):
        recipe(tmp_path, MINIMAL.replace(old, new, 1))


BLOCK = """\
sm12x:
  hardware: [gb10]
  gpus: 1
  sleep: {level: never, reason: it hangs}
  status:
    state: untested
    source: written from documents
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("gb10", "gb100", "18: sm12x.hardware.0. is 'gb100'.* perhaps .* gb10"),
        ("[gb10]", "[]", "18: sm12x.hardware has 0 items"),
        ("  gpus: 1\n", "", "17: sm12x.gpus is missing"),
        ("gpus: 1", "gpus: 1\n  pool: [a]", "20: sm12x.pool does not name two or more recipes"),
        ("gpus: 1", "gpus: 1\n  pool: [../a, b]", "20: sm12x.pool has '../a', not the name"),
        ("gpus: 1", 'gpus: 1\n  pool: ["a\\0", b]', "20: sm12x.pool has"),
        ("gpus: 1", f"gpus: 1\n  pool: [{'a' * 300}, b]", "20: sm12x.pool has"),
        ("gpus: 1", f"gpus: {10**400}", "19: sm12x.gpus"),
        ("gpus: 1", "gpus: 1\n  machines: 1000000000", "20: sm12x.machines is 1000000000"),
        ("gpus: 1", "gpus: 1\n  machines: 0", "20: sm12x.machines is 0"),
        ("gpus: 1", "gpus: 1\n  memory: {wieghts: {}}", "20: .*wieghts is not .* weights"),
        ("gpus: 1", "gpus: 1\n  memory: {kv: {gib: [2, 1]}}", "20: sm12x.memory.kv.gib is neither"),
        (
            "gpus: 1",
            "gpus: 1\n  memory: {kv: {gib: 1, basis: guessed, source: x}}",
            "20: sm12x.memory.kv.basis is 'guessed'",
        ),
        (
            "gpus: 1",
            "gpus: 1\n  memory: {kv: {gib: 1, basis: measured}}",
            "20: sm12x.memory.kv.source is missing",
        ),
        ("state: untested", "state: verified", "21: sm12x.status.date is missing: say when"),
        ("untested", "untested\n    date: May", "sm12x.status.date is 'May', not YYYY-MM-DD"),
        ("gpus: 1", "gpus: many", "19: sm12x.gpus has the wrong type"),
        ("level: never", "level: 3", "20: sm12x.sleep.level is 3, not 1, 2 or never"),
        (", reason: it hangs", "", "20: sm12x.sleep.reason is missing"),
        ("untested", "tested", "22: sm12x.status.state is 'tested'"),
        ("    source: written from documents\n", "", "21: sm12x.status.source is missing"),
        ("gpus: 1", "gpus: 1\n  colour: red", "20: sm12x.colour is not a known key"),
    ],
)
def test_our_block_is_strict(tmp_path: Path, old: str, new: str, fault: str) -> None:
    with pytest.raises(BadFileError, match=fault):
        recipe(tmp_path, MINIMAL + BLOCK.replace(old, new, 1))


def test_a_truth_value_in_env_is_read_as_eugrs_runner_does_but_not_in_ours(tmp_path: Path) -> None:
    text = MINIMAL.replace("$BASE/one", "true")
    assert recipe(tmp_path, text).env["HERE"] == "True"
    with pytest.raises(BadFileError, match=r"env\.HERE is not a string"):
        recipe(tmp_path, text + BLOCK)


def test_the_block_is_read_whole(tmp_path: Path) -> None:
    more = "  memory:\n    outside: {gib: [1, 2.5], basis: reported, source: x}\n  machines: 2\n"
    block = recipe(tmp_path, MINIMAL + BLOCK + more).sm12x
    assert block is not None
    assert block.machines == 2
    assert block.memory.weights is None
    assert block.memory.outside == MemoryTerm(gib=2.5, low=1, basis="reported", source="x")
    assert (block.sleep.level, block.sleep.reason) == (0, "it hangs")


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL.replace("name: Small", "name: 3") + BLOCK.replace("gb10", "gb1"))
    assert [fault.line for fault in load.inspect(path)[1]] == [2, 18]


def test_a_file_of_others_reads_without_our_block(tmp_path: Path) -> None:
    one = recipe(tmp_path, MINIMAL + "benchmark:\n  runs: 3\ncluster_only: true\n")
    assert one.sm12x is None
    assert one.cluster_only


RECIPES = sorted((layout.root() / "recipes").glob("*.yaml"))


def test_the_recipe_that_ships(tmp_path: Path) -> None:
    one = load.load(layout.root() / "recipes" / "deepseek-v4-flash-rtx-pro-6000-tp4.yaml")
    out = render(one, settings={}, environ={}, solo=False)
    assert out.env == {"NCCL_NVLS_ENABLE": "0", "VLLM_TRITON_MLA_SPARSE": ""}
    golden = Path(__file__).with_name("data") / "recipe-deepseek-v4-flash.txt"
    assert "\n".join(out.argv) + "\n" == golden.read_text()
    assert one.sm12x is not None
    assert one.sm12x.memory.outside is not None
    # Patches 0026 and 0027 took the 22 GiB that are reported for another build.
    assert (one.sm12x.memory.outside.low, one.sm12x.memory.outside.gib) == (1.3, 1.9)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_honest(path: Path) -> None:
    one = load.load(path)
    assert one.key == one.name
    assert one.container == "vllm-sm12x"
    assert one.sm12x is not None
    for name in one.sm12x.pool:
        assert path.with_name(f"{name}.yaml").is_file()
    # Whoever can reach /sleep can stop the service: API keys do not cover it.
    # A pool passes no such path on, and its servers listen on 127.0.0.1.
    if one.sm12x.sleep.level and not one.sm12x.pool:
        assert one.defaults["host"] == "127.0.0.1"
    out = render(one, settings={}, environ={}, solo=False)
    assert out.serve is not None or one.sm12x.pool
    assert ("--enable-sleep-mode" in (out.serve or ())) == (
        bool(one.sm12x.sleep.level) and not one.sm12x.pool
    )


def test_every_setting_and_flag_has_its_reason() -> None:
    for path in RECIPES:
        text = path.read_text()
        comments = " ".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
        one = load.load(path)
        for flag in re.findall(r"--[a-z][a-z-]+", one.command):
            name = flag.removeprefix("--").replace("-", "_")
            named = {"tensor_parallel_size": "tensor_parallel"}.get(name, name)
            assert named in one.defaults or flag in comments, f"{path.name}: {flag}"
        lines = text.splitlines()
        for key, number in one.lines.items():
            if key.startswith(("defaults.", "env.")) and key != "defaults.port":
                # The line above, or one comment over a group of variables that belong together.
                above = lines[number - 2].strip()
                assert above.startswith("#") or above.split(":")[0].isupper(), f"{path.name}: {key}"


def test_a_shell_that_becomes_vllm_is_seen_as_vllm(tmp_path: Path) -> None:
    text = MINIMAL.split("command:")[0] + (
        "command: make '&& x' && exec vllm serve 'a && b' --port {port}\n"
    )
    assert rendered(recipe(tmp_path, text), "--x").serve == ("a && b", "--port", "8000", "--x")


def test_a_pinned_revision_takes_effect(tmp_path: Path) -> None:
    out = rendered(recipe(tmp_path, f"model_revision: abc\n{MINIMAL}"), "--x")
    assert out.argv[-3:] == ("--revision", "abc", "--x")
    text = MINIMAL.replace("--port", "--revision def --port")
    out = rendered(recipe(tmp_path, f"model_revision: abc\n{text}"))
    assert "abc" not in out.argv


def _command(tmp_path: Path, command: str) -> Rendered:
    path = tmp_path / "small.yaml"
    path.write_text(f"recipe_version: '1'\nname: x\ncontainer: y\ncommand: |\n  {command}\n")
    return render(load.load(path), settings={}, extra=("--seed", "1 2"), environ={}, solo=False)


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("exec vllm serve m", ("vllm", "serve", "m", "--seed", "1 2")),
        ("exec exec vllm serve m", ("bash", "-c", "exec exec vllm serve m --seed '1 2'")),
        ("exec -a x vllm serve m", ("bash", "-c", "exec -a x vllm serve m --seed '1 2'")),
        ("exec", ("bash", "-c", "exec --seed '1 2'")),
        ("A=1 B=2 vllm serve m", ("bash", "-c", "A=1 B=2 vllm serve m --seed '1 2'")),
        ("command vllm serve m", ("bash", "-c", "command vllm serve m --seed '1 2'")),
        ("time vllm serve m", ("bash", "-c", "time vllm serve m --seed '1 2'")),
        ("executor serve m", ("executor", "serve", "m", "--seed", "1 2")),
    ],
)
def test_what_only_a_shell_has_is_given_to_one(
    tmp_path: Path, command: str, argv: tuple[str, ...]
) -> None:
    assert _command(tmp_path, command).argv == argv


@pytest.mark.parametrize("first", ["exec ", "", "A=1 ", "A='x y' exec ", "cd /x && exec "])
def test_the_server_is_found_behind_what_a_shell_does(tmp_path: Path, first: str) -> None:
    assert _command(tmp_path, f"{first}vllm serve m").serve == ("m", "--seed", "1 2")


# Nine times nine times nine ...
LAUGHS = "a0: &a0 x\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: &x [*x]", ":1: is nested too deeply"),
        ("[" * 3000, ":1: is nested too deeply"),
        (LAUGHS, ":1: is not YAML: more than"),
        ("", ":1: is not a mapping"),
        ("- a", ":1: is not a mapping"),
        ("a: \0", ":1: has a control character"),
        ("a: 1\n--- 2\n", ":2: is not YAML"),
        (f"{MINIMAL}? [a]\n: b\n", ":17: a key is not text"),
        (MINIMAL.replace("Small", '"\\ud800"'), ":2: value cannot be read"),
        (MINIMAL.replace("Small", "!!int x"), ":2: value cannot be read"),
        (MINIMAL.replace("8000", "!!bool x"), ":5: value cannot be read"),
        (MINIMAL.replace("8000", "!!binary aGk="), ":5: bytes is not text"),
        (MINIMAL.replace("8000", "!x y"), ":5: value cannot be read"),
        (f"{MINIMAL}sm12x:\n", ":17: sm12x has the wrong type (NoneType)"),
        (
            f"{MINIMAL}{BLOCK}  memory:\n    kv:\n",
            ":25: sm12x.memory.kv has the wrong type (NoneType)",
        ),
        (
            f"{MINIMAL}{BLOCK}  memory:\n    kv: {{gib: .inf, basis: measured, source: x}}\n",
            ":25: sm12x.memory.kv.gib is neither a number",
        ),
        (
            f"{MINIMAL}{BLOCK}  memory:\n    kv: {{gib: 1, low: 1, basis: measured, source: x}}\n",
            ":25: sm12x.memory.kv.low is not a known key",
        ),
        (
            f"{MINIMAL}{BLOCK}  memory:\n    kv: {{gib: {10**400}, basis: measured, source: x}}\n",
            ":25: sm12x.memory.kv.gib is neither a number",
        ),
        # The lines are those of the one that counts.
        (f"{MINIMAL}{BLOCK}sm12x:\n  gpus: 1\n", ":24: sm12x.hardware is missing"),
    ],
)
def test_a_strange_file_has_faults_and_no_traceback(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    one, faults = load.inspect(path)
    assert one is None
    assert fault in "\n".join(map(str, faults))


def test_a_key_without_a_value_is_as_one_left_out(tmp_path: Path) -> None:
    bare = "mods:\nbuild_args:\n"
    one = recipe(tmp_path, MINIMAL + bare + BLOCK + "  memory:\n  notes:\n  pool:\n")
    assert (one.mods, one.build_args) == ((), ())
    assert one.sm12x is not None
    assert (one.sm12x.notes, one.sm12x.pool) == ((), ())
    assert one.sm12x.memory == Memory()


def test_a_date_is_the_text_that_stands_there(tmp_path: Path) -> None:
    text = MINIMAL + BLOCK.replace("source:", "date: 2026-05-16\n    source:")
    one = recipe(tmp_path, text.replace("8000", "2026-05-16 10:00"))
    assert one.sm12x is not None
    assert one.sm12x.status.date == "2026-05-16"
    assert one.defaults["port"] == "2026-05-16 10:00"


@pytest.mark.parametrize("field", ["{port[0]}", "{port.x}", "{port:>9999999}", "{port:x>{port}d}"])
def test_a_field_that_cannot_be_filled_in_is_a_fault(tmp_path: Path, field: str) -> None:
    one = recipe(tmp_path, MINIMAL.replace("{port}", field))
    with pytest.raises(BadFileError, match="the command cannot be filled in"):
        rendered(one, settings={"port": "x"} if field.endswith("d}") else {})
