"""The texts that recipes are rendered to, against golden files.

`SM12X_WRITE_GOLDEN=1` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.unit.test_recipes_lint import OURS, THEIRS, write

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import local, nomad
from sm12x.recipes import load
from sm12x.recipes.model import Recipe

GOLDEN = Path(__file__).with_name("data") / "deploy"
IMAGE = "vllm-sm12x:0.33.0-01234567"
POOL = "rotation-pair-rtx-pro-6000-tp4"
CLUSTER = "deepseek-v4-flash-gb10-x2"
RAY = "deepseek-v4-flash-gb10-x2-ray"
MIMO = "mimo-v2.5-flash-rtx-pro-6000-tp4"


def recipe(key: str) -> Recipe:
    return load.load(layout.recipes() / f"{key}.yaml")


def render(
    target: str,
    one: Recipe,
    settings: dict[str, str] | None = None,
    *,
    image: str = IMAGE,
    extra: tuple[str, ...] = (),
) -> str:
    settings = settings or {}
    if target == "llama-swap":
        names = one.sm12x.pool if one.sm12x else ()
        peers = [recipe(name) for name in names]
        return local.llama_swap(one, image=image, settings=settings, extra=extra, peers=peers)
    made = {"docker": local.docker, "compose": local.compose, "shell": local.shell}[target]
    text: str = made(one, image=image, settings=settings, extra=extra)
    return text


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
@pytest.mark.parametrize("key", ["smoke", MIMO, POOL, CLUSTER])
def test_a_recipe_is_rendered(target: str, key: str) -> None:
    settings = {"master_addr": "10.0.0.1"} if key == CLUSTER else {}
    if (target, key) == ("llama-swap", CLUSTER):
        with pytest.raises(UsageError, match="for several machines"):
            render(target, recipe(key), settings)
        return
    text = render(target, recipe(key), settings)
    path = GOLDEN / f"{key}.{target}.txt"
    if os.environ.get("SM12X_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
def test_a_file_of_eugrs_runner_is_rendered(target: str, tmp_path: Path) -> None:
    theirs = load.load(write(tmp_path, THEIRS.replace("cluster_only: true\n", ""), "theirs"))
    text = render(target, theirs, image="")
    path = GOLDEN / f"theirs.{target}.txt"
    if os.environ.get("SM12X_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_settings_and_arguments_reach_the_server() -> None:
    text = render("docker", recipe("smoke"), {"port": "8001"}, extra=("--seed", "3"))
    assert "-p 127.0.0.1:8001:8001" in text
    assert text.endswith("smoke port=8001 -- --seed 3\n")
    text = render("shell", recipe("smoke"), {"port": "8001"}, extra=("--seed", "3"))
    assert "--port 8001 " in text
    assert text.endswith("--seed 3\n")


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
def test_an_unknown_setting_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match=r"prot.*port"):
        render(target, recipe("smoke"), {"prot": "1"})


def test_what_a_cluster_cannot_do_without_is_asked_for() -> None:
    with pytest.raises(UsageError, match="master_addr"):
        render("docker", recipe(CLUSTER))


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
def test_a_cluster_of_an_unknown_size_is_refused(target: str, tmp_path: Path) -> None:
    theirs = load.load(write(tmp_path, THEIRS, "theirs"))
    with pytest.raises(UsageError, match="for several machines"):
        render(target, theirs, image="")
    alone = THEIRS.replace(
        "--distributed-executor-backend ray", "--distributed-executor-backend mp"
    )
    assert "cluster_only" in nomad.unfit(load.load(write(tmp_path, alone, "theirs")))


@pytest.mark.parametrize("target", ["docker", "compose", "shell"])
@pytest.mark.parametrize("key", [RAY, CLUSTER])
def test_what_runs_on_the_other_machines_is_said(target: str, key: str) -> None:
    settings = {"master_addr": "10.0.0.1"} if key == CLUSTER else {}
    text = render(target, recipe(key), settings)
    if key == RAY:
        assert "on the other machine: ray start --address FIRST:6379 --block" in text
    elif target == "shell":
        assert "node_rank=1 and -- --headless" in text
    else:
        assert text.count("node_rank=1") == text.count("--headless") == 1
    # A comment each, for whatever reads the text.
    body = [line for line in text.splitlines() if "ray start" in line or "others" in line]
    assert all(line.startswith("#") for line in body)


def test_a_cluster_without_a_way_to_find_each_other_says_so(tmp_path: Path) -> None:
    text = OURS.replace("gpus: 4", "gpus: 4\n  machines: 3")
    assert "The recipe does not say what to run on each of the 2 other machines" in render(
        "compose", load.load(write(tmp_path, text))
    )


def test_a_pool_takes_no_settings_in_llama_swap() -> None:
    with pytest.raises(UsageError):
        render("llama-swap", recipe(POOL), {"host": "x"})


def test_a_file_outside_the_checkout_is_mounted(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((layout.recipes() / "smoke.yaml").read_text().replace("name: smoke", "name: m"))
    text = render("docker", load.load(path))
    assert f"-v {path}:/recipes/mine.yaml:ro" in text
    assert text.endswith(f"{IMAGE} /recipes/mine.yaml\n")


def test_texts_are_what_their_readers_read(tmp_path: Path) -> None:
    theirs = load.load(write(tmp_path, THEIRS.replace("cluster_only: true\n", ""), "theirs"))
    for one in (recipe(MIMO), theirs):
        words = shlex.split(render("docker", one), comments=True)
        assert words[:2] == ["docker", "run"]
        (service,) = yaml.safe_load(render("compose", one))["services"].values()
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
        (model,) = yaml.safe_load(render("llama-swap", one))["models"].values()
        # No shell there: nothing but llama-swap's own names may have to be put in.
        assert set(re.findall(r"\$\{?[\w.]+", shlex.join(shlex.split(model["cmd"])))) <= {
            "${PORT",
            "${env.HOME",
            "${HOME",
        }


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
def test_a_description_of_several_lines_stays_a_comment(target: str, tmp_path: Path) -> None:
    text = OURS.replace("name: small", 'name: small\ndescription: "a\\nrm -rf x\\n\\tb"')
    text = text.replace("host: 127.0.0.1", "host: 127.0.0.1\n  port: 8000")
    made = render(target, load.load(write(tmp_path, text)), extra=("a\nb",))
    first, second, *facts = [line for line in made.split("\n") if line.startswith("# ")]
    assert len(facts) == (0 if target == "shell" else 4)
    assert first.startswith("# Made by `sm12x recipe render")
    assert first.endswith("'a b'`.")
    assert second.split() == ["#", "a", "rm", "-rf", "x", "b"]


@pytest.mark.parametrize("target", ["docker", "llama-swap"])
def test_image_port_and_name_are_words_of_their_own(target: str, tmp_path: Path) -> None:
    path = tmp_path / "my; recipe.yaml"
    path.write_text((layout.recipes() / "smoke.yaml").read_text())
    settings = {"port": "80 0", "host": "::"} if target == "docker" else {}
    text = render(target, load.load(path), settings, image="a b; id")
    if target == "llama-swap":
        (model,) = yaml.safe_load(text)["models"].values()
        text = model["cmd"]
    words = shlex.split(text, comments=True)
    assert words[words.index("--name") + 1] == "my-recipe"
    assert "a b; id" in words
    assert target == "llama-swap" or words[words.index("-p") + 1] == "127.0.0.1:80:80"


@pytest.mark.parametrize("word", ["1e6", "-1E+5", "2.5e-3", "0o17", "010", "1:30", "yes", "$A"])
def test_every_word_of_a_compose_file_is_a_text(word: str) -> None:
    text = render("compose", recipe("smoke"), extra=("--x", word))
    line = text.split("- --x\n")[1].split("\n")[0].strip()
    assert line == ("- $$A" if word == "$A" else f"- '{word}'")


def test_compose_puts_nothing_into_paths(tmp_path: Path) -> None:
    path = tmp_path / "a${HOME}" / "mine.yaml"
    path.parent.mkdir()
    path.write_text((layout.recipes() / "smoke.yaml").read_text())
    (service,) = yaml.safe_load(render("compose", load.load(path)))["services"].values()
    assert [f"{path}:/recipes/mine.yaml:ro".replace("$", "$$")] == service["volumes"][1:]


@pytest.mark.parametrize("extra", [("--port", "1", "--port", "8001"), ("--port=8001",)])
def test_the_port_that_counts_is_published(extra: tuple[str, ...]) -> None:
    assert "-p 127.0.0.1:8001:8001 " in render(
        "docker", recipe("smoke"), {"host": "::"}, extra=extra
    )
    text = render("docker", recipe("smoke"), {"host": "::"}, extra=("--host", "127.0.0.1"))
    assert "--network host " in text


@pytest.mark.parametrize("word", ["--port=1", "--host=::"])
def test_an_address_that_another_program_gives_is_not_overridden(word: str) -> None:
    with pytest.raises(UsageError, match="--"):
        render("llama-swap", recipe("smoke"), extra=(word,))
    for made in (nomad.render, nomad.render_overlay):
        with pytest.raises(UsageError, match="--"):
            made(recipe("qwen3.6-27b-nvfp4-rtx-pro-6000"), extra=(word,))
