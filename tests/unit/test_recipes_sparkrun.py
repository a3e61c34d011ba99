"""Recipes in sparkrun's format: read, linted and rendered as those of version 1."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from sm12x.core.errors import BadFileError
from sm12x.deploy import container
from sm12x.recipes import edit, lint, load
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import Rendered, render

FULL = """\
recipe_version: "2"
model: some/Model
model_revision: 0123456789abcdef0123456789abcdef01234567
runtime: vllm-distributed
container: some-image@sha256:1
min_nodes: 1
max_nodes: 1
builder: docker-pull
metadata:
  description: a model
  notes: [one, two]
defaults:
  port: 8000
  base: http://localhost:{port}
  tokens: 3
  rope: '{"rope_parameters":{"factor":4.0}}'
  graphs: {mode: 0, sizes: [1, 2]}
env:
  HF_HUB_OFFLINE: "1"
  QUICK: true
pre_exec: [mkdir -p /cache/x]
command: |
  vllm serve {model} \\
    --port {port} --origin {base}/v1 \\
    --speculative-config '{"method":"mtp","n":{tokens}}' \\
    --limit '{"image":{"count":4}}' --left {as_it_is} \\
    --hf-overrides '{rope}' --compilation-config '{graphs}'
"""


def written(folder: Path, text: str, name: str = "theirs.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def rendered(one: Recipe, **settings: str) -> Rendered:
    return render(one, settings=settings, environ={}, solo=False)


def test_a_recipe_is_read(tmp_path: Path) -> None:
    one = load.load(written(tmp_path, FULL))
    assert (one.key, one.name, one.description) == ("theirs", "theirs", "a model")
    assert (one.model, one.container) == ("some/Model", "some-image@sha256:1")
    assert (one.solo_only, one.cluster_only) == (True, False)
    assert one.env == {"HF_HUB_OFFLINE": "1", "QUICK": "True"}
    assert one.not_applied == ("builder", "pre_exec")
    # A setting that refers to another is part of the command.
    assert list(one.defaults) == ["model", "port", "tokens", "rope", "graphs"]


def test_a_command_is_filled_in(tmp_path: Path) -> None:
    one = load.load(written(tmp_path, FULL))
    words = rendered(one, port="9", tokens="5").serve
    assert words is not None
    assert words[0] == "some/Model"
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--port"] == "9"
    assert options["--origin"] == "http://localhost:9/v1"
    assert json.loads(options["--speculative-config"]) == {"method": "mtp", "n": 5}
    assert json.loads(options["--limit"]) == {"image": {"count": 4}}
    assert options["--left"] == "{as_it_is}"
    assert json.loads(options["--hf-overrides"]) == {"rope_parameters": {"factor": 4.0}}
    assert json.loads(options["--compilation-config"]) == {"mode": 0, "sizes": [1, 2]}
    assert options["--revision"] == one.model_revision


def test_the_model_is_a_setting(tmp_path: Path) -> None:
    one = load.load(written(tmp_path, FULL))
    words = rendered(one, model="/models/mine").serve
    assert words is not None
    assert words[0] == "/models/mine"


def test_doubled_braces_are_those_of_version_1(tmp_path: Path) -> None:
    text = FULL[: FULL.index("command:")] + (
        "command: vllm serve {model} --x '{{\"a\":{tokens}}}' --y '{\"b\":{tokens}}'\n"
    )
    words = rendered(load.load(written(tmp_path, text))).serve
    assert words is not None
    assert words[:5] == ("some/Model", "--x", '{"a":3}', "--y", '{"b":3}')


def test_without_a_command_settings_are_options(tmp_path: Path) -> None:
    text = FULL[: FULL.index("defaults:")] + (
        "defaults:\n  port: 8000\n  tensor_parallel: 2\n  max_model_len: 4096\n"
        "  enable_prefix_caching: true\n  enforce_eager: false\n  nothing:\n"
        "  enable_chunked_prefill: false\n  async_scheduling: false\n"
        '  speculative_config: {"method": "mtp"}\n'
    )
    words = rendered(load.load(written(tmp_path, text))).serve
    assert words is not None
    assert words[:5] == ("some/Model", "--port", "8000", "--tensor-parallel-size", "2")
    assert "--enable-prefix-caching" in words
    assert not {"--enforce-eager", "--no-enforce-eager", "--async-scheduling"} & set(words)
    assert {"--no-enable-chunked-prefill", "--no-async-scheduling"} <= set(words)
    assert "--nothing" not in words
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve {model} --a", "some/Model --a --served-model-name qwen"),
        ("vllm serve {model} --a 2>&1 | tee b", "some/Model --a --served-model-name qwen"),
        ("vllm serve {model} # --served-model-name x", "some/Model --served-model-name qwen"),
        ("vllm serve {model} --served-model-name x", "some/Model --served-model-name x"),
        ("vllm serve {model} --served-model-name={served_model_name}", "some/Model {}=qwen"),
        ("vllm serve {model} \\ \n  --a '{\"b\":1}'", 'some/Model --a {"b":1} {} qwen'),
    ],
)
def test_the_served_name_of_the_settings_is_an_option(
    tmp_path: Path, command: str, words: str
) -> None:
    text = yaml.safe_dump({"model": "some/Model", "runtime": "vllm", "command": command})
    for name, served in (("qwen", "qwen"), ("'{short}'", "qwen"), ("a b", "a b")):
        more = f"defaults: {{served_model_name: {name}, short: qwen}}\n"
        out = rendered(load.load(written(tmp_path, text + more))).serve
        expected = words.replace("{}", "--served-model-name").replace("qwen", served)
        assert out is not None
        assert " ".join(out) == expected


def test_a_description_is_for_lists(tmp_path: Path) -> None:
    path = written(tmp_path, f"description: its own\n{FULL}")
    one, findings = lint.lint(path)
    assert one is not None
    assert one.description == "its own"
    assert "description" not in " ".join(finding.text for finding in findings)


@pytest.mark.parametrize("version", ["recipe_version: '2'\n", ""])
def test_what_is_in_another_recipe_is_said(tmp_path: Path, version: str) -> None:
    path = written(tmp_path, f"{version}include: base-recipe\ndefaults: {{max_model_len: 1}}\n")
    _, faults = load.inspect(path)
    (fault,) = faults
    assert fault.line == 1 + bool(version)
    assert "base-recipe" in fault.text


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (("vllm-distributed", "sglang"), 4, "sglang"),
        (("vllm-distributed", "llama-cpp"), 4, "llama-cpp"),
        (("  port: 8000", "  port: '{base}'"), 12, "base"),
    ],
)
def test_what_cannot_run_here_is_one_fault(
    tmp_path: Path, change: tuple[str, str], line: int, said: str
) -> None:
    path = written(tmp_path, FULL.replace(*change))
    one, faults = load.inspect(path)
    assert one is None
    (fault,) = faults
    assert fault.line == line
    assert said in fault.text
    with pytest.raises(BadFileError):
        load.load(path)


@pytest.mark.parametrize(
    ("keys", "solo", "cluster"),
    [
        ("", False, False),
        ("max_nodes: 1\n", True, False),
        ("min_nodes: 2\nmax_nodes: 2\n", False, True),
        ("cluster_only: true\n", False, True),
        ("mode: cluster\n", False, True),
        ("mode: solo\n", True, False),
    ],
)
def test_machines(tmp_path: Path, keys: str, solo: bool, cluster: bool) -> None:
    one = load.load(written(tmp_path, f"model: a/b\nruntime: vllm\n{keys}"))
    assert (one.solo_only, one.cluster_only) == (solo, cluster)


@pytest.mark.parametrize("version", ['"2"', "2", None])
def test_the_version(tmp_path: Path, version: str | None) -> None:
    line = "" if version is None else f"recipe_version: {version}\n"
    one = load.load(written(tmp_path, f"{line}model: a/b\nruntime: vllm\n"))
    assert rendered(one).serve == ("a/b",)


def test_lint_names_what_is_not_applied(tmp_path: Path) -> None:
    one, findings = lint.lint(written(tmp_path, FULL))
    assert one is not None
    (found,) = [finding for finding in findings if "pre_exec" in finding.text]
    assert (found.level, found.line) == (lint.WARNING, 8)
    assert "builder" in found.text


def test_a_block_of_ours_can_be_added(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    mine = written(tmp_path, edit.imported(path), "mine.yaml")
    _, faults = load.inspect(mine)
    # What a person has to fill in is all that is wrong with it.
    assert all("sm12x" in fault.text for fault in faults)
    assert "recipe_version" not in " ".join(fault.text for fault in faults)


def _filled(text: str, settings: dict[str, object]) -> str:
    """What sparkrun's rules make of a template with braces that stand alone."""
    before = None
    while before != text:
        before = text
        text = re.sub(r"\{(\w+)\}", lambda match: str(settings.get(match[1], match[0])), text)
    return text


