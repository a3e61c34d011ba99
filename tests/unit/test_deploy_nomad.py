"""Nomad specifications: pure text from a recipe. tests/nomad runs them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import nomad
from sm12x.recipes import load
from sm12x.recipes.model import Recipe

DATA = Path(__file__).parent / "data"
RECIPE = """\
recipe_version: "1"
name: Two
container: vllm-sm12x
defaults: {host: 127.0.0.1, port: 8000, note: "-"}
command: vllm serve some/model --host {host} --port {port}
sm12x:
  hardware: [rtx-pro-6000]
  gpus: 2
  machines: 1
  sleep: {level: 1}
  memory: {weights: {gib: 30.5, basis: estimated, source: made up}}
  status: {state: untested, source: made up}
"""


def recipe(tmp_path: Path, text: str = RECIPE) -> Recipe:
    path = tmp_path / "two.yaml"
    path.write_text(text)
    return load.load(path)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Recipe]:
    return load.load_all(layout.recipes())


def test_a_specification_is_the_golden_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "recipes", lambda: tmp_path)
    text = nomad.render(recipe(tmp_path), settings={"port": "9000"}, extra=["--seed", "1 2"])
    if os.environ.get("SM12X_WRITE_GOLDEN"):
        (DATA / "two.nomad.hcl").write_text(text)
    assert text == (DATA / "two.nomad.hcl").read_text()


def test_a_recipe_the_image_lacks_comes_with_the_job(tmp_path: Path) -> None:
    text = nomad.render(recipe(tmp_path, RECIPE + "# ${not} ours\n"))
    assert 'serve_words = ["/local/two.yaml"]' in text
    assert 'destination = "${NOMAD_TASK_DIR}/two.yaml"' in text
    assert "# $${not} ours" in text


def specifications(shipped: dict[str, Recipe]) -> dict[str, str]:
    """What each recipe that Nomad can run as it is is rendered to, and the examples."""
    return nomad.examples(shipped) | {
        key: nomad.render(one, peers=[shipped[name] for name in nomad.pool_of(one)])
        for key, one in shipped.items()
        if not nomad.unfit(one)
    }


def test_no_server_listens_everywhere_and_each_has_a_check(shipped: dict[str, Recipe]) -> None:
    for name, text in specifications(shipped).items():
        assert "host_network = var.host_network" in text, name
        assert "0.0.0.0" not in text.replace("10.0.0.0/8", ""), name  # noqa: S104
        assert text.startswith("# Rendered by `sm12x recipe render --to nomad"), name
        assert 'path     = "/health"' in text, name
        assert "hf_token=..." in text, name
        assert "HF_TOKEN " not in text, name


def test_every_variable_has_a_type_and_a_description(shipped: dict[str, Recipe]) -> None:
    for name, text in specifications(shipped).items():
        declared = text.count('\nvariable "')
        assert declared >= 10, name
        head = text[: text.index("\nlocals {")]
        assert head.count("\n  type ") == head.count("\n  description = ") == declared, name


def test_a_pool_is_one_task_with_one_service(shipped: dict[str, Recipe]) -> None:
    pool = next(one for one in shipped.values() if one.sm12x and one.sm12x.pool)
    assert pool.sm12x
    members = [shipped[key] for key in pool.sm12x.pool]
    text = nomad.render(pool, peers=members)
    assert text.count("\n    task ") == 1
    assert text.count('"device"') == 1
    assert text.count("provider = ") == 1
    assert f'name     = "{nomad.job_name(pool.key)}"' in text
    # Its servers have keys of the pool's own.
    assert "pool_admin_key" in text
    assert "sleep_api_key" not in text
    # Two loads, one after the other.
    assert 'healthy_deadline  = "55m"' in text
    assert nomad.host_mib(pool, members) == sum(nomad.host_mib(member) for member in members)


def test_each_machine_of_a_cluster_is_a_group(shipped: dict[str, Recipe]) -> None:
    text = nomad.render(shipped["deepseek-v4-flash-gb10-x2"])
    assert '"node_rank=1", "--", "--headless"' in text
    assert 'group "rank-0"' in text
    assert 'group "rank-1"' in text
    assert "distinct_hosts" in text
    # GB10 reports no memory that a constraint could ask for.
    assert "device.attr.memory" not in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("--port {port}", "--port {port} --distributed-executor-backend ray", "Ray"),
        ("host: 127.0.0.1, ", "", "no setting host"),
        ("machines: 1", "machines: 2", "no setting master_addr and no node_rank"),
    ],
)
def test_what_nomad_cannot_run_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    text = RECIPE.replace(old, new)
    if "host" in why:
        text = text.replace("--host {host} ", "")
    with pytest.raises(UsageError, match=why):
        nomad.render(recipe(tmp_path, text))


def test_an_overlay_runs_the_command_itself_on_a_read_only_image(tmp_path: Path) -> None:
    text = nomad.render_overlay(recipe(tmp_path))
    assert '"--host", "${NOMAD_IP_http}", "--port", "${NOMAD_PORT_http}"' in text.replace(
        "\n    ", " "
    )
    assert 'volumes         = [for path, file in var.overlay : "${file}:${path}:ro"]' in text
    assert "readonly_rootfs = true" in text
    assert 'destination = "/root/.cache"' in text


def test_host_memory_holds_the_weights_that_sleep(tmp_path: Path) -> None:
    one = recipe(tmp_path)
    # 8 for the server, 8 for each of two processes, 2 x 30.5 for the copies.
    assert nomad.host_mib(one) == 85 * 1024
    awake = recipe(tmp_path, RECIPE.replace("{level: 1}", "{level: never, reason: why}"))
    assert nomad.host_mib(awake) == 24 * 1024


def test_an_image_that_is_given_is_the_default(tmp_path: Path) -> None:
    for text in (
        nomad.render(recipe(tmp_path), image="mine:1"),
        nomad.render_overlay(recipe(tmp_path), image="mine:1"),
    ):
        assert 'default     = "mine:1"' in text


HOSTILE = [
    '"',
    "\\",
    "${x}",
    "$${x}",
    "%{ if true }",
    "%%{x}",
    'a"\n}\njob "b" {',
    "\t\t",
    "# // /*",
    "<<<< env >>>>",
    "{{ env }} [[ x ]] [% if %] [# #]",
    "EOT",
    "\ufeff\xa0",
]


def _strings(text: str) -> tuple[str, list[str]]:
    """HCL with its strings, heredocs and comments taken out, and the texts they stand for.

    A reader of its own: it knows nothing of how the text was made.
    """
    found: list[str] = []
    escapes = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}

    def literal(text: str) -> str:
        # `${` that is not doubled is an interpolation: it stays marked.
        return re.sub(
            r"(\$\$|%%|\$|%)\{", lambda it: (it[1][0] if len(it[1]) == 2 else "!!") + "{", text
        )

    def take(it: re.Match[str]) -> str:
        if it["text"] is not None:
            lines = it["text"].split("\n")[:-1]
            cut = min((len(line) - len(line.lstrip(" ")) for line in lines if line), default=0)
            found.append(literal("\n".join(line[cut:] for line in lines) + "\n"))
        elif it["quoted"] is not None:
            found.append(re.sub(r"\\(.)", lambda one: escapes[one[1]], literal(it["quoted"])))
        return "" if it["comment"] else "@"

    pattern = re.compile(
        r'"(?P<quoted>(?:[^"\\\n\r]|\\.)*)"'
        r"|<<-(?P<end>\w+)\n(?P<text>(?:.*\n)*?)[ ]*(?P=end)(?=\n)"
        r"|(?P<comment>[#].*)"
    )
    # A longer text has other line breaks.
    return "".join(pattern.sub(take, text).split()).replace(",]", "]"), found


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_of_a_recipe_becomes_hcl(tmp_path: Path, value: str) -> None:
    def rendered(text: str) -> list[tuple[str, list[str]]]:
        one = recipe(
            tmp_path,
            RECIPE.replace("name: Two", f"name: Two\ndescription: {json.dumps(text)}")
            .replace("note:", f"model: {json.dumps('/m' + text + '/x')}, note:")
            .replace("command:", f"env: {{A: {json.dumps(text.replace('$', 'S'))}}}\ncommand:")
            .replace("source: made up}\n", f"source: s, blocked: {json.dumps(text)}}}\n"),
        )
        more = {"image": text, "extra": [text, "--seed"]}
        return [
            _strings(nomad.render(one, settings={"note": text}, **more)),  # type: ignore[arg-type]
            _strings(nomad.render_overlay(one, **more)),  # type: ignore[arg-type]
        ]

    plain, hostile = rendered("plain"), rendered(value)
    assert [structure for structure, _ in hostile] == [structure for structure, _ in plain]
    for _, strings in hostile:
        assert value in strings
        assert str(Path(f"/m{value}")) in strings
    assert f"note={value}" in hostile[0][1]
    # The recipe travels as it is.
    assert (tmp_path / "two.yaml").read_text() in hostile[0][1]
    assert value.replace("$", "S") in hostile[1][1]


def test_a_recipe_cannot_end_its_own_text_nor_run_templates(tmp_path: Path) -> None:
    text = f"{RECIPE}# <<<<<< env >>>>\n#\n  # EOT\n"
    made = nomad.render(recipe(tmp_path, text.replace("name: Two", "name: |\n  EOT")))
    assert 'left_delimiter  = "<<<<<<<"' in made
    assert "data            = <<-EOT_\n" in made


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("port: 8000", "port: '8000 }'", "port '8000 }'"),
        ("port: 8000", "port: '${x}'", "Nomad's ports are numbers"),
    ],
)
def test_what_would_stand_outside_of_quotes_is_refused(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        nomad.render(recipe(tmp_path, RECIPE.replace(old, new)))


def test_a_name_that_hcl_cannot_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / 'two".yaml'
    path.write_text(RECIPE)
    with pytest.raises(UsageError):
        nomad.render(load.load(path))
    text = RECIPE.replace("port: 8000", "'b }_port': 2").replace("{port}", "2")
    with pytest.raises(UsageError, match="b }_port"):
        nomad.render(recipe(tmp_path, text))


def test_an_overlay_finds_address_and_port_in_either_form(tmp_path: Path) -> None:
    text = nomad.render_overlay(
        recipe(
            tmp_path, RECIPE.replace("--host {host} --port {port}", "--host={host} --port={port}")
        )
    )
    assert '"--host=${NOMAD_IP_http}"' in text
    assert '"--port=${NOMAD_PORT_http}"' in text


def test_a_setting_the_recipe_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prot.*port"):
        nomad.render(recipe(tmp_path), settings={"prot": "1"})


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_there_is_not_is_refused(tmp_path: Path, port: str) -> None:
    with pytest.raises(UsageError, match="65535"):
        nomad.render(recipe(tmp_path), settings={"port": port})
