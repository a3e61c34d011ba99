"""What lint finds, what pin and import write, and that the schema says what the reader reads."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from sm12x import layout
from sm12x.commands import recipe as verb
from sm12x.core import declared
from sm12x.core.errors import BadFileError, FindingsError, UsageError
from sm12x.recipes import edit, lint, load, options, render
from sm12x.recipes.model import Recipe, Status
from sm12x.runtime.check import native
from sm12x.runtime.check.report import Line, Topic
from sm12x.stack.model import base as bases
from sm12x.stack.model import patchfile, series

# As eugr's runner has them: doubled braces, values that are strings, a last backslash, no tag.
THEIRS = """\
# Recipe: Some-Model
recipe_version: "1"
name: Some-Model
description: >-
  vLLM serving
  some model
model: some/Model
container: vllm-node
cluster_only: true
mods: []
build_args:
  - --tf5
defaults:
  port: 8000
  host: 0.0.0.0   # everywhere
  tensor_parallel: 2
  gpu_memory_utilization: "0.85"
  kv: "auto"
  tokens: 2
env:
  VLLM_ALLOW_LONG_MAX_MODEL_LEN: 1
  CACHE: $HOME/cache
  SWITCH: true
benchmark:
  enabled: true
command: |
  vllm serve some/Model \\
      --host {host} \\
      --port {port} \\
      -tp {tensor_parallel} \\
      --kv-cache-dtype {kv} \\
      --gpu-memory-utilization {gpu_memory_utilization} \\
      --distributed-executor-backend ray \\
      --speculative-config '{{"method":"mtp","num_speculative_tokens":{tokens}}}' \\
      --compilation-config '{{"cudagraph_mode":"FULL_AND_PIECEWISE"}}' \\
"""

OURS = """\
recipe_version: "1"
name: small
model: some/Model
model_revision: 0123456789abcdef0123456789abcdef01234567
container: vllm-sm12x:0.33.0-01234567
defaults:
  host: 127.0.0.1
env:
  VLLM_SERVER_DEV_MODE: "1"
command: |
  vllm serve some/Model --host {host} --tensor-parallel-size 4 --enable-sleep-mode \\
    --distributed-executor-backend mp
sm12x:
  hardware: [rtx-pro-6000]
  gpus: 4
  sleep: {level: 1}
  status: {state: untested, source: nobody}