@pytest.mark.parametrize("seed", range(60))
def test_random_templates(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    names = ["port", "a", "b1", "long_name"]
    settings: dict[str, object] = {name: draw.randint(0, 99) for name in names}
    settings["b1"] = draw.choice(["x", "{a}", "{a}-{port}", '{"k":{a}}', '{"k":1}'])
    pieces = [*(f"{{{name}}}" for name in names), "{other}", '{"j":1}', '{"j":{port}}', "x", "}"]
    words = [draw.choice(pieces) for _ in range(draw.randint(1, 8))]
    command = "vllm serve " + " ".join(f"'{word}'" for word in words)
    path = written(
        tmp_path,
        yaml.safe_dump({"recipe_version": "2", "defaults": settings, "command": command}),
    )
    assert rendered(load.load(path)).serve == tuple(_filled(word, settings) for word in words)


def test_a_variable_that_refers_to_itself_is_the_shells(tmp_path: Path) -> None:
    text = 'model: a/b\nruntime: vllm\nenv:\n  HF_TOKEN: "${HF_TOKEN}"\n  A: "1"\n  B: $A-$C\n'
    one = load.load(written(tmp_path, text))
    assert container.live(one, settings={}, extra=()).env == {
        "HF_TOKEN": "${HF_TOKEN}",
        "A": "1",
        "B": "1-${C}",
    }
    given = {"HF_TOKEN": "hf_1", "A": "2"}
    assert render(one, settings={}, environ=given, solo=False).env["HF_TOKEN"] == given["HF_TOKEN"]


THEIRS = 'recipe_version: "2"\nmodel: some/Model\nruntime: vllm\ncontainer: x\n'
TENFOLD = "".join(f"  a{n}: '{f'{{a{n + 1}}}' * 10}'\n" for n in range(9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Ten of each in the one before: 10 GB of command.
        (f"command: 'vllm serve {{a0}}'\ndefaults:\n{TENFOLD}  a9: '{'x' * 10}'\n", "without end"),
        ("command: 'vllm serve {a}'\ndefaults: {a: '{b}', b: '{a}'}\n", "refer to each other"),
        (f"description: {'x' * (1 << 18)}\n", "characters: at most"),
        ("#" * (1 << 18), "characters: at most"),
        (
            "defaults:\n" + "".join(f"  k{n}: {n}\n" for n in range(12_000)),
            "more than 10000 values",
        ),
        ("defaults:\n" + "  k: 1\n" * 5000, "more than 50 faults"),
        (f"defaults: {'{a: ' * 2000}1{'}' * 2000}\n", "nested too deeply"),
        ("defaults: &x {a: *x}\n", "nested too deeply"),
        ('description: "\\e]52;c;aGk=\\a"\n', r"control character: \\x1b\]52;c;aGk=\\x07"),
    ],
)
def test_a_recipe_that_is_made_to_exhaust_is_a_fault(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, THEIRS + text)
    for read in (load.load, edit.imported):
        with pytest.raises(BadFileError, match=said):
            read(path)