"""


def write(folder: Path, text: str, name: str = "small") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def said(path: Path) -> str:
    return "\n".join(str(finding) for finding in lint.lint(path)[1])


def test_a_recipe_without_faults_has_no_findings(tmp_path: Path) -> None:
    assert said(write(tmp_path, OURS)) == ""


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("--enable-sleep-mode", "--seed 1", "16: error: sleep is level 1 but the command has no"),
        ("{level: 1}", "{level: never, reason: x}", "16: error: sleep is never but the command"),
        ('"1"\ncommand', '"0"\ncommand', "10: error: sleep is level 1 but the command has no"),
        ('"1"\ncommand', '"0"\ncommand', "has no --enable-sleep-routes"),
        ("host: 127.0.0.1", "host: 0.0.0.0", "9: error: VLLM_SERVER_DEV_MODE opens /sleep,"),
        (" --host {host}", "", "on every address, for it names no host, and API keys do not"),
        ("host: 127.0.0.1", "host: 10.0.0.1", "and more on 10.0.0.1, and API keys do not"),
        ("gpus: 4", "gpus: 2", "15: error: the command uses 4 GPUs (tensor 4), the block has 2 on"),
        ("gpus: 4", "gpus: 2\n  machines: 2", "error: the command names 1 machines (--nnodes)"),
        ("-size 4", "-size auto", "error: tensor parallel size is 'auto', not a number"),
        ("[rtx-pro-6000]", "[gb10]", "15: error: a GB10 has one GPU, not 4"),
        ("[rtx-pro-6000]", "[gb10]", "16: warning: on GB10 a level-1 copy takes the same memory"),
        ("model: some", "solo_only: true\nmodel: some", ""),
        (
            "model: some",
            "cluster_only: true\nmodel: some",
            "3: error: cluster_only, but the block has one",
        ),
        ("{level: 1}", "{level: 2}", ""),
        ("--distributed", "--gpu-memory-utilization 85 --distributed", "is 85, not a share"),
        ("--distributed", "--gpu-memory-utilization 9g --distributed", "warning: gpu_memory_util"),
        ("--distributed", "--api-key abc --distributed", "warning: --api-key is in the file"),
        (":0.33.0-01234567", "", "5: warning: container has no tag and no digest"),
        (":0.33.0-01234567", ":latest", "5: warning: container has the tag 'latest'"),
        (":0.33.0-01234567", "@sha256:12", ""),
        ("model_revision: 0", "# model_revision: 0", "3: warning: some/Model has no model_rev"),
        ("serve some/Model", "serve other/Model", "3: warning: model is some/Model, the command"),
        ("model: some", "mods: [mods/x]\nmodel: some", "3: warning: mods are not applied here"),
        ("vllm serve", "uvicorn", "note: the command's arguments are not checked: it is not"),
        (
            "gpus: 4",
            "gpsu: 4",
            "15: error: sm12x.gpsu is not a known key; perhaps you meant gpus",
        ),
        (
            "gpus: 4",
            "gpus: 4\n  pool: [smal, small]",
            "16: error: there is no recipe 'smal' beside",
        ),
    ],
)
def test_lint_finds(tmp_path: Path, old: str, new: str, finding: str) -> None:
    assert old in OURS
    found = said(write(tmp_path, OURS.replace(old, new, 1)))
    assert finding in found if finding else not found


OPENED = """\
recipe_version: "1"
name: small
model: some/Model
model_revision: 0123456789abcdef0123456789abcdef01234567
container: vllm-sm12x:0.33.0-01234567
defaults: {host: 127.0.0.1}
env: {A: b}
command: vllm serve some/Model --host {host} --seed 1
"""


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("{host}", "0.0.0.0", "warning: the server listens on 0.0.0.0, and asks for a key only"),  # noqa: S104
        ("127.0.0.1", "0.0.0.0", "6: warning: the server listens on 0.0.0.0"),  # noqa: S104
        (" --host {host}", "", "warning: the server listens on every address, for it names no"),
        ("{host}", "0.0.0.0 --api-key $KEY", ""),
        ("{host}", "0.0.0.0 --enable-sleep-routes", "error: --enable-sleep-routes opens /sleep"),
        # In `env`, and in front of the command.
        ("{A: b}", '{VLLM_ALLOW_INSECURE_SERIALIZATION: "1"}', "7: error: VLLM_ALLOW_INSECURE_SER"),
        ("{A: b}", "{VLLM_ALLOW_RUNTIME_LORA_UPDATING: 'true'}", "7: error: VLLM_ALLOW_RUNTIME_LO"),
        ("{A: b}", '{VLLM_ALLOW_RUNTIME_LORA_UPDATING: "0"}', ""),
        ("{A: b}", "{VLLM_NIXL_SIDE_CHANNEL_HOST: 0.0.0.0}", "7: warning: VLLM_NIXL_SIDE_CHANNEL"),
        ("{A: b}", "{HF_TOKEN: hf_abc}", "7: warning: HF_TOKEN is in the file for every reader"),
        ("{A: b}", "{AWS_SECRET_ACCESS_KEY: abc}", "7: warning: AWS_SECRET_ACCESS_KEY is in the"),
        ("{A: b}", "{HF_TOKEN: $HF_TOKEN}", ""),
        ("{A: b}", "{MAX_TOKENS: 5, TOKENIZERS_PARALLELISM: 'x'}", ""),
        ("command: ", "command: VLLM_API_KEY=abc ", "8: warning: VLLM_API_KEY is in the file"),
        ("command: ", "command: export HF_TOKEN=x && ", "8: warning: HF_TOKEN is in the file"),
        ("command: ", "command: env HF_TOKEN=x ", "8: warning: HF_TOKEN is in the file"),
        (
            "command: ",
            "command: export VLLM_ALLOW_INSECURE_SERIALIZATION=1; ",
            "8: error: VLLM_ALLOW_INSECURE_SERIALIZATION opens the server",
        ),
        (
            "command: vllm serve some/Model --host {host}",
            "command: export VLLM_SERVER_DEV_MODE=1 && vllm serve some/Model --host 0.0.0.0",
            "8: error: VLLM_SERVER_DEV_MODE opens /sleep, /collective_rpc and more on 0.0.0.0",
        ),
        # Options, also cut short as vLLM's parser takes them.
        ("--seed 1", "--allowed-local-media-path /", "8: error: --allowed-local-media-path lets"),
        ("--seed 1", "--allowed-local-m=/etc/x", "8: error: --allowed-local-media-path lets"),
        (
            "--seed 1",
            "--allowed-local-media-path /srv/media/x",
            "8: warning: --allowed-local-media",
        ),
        (
            "--seed 1",
            "--allowed-media-domains a.example",
            "warning: --allowed-media-domains is not",
        ),
        ("--seed 1", "--allowed-media-domains none.invalid", ""),
        ("--seed 1", "--media-io-kwargs '{{}}'", "warning: the server fetches any URL that a req"),
        ("--seed 1", '--limit-mm-per-prompt \'{{"image":0,"video":0}}\'', ""),
        ("--seed 1", "--tool-server demo", "8: warning: --tool-server opens the server"),
        ("--seed 1", "--trust-request-chat-template", "8: warning: --trust-request-chat-template"),
        ("--seed 1", "--config /x.yaml", "8: warning: --config: the options in that file are not"),
        ("--seed 1", "--root-path /s", "8: warning: --root-path opens the server"),
        ("--seed 1", "--unauthenticated-metrics", "8: warning: --unauthenticated-metrics opens"),
        ("--seed 1", "--trust-remote-code", ""),
        ("--seed 1", "--trust-remote-code --revision main", "error: --trust-remote-code runs Pyth"),
        ("vllm-sm12x:0", "quay.io/evil/vllm:0", "5: warning: container is quay.io/evil/vllm:0.33"),
        ("vllm-sm12x:0", "quay.io/e/vllm-sm12x:0", "5: warning: container is quay.io/e/vllm-sm12"),
    ],
)
def test_lint_finds_what_opens_a_server(tmp_path: Path, old: str, new: str, finding: str) -> None:
    assert old in OPENED
    found = said(write(tmp_path, OPENED.replace(old, new, 1)))
    found = found.replace(f"{tmp_path}/small.yaml:2: note: there is no sm12x block", "")
    assert finding in found if finding else "warning" not in found and "error" not in found


def test_code_of_a_repository_without_a_commit_is_an_error(tmp_path: Path) -> None:
    text = OPENED.replace("--seed 1", "--trust-remote-code").replace("model_revision", "# m")
    assert "error: --trust-remote-code runs Python files of some/Model" in said(
        write(tmp_path, text)
    )
    # A setting without a value is what the user has to give.
    asked = text.replace("defaults: {", 'defaults: {revision: "", ').replace(
        "--trust-remote-code", "--trust-remote-code --revision '{revision}'"
    )
    path = write(tmp_path, asked)
    assert "warning: --trust-remote-code runs" in said(path)
    for words in (["--to", "docker"], ["--to", "shell"], ["--to", "compose"]):
        with pytest.raises(UsageError, match="no commit of it is named"):
            run("render", *words, str(path))
        with pytest.raises(UsageError, match="no commit of it is named"):
            run("render", *words, str(path), "revision=main")
        assert "f" * 40 in run("render", *words, str(path), f"revision={'f' * 40}")
    # A pin takes the place of the setting without a value.
    edit.pin(path, revision=REVISION)
    assert f"--revision {REVISION}" in run("render", "--to", "shell", str(path))
    assert "remote-code" not in said(path)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "VLLM_SLEEP_API_KEY"])
def test_a_recipe_does_not_choose_the_key(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, OPENED.replace("{A: b}", f"{{{name}: known}}"))
    assert f"error: small sets {name} itself" in said(path)
    with pytest.raises(UsageError, match="in place of yours"):
        run("render", "--to", "docker", str(path))
    path = write(tmp_path, OPENED.replace("{A: b}", f"{{{name}: $KEY}}"))
    assert "error" not in said(path)


def test_a_folder_that_no_container_may_have_is_an_error(tmp_path: Path) -> None:
    text = OPENED.replace("defaults: {", "defaults: {model: /var/run/m, ")
    with pytest.raises(FindingsError, match="1 errors"):
        run("lint", str(write(tmp_path, text)))


def test_what_a_text_gives_is_the_users_to_widen(tmp_path: Path) -> None:
    path = str(write(tmp_path, OPENED))
    text = run("render", "--to", "docker", path, "--publish", "0.0.0.0", "--pass", "HF_TOKEN")  # noqa: S104
    assert "-p 0.0.0.0:8000:8000" in text
    assert 'export VLLM_API_KEY="${VLLM_API_KEY:?' in text
    assert "-e HF_TOKEN" in text
    assert "--publish 0.0.0.0 --pass HF_TOKEN" in text.splitlines()[0]
    with pytest.raises(UsageError, match="are for docker, compose, shell, llama-swap"):
        run("render", "--to", "nomad", "smoke", "--publish", "0.0.0.0")  # noqa: S104
    with pytest.raises(UsageError, match="nothing is published"):
        run("render", "--to", "llama-swap", "smoke", "--publish", "0.0.0.0")  # noqa: S104


def test_level_2_loses_a_draft(tmp_path: Path) -> None:
    text = OURS.replace("level: 1", "level: 2").replace(
        "--enable-sleep-mode", "--enable-sleep-mode --speculative-config '{{}}'"
    )
    assert "level-2 sleep loses the weights of the draft model" in said(write(tmp_path, text))


def test_a_pool_must_be_able_to_sleep_on_the_same_gpus(tmp_path: Path) -> None:
    pool = OURS.replace("gpus: 4", "gpus: 4\n  pool: [one, two]")
    write(tmp_path, OURS, "one")
    write(
        tmp_path,
        OURS.replace("level: 1", "level: never, reason: it hangs").replace("gpus: 4", "gpus: 2"),
        "two",
    )
    found = said(write(tmp_path, pool))
    assert "two never sleeps: it hangs" in found
    assert found.count("small.yaml:16: error") == 2


def test_a_file_of_eugrs_runner_has_no_errors(tmp_path: Path) -> None:
    _, found = lint.lint(write(tmp_path, THEIRS))
    assert [finding.level for finding in found if finding.level == lint.ERROR] == []
    assert "there is no sm12x block" in found[0].text


SHIPPED = sorted(layout.recipes().glob("*.yaml"))


def test_no_server_of_several_ranks_asks_for_nvlink_sharp() -> None:
    """NCCL 2.30.4 and newer hung over it on GPUs that do not have it (NVIDIA/nccl#2167)."""
    ranks = {}
    for path in SHIPPED:
        recipe = load.load(path)
        assert recipe.sm12x is not None
        if render.filled(recipe).serve is not None:
            ranks[path.stem] = recipe.sm12x.gpus * recipe.sm12x.machines, recipe.env
    assert sum(count > 1 for count, _ in ranks.values()) >= 7
    wrong = [
        name
        for name, (count, env) in ranks.items()
        if (env.get("NCCL_NVLS_ENABLE") == "0") != (count > 1)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_recipes_that_ship_have_no_errors(path: Path) -> None:
    _, found = lint.lint(path)
    assert [str(finding) for finding in found if finding.level == lint.ERROR] == []


def schema() -> Any:
    return json.loads((layout.data() / "schemas" / "recipe-1.json").read_text())


def as_json(text: str) -> Any:
    def plain(value: object) -> str:
        # An editor reads YAML 1.2, in which a date is text.
        assert isinstance(value, datetime.date)
        return value.isoformat()

    return json.loads(json.dumps(yaml.safe_load(text), default=plain))


@pytest.mark.parametrize(
    "text",
    [THEIRS, OURS, *(path.read_text() for path in SHIPPED)],
)
def test_the_schema_takes_what_the_reader_takes(text: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(as_json(text), schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpus: 4", "gpsu: 4"),
        ("gpus: 4", "gpus: 0"),
        ("rtx-pro-6000", "rtx-pro-600"),
        ("level: 1", "level: 3"),
        ("level: 1", "level: never"),
        ("state: untested", "state: verified"),
        ("name: small", "nmae: small"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(tmp_path: Path, old: str, new: str) -> None:
    text = OURS.replace(old, new, 1)
    assert load.inspect(write(tmp_path, text))[1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(as_json(text), schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_an_editor_finds_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / name).resolve() == layout.data() / "schemas" / "recipe-1.json"


def test_the_schema_says_what_the_reader_reads() -> None:
    content = schema()
    assert content.pop("$comment").startswith("Made by `make docs`")
    assert content == declared.schema(Recipe)
    assert content["required"] == ["recipe_version", "name", "container", "command"]
    # What is not in the file is not in its schema.
    assert not {"key", "path", "lines"} & set(content["properties"])
    terms = content["$defs"]["Memory"]["properties"]
    assert set(terms) == {"weights", "kv", "outside", "sleep_residue"}
    assert "low" not in content["$defs"]["MemoryTerm"]["properties"]


REVISION, DIGEST = "f" * 40, "sha256:" + "e" * 64


def test_pin_changes_two_values_and_no_other_byte(tmp_path: Path) -> None:
    text = THEIRS.replace("container: vllm-node", "container: 'vllm-node'  # built here")
    path = write(tmp_path, text)
    edit.pin(path, revision=REVISION, digest=DIGEST)
    assert path.read_text() == text.replace(
        "model: some/Model\n", f"model: some/Model\nmodel_revision: {REVISION}\n"
    ).replace("'vllm-node'", f"vllm-node@{DIGEST}")
    recipe = edit.pin(path, revision="a" * 40, digest="sha256:" + "b" * 64)
    assert recipe.model_revision == "a" * 40
    assert recipe.container == "vllm-node@sha256:" + "b" * 64
    assert "# built here" in path.read_text()


def test_pin_changes_the_file_that_a_link_names(tmp_path: Path) -> None:
    path, link = write(tmp_path, OURS), tmp_path / "link.yaml"
    link.symlink_to(path.name)
    edit.pin(link, revision="a" * 40)
    assert link.is_symlink()
    assert f"model_revision: {'a' * 40}" in path.read_text()


def test_pin_adds_below_a_value_of_several_lines(tmp_path: Path) -> None:
    text = THEIRS.replace("model: some/Model", "model: >-\n  some/Model")
    path = write(tmp_path, text)
    assert edit.pin(path, revision=REVISION).model == "some/Model"


@pytest.mark.parametrize(
    "text",
    [
        THEIRS.replace("model: some/Model", "model: &x vllm-node").replace(
            "container: vllm-node", "container: *x"
        ),
        THEIRS.replace("container: vllm-node", "container: &x vllm-node\nlaunch: *x"),
    ],
)
def test_pin_leaves_a_value_with_aliases_alone(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadFileError, match=r"small\.yaml"):
        edit.pin(path, digest=DIGEST)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("revision", "digest", "message"),
    [
        ("", "", "nothing to pin"),
        ("main", "", "'main' is not a commit"),
        ("", "latest", "'latest' is not a digest"),
    ],
)
def test_pin_refuses_what_may_move(
    tmp_path: Path, revision: str, digest: str, message: str
) -> None:
    path = write(tmp_path, OURS)
    with pytest.raises(UsageError, match=message):
        edit.pin(path, revision=revision, digest=digest)
    assert path.read_text() == OURS


def test_import_keeps_their_text_and_adds_a_block(tmp_path: Path) -> None:
    text = edit.imported(write(tmp_path, THEIRS, "theirs"))
    assert text.startswith(THEIRS)
    path = write(tmp_path, text.replace("SWITCH: true", 'SWITCH: "1"'), "mine")
    recipe, found = lint.lint(path)
    assert [str(finding) for finding in found if finding.level == lint.ERROR] == []
    assert recipe is not None
    assert recipe.sm12x is not None
    assert (recipe.sm12x.gpus, recipe.sm12x.machines) == (1, 2)
    assert recipe.sm12x.status.source == "imported from theirs.yaml"
    with pytest.raises(UsageError, match="has an sm12x block already"):
        edit.imported(path)


def test_options_are_read_as_vllm_reads_them() -> None:
    words = ["m", "-tp", "2", "--max_model_len=8", "--flag", "--seed", "-1", "--seed", "3"]
    assert options.parse(words) == {
        "tensor-parallel-size": "2",
        "max-model-len": "8",
        "flag": "",
        "seed": "3",
    }
    assert options.model(words) == "m"
    assert options.model(["--model", "n"]) == "n"


def run(*words: str) -> str:
    done = CliRunner().invoke(verb.command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_list_and_show_have_json() -> None:
    listed = json.loads(run("list", "--json"))["recipes"]
    assert {"smoke", "deepseek-v4-pro-gb10-x8"} <= {one["key"] for one in listed}
    shown = json.loads(run("show", "deepseek-v4-flash-rtx-pro-6000-tp4", "--json"))
    assert shown["sm12x"]["memory"]["outside"]["gib"] == 1.9
    assert "sleep    level 1" in run("show", "deepseek-v4-flash-rtx-pro-6000-tp4")


def test_lint_fails_on_errors_and_says_what_it_did_not_ask(tmp_path: Path) -> None:
    good = write(tmp_path, OURS)
    assert "vLLM's own parser: not asked" in run("lint", str(good))
    bad = write(tmp_path, OURS.replace("gpus: 4", "gpus: 2"), "bad")
    with pytest.raises(FindingsError, match="1 errors"):
        run("lint", str(bad))
    floating = write(tmp_path, OURS.replace(":0.33.0-01234567", ""), "floating")
    run("lint", str(floating))
    with pytest.raises(FindingsError):
        run("lint", "--strict", str(floating))


def test_an_unknown_recipe_lists_the_near_ones() -> None:
    with pytest.raises(UsageError, match="there is no recipe 'deepseek-v4-flash-rtx'") as error:
        run("show", "deepseek-v4-flash-rtx")
    assert "deepseek-v4-flash-rtx-pro-6000-tp4" in error.value.next_step


@pytest.mark.parametrize("action", ["show", "lint"])
def test_a_path_without_a_file_is_said_to_be_one(action: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    cases = ((tmp_path / "no.yaml", "does not"), (tmp_path, "is no"), (loop, "is no"))
    for path, what in cases:
        with pytest.raises(BadFileError, match=f"{path} {what}"):
            run(action, str(path))


def test_import_writes_a_new_file_only(tmp_path: Path) -> None:
    path, output = write(tmp_path, THEIRS), tmp_path / "mine.yaml"
    assert "fill in the sm12x block" in run("import", str(path), "--output", str(output))
    assert output.read_text() == run("import", str(path))
    with pytest.raises(UsageError, match="exists already"):
        run("import", str(path), "--output", str(output))


def test_pin_says_what_it_wrote(tmp_path: Path) -> None:
    assert REVISION in run("pin", str(write(tmp_path, OURS)), "--model-revision", REVISION)


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "docker", "smoke", "port=8001", "--", "--seed", "3", "--to", "x"),
        ("smoke", "--to", "docker", "port=8001", "--", "--seed", "3", "--to", "x"),
        ("smoke", "port=8001", "--to=docker", "--", "--seed", "3", "--to", "x"),
    ],
)
def test_options_stand_before_or_after_the_recipe(words: tuple[str, ...]) -> None:
    assert run("render", *words).endswith(" smoke port=8001 -- --seed 3 --to x\n")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (
            ("smoke", "--to", "docker", "--seed", "3"),
            "put vLLM's own arguments after --: -- --seed",
        ),
        (("smoke", "--to", "docker", "--imag", "x"), "perhaps you meant --image"),
        (("smoke", "--to", "docker", "seed"), "put vLLM's own arguments after --"),
    ],
)
def test_an_option_that_is_none_of_ours_is_told_its_place(
    words: tuple[str, ...], step: str
) -> None:
    with pytest.raises(UsageError, match=step):
        run("render", *words)


def test_the_image_is_that_of_the_default_base_and_no_patch_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of all bases: the ids differ, and the newest is not the default.
    ids = {version: series.load(bases.load(version)).id for version in bases.versions()}
    assert ids == {version: series.read_id(bases.load(version).folder) for version in ids}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a stack was parsed")

    monkeypatch.setattr(patchfile, "read", refuse)
    monkeypatch.setattr(bases, "parse", refuse)
    tag = f"vllm-sm12x:{bases.default()}-{ids[bases.default()]}"
    assert f" {tag} smoke" in run("render", "smoke", "--to", "docker")
    assert f"docker run --rm {tag} check" in run("lint", "smoke")
    assert f" {tag} smoke" in run("show", "smoke")


def test_a_variable_that_vllm_does_not_know_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(recipes: dict[str, Recipe], *_: object) -> list[Line]:
        (key,) = recipes
        return [
            Topic("recipes", "").warned(
                f"{key}: VLLM_SERVER_DEV_MODE is no variable of this release"
            )
        ]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(native, "check_driver", lambda *_: (None, []))
    monkeypatch.setattr(native, "check_arguments", arguments)
    path = write(tmp_path, OURS)
    said = f"{path}:9: warning: VLLM_SERVER_DEV_MODE is no variable of this release"
    assert said in run("lint", str(path))


@pytest.mark.parametrize(
    ("level", "dev_mode", "host", "key", "finding"),
    [
        (1, "0", "127.0.0.1", "", ""),
        (1, "1", "127.0.0.1", "", ""),
        (1, "0", "0.0.0.0", "", "error: --enable-sleep-routes opens /sleep and /wake_up on 0."),  # noqa: S104 - no server
        (1, "0", "10.0.0.1", "--api-key k", "warning: --api-key is in the file"),
        (2, "0", "127.0.0.1", "", "error: after a level-2 sleep the weights are reloaded"),
        (2, "1", "127.0.0.1", "", ""),
    ],
)
def test_the_sleep_routes_do_for_level_1_and_want_a_key(
    tmp_path: Path, level: int, dev_mode: str, host: str, key: str, finding: str
) -> None:
    text = OURS.replace('MODE: "1"', f'MODE: "{dev_mode}"').replace("127.0.0.1", host)
    text = text.replace("{level: 1}", f"{{level: {level}}}")
    text = text.replace("--enable-sleep-mode", f"--enable-sleep-mode --enable-sleep-routes {key}")
    found = said(write(tmp_path, text))
    assert finding in found
    assert len(found.splitlines()) == bool(finding)


def test_what_blocks_one_release_does_not_block_another(tmp_path: Path) -> None:
    own = bases.default()
    text = OURS.replace("source: nobody", f"source: nobody, blocked: {{{own}: no kernel}}")
    status = _status(write(tmp_path, text))
    assert (status.blocked_on(own), status.blocked_on("99.0")) == ("no kernel", "")
    everywhere = OURS.replace("source: nobody", "source: nobody, blocked: no image")
    assert _status(write(tmp_path, everywhere)).blocked_on(own) == "no image"
    assert _status(write(tmp_path, OURS)).blocked == {}


def test_blocked_names_a_base(tmp_path: Path) -> None:
    wrong = OURS.replace("source: nobody", "source: nobody, blocked: {0.33.1: no kernel}")
    assert "error: blocked names 0.33.1, no base here; perhaps you meant 0.33.0" in said(
        write(tmp_path, wrong)
    )


def _status(path: Path) -> Status:
    block = load.load(path).sm12x
    assert block is not None
    return block.status


def test_the_release_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.release() == bases.default()
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    assert layout.release() == ""
    installed = tmp_path / "vllm-0.33.0+sm12x.01234567.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: vllm\nVersion: 0.33.0+sm12x.01234567\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert layout.release() == "0.33.0"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("32768", 32768),
        ("32k", 32000),
        ("32K", 32768),
        ("1M", 1 << 20),
        ("25.6k", 25600),
        ("25.6K", None),
        ("auto", None),
        ("-1", None),
        ("\u00b2", None),
        ("9" * 5000, None),
    ],
)
def test_a_number_is_read_as_vllm_reads_it(text: str, number: int | None) -> None:
    assert options.integer(text) == number
    assert options.number({"tensor-parallel-size": text}, "tensor-parallel-size") == number


def test_a_recipe_from_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "their.yaml"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=str(pipe)):
        edit.imported(pipe)


@pytest.mark.parametrize(
    ("words", "env", "keyless"),
    [
        ("", {}, True),
        ("--host 127.0.0.1", {}, False),
        ("--hos 127.0.0.1", {}, False),
        ("--host 0.0.0.0", {"VLLM_API_KEY": "k"}, False),
        ("--host 0.0.0.0", {"VLLM_API_KEY": ""}, True),
        ("--api-key k", {}, False),
    ],
)
def test_one_rule_says_whether_strangers_reach_a_server(
    words: str, env: dict[str, str], keyless: bool
) -> None:
    assert options.is_keyless(options.parse(words.split()), env) is keyless


def test_an_option_that_is_cut_short_trusts_code_too() -> None:
    assert options.trusts_code(options.parse(["--trust-remote"]))
    assert not options.trusts_code(options.parse(["--seed", "1"]))
