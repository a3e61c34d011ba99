"""A pool's configuration: its file, its words, how its models are run, and whether they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm12x import layout
from sm12x.core import declared
from sm12x.core.errors import BadFileError, Sm12xError, UsageError
from sm12x.pool import __main__ as command
from sm12x.pool import config as configs
from sm12x.pool import ladder
from sm12x.pool.config import PoolConfig
from sm12x.pool.gateway import Keys
from sm12x.pool.gpus import Gpus
from sm12x.pool.ladder import Need
from sm12x.runtime.places import Places

FIND = configs.find_in(layout.recipes())
FLASH, MIMO = "deepseek-v4-flash-rtx-pro-6000-tp4", "mimo-v2.5-flash-rtx-pro-6000-tp4"
SERVE = "[vllm, serve, m, --enable-sleep-mode, --enable-sleep-routes]"


def read(tmp_path: Path, text: str) -> PoolConfig:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    return configs.read(path)


def specs(config: PoolConfig) -> dict[str, configs.Spec]:
    return configs.specs(config, FIND, {})


def test_a_file_with_every_kind_of_model(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        f"""
port: 9000
default: mine
models:
  flash: {{recipe: {FLASH}, settings: {{port: 8001}}, arguments: [--seed, 3], aliases: [gpt-4]}}
  mine: {{url: "http://10.0.0.5:8000/", model: served, gpus: [4]}}
  own: {{command: {SERVE}, env: {{A: 1}}, idle_seconds: 60}}
policy: {{residency_swaps: 5}}
""",
    )
    assert (config.first(), config.policy.rules().residency_swaps) == ("mine", 5.0)
    run = specs(config)
    assert run["flash"].argv[:2] == ("vllm", "serve")
    assert run["flash"].argv[-6:] == ("--seed", "3", "--host", "127.0.0.1", "--port", "18000")
    assert run["flash"].served == ("deepseek-v4-flash",)
    assert run["flash"].gpus == frozenset(range(4))
    assert (run["mine"].url, run["mine"].argv) == ("http://10.0.0.5:8000", ())
    assert run["own"].argv[-2:] == ("--port", "18001")
    assert (run["own"].served, run["own"].env["A"]) == (("m",), "1")
    assert run["own"].gpus == frozenset({0})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("models: {}", "1: models"),
        ("modles: {a: {recipe: smoke}}", "models"),
        ("models:\n  a: {recip: smoke}", "2: models.a.recip is not a known key"),
        ("models:\n  a: {recipe: smoke, url: 'http://x:1'}", "models.a.recipe is needed"),
        ("models:\n  a: {}", "models.a.recipe is needed"),
        ("models:\n  a: {url: 'ftp://x'}", "models.a.url is 'ftp://x'"),
        ("models:\n  a: {url: 'http://x:1', sleep: stop}", "models.a.sleep"),
        ("models:\n  a: {recipe: smoke, sleep: level_2}", "models.a.sleep"),
        ("models:\n  a: {recipe: smoke, sleep: lvel_1}", "level_1"),
        ("models:\n  a: {command: [echo, hello]}", "models.a.command"),
        ("models:\n  a: {recipe: smoke, aliases: [b]}\n  b: {recipe: smoke}", "'b' twice"),
        ("default: c\nmodels:\n  a: {recipe: smoke}", "1: default"),
        ("models:\n  a: {recipe: smoke}\nlimits: {hold_seconds: 0}", "limits.hold_seconds"),
        ("models:\n  a: {recipe: smoke}\nlimits: {hold_seconds: .nan}", "limits.hold_seconds"),
        ("models:\n  a: {recipe: smoke}\nport: 70000", "port"),
        ("models:\n  ../../x: {recipe: smoke}", "names no model"),
        ("pool_version: 2\nmodels:\n  a: {recipe: smoke}", "pool_version"),
        ("[]", "not a mapping"),
        ("models: [a", "is not YAML"),
    ],
)
def test_a_wrong_file_is_told_with_line_and_key(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(BadFileError) as caught:
        read(tmp_path, text)
    assert fault in caught.value.message
    assert "pool.yaml:" in caught.value.message


def test_what_is_read_fits_the_schema_and_the_other_way_round() -> None:
    schema = json.loads((layout.schemas() / "pool-1.json").read_text())
    good: dict[str, Any] = {"models": {"a": {"recipe": "smoke"}}, "limits": {"hold_seconds": 5}}
    raw: dict[str, Any]
    for raw in (good, {**good, "port": "x"}, {**good, "what": 1}, {"models": {}}):
        config, _ = declared.check(PoolConfig, raw)
        fits = jsonschema.Draft202012Validator(schema).is_valid(raw)
        assert (config is not None) == fits, raw


def test_words_are_a_configuration() -> None:
    words = ["--port", "9000", "--host=0.0.0.0", "--load-seconds", "60", FLASH]
    config = configs.from_words([*words, "port=8001", "+", MIMO, "max_model_len=4096", "--", "-x"])
    assert (config.port, config.host, config.limits.load_seconds) == (9000, "0.0.0.0", 60.0)  # noqa: S104
    assert config.first() == FLASH
    assert config.models[FLASH].port == 8001
    assert config.models[MIMO].settings == {"max_model_len": "4096"}
    assert config.models[MIMO].arguments == ("-x",)
    assert [spec.url for spec in specs(config).values()] == [
        "http://127.0.0.1:8001",
        "http://127.0.0.1:18000",
    ]


@pytest.mark.parametrize(
    "words",
    [
        [FLASH, "+"],
        ["+", FLASH],
        [],
        ["--port", "x", FLASH],
        ["--port"],
        ["--what", FLASH],
        [FLASH, "+", FLASH],
        [FLASH, "port=0x"],
        [FLASH, "word"],
    ],
)
def test_words_that_are_none(words: list[str]) -> None:
    with pytest.raises(UsageError):
        configs.from_words(words)


@pytest.mark.parametrize(
    "models",
    [
        {"a": {"recipe": "no-such"}},
        {"a": {"recipe": "smoke", "port": 8000}},
        {"a": {"recipe": "smoke", "port": 9}, "b": {"recipe": "smoke", "port": 9}},
        {"a": {"recipe": "smoke", "settings": {"no": "such"}}},
        {"a": {"recipe": "smoke", "sleep": "level_1"}},
        {"a": {"recipe": "smoke", "running": "freeze"}},
        {"a": {"recipe": "rotation-pair-rtx-pro-6000-tp4"}},
    ],
)
def test_what_cannot_be_run(models: dict[str, Any]) -> None:
    config, faults = declared.check(PoolConfig, {"models": models})
    assert config is not None, faults
    with pytest.raises(UsageError):
        specs(config)


def test_a_server_that_keeps_requests_may_freeze_them() -> None:
    raw: dict[str, Any] = {
        "models": {"a": {"recipe": FLASH, "running": "freeze", "arguments": ["--sleep-keep-kv"]}}
    }
    config, _ = declared.check(PoolConfig, raw)
    assert config is not None
    assert specs(config)["a"].keeps_kv


def test_variables_of_the_pool_are_not_those_of_its_models() -> None:
    config = configs.from_words(["smoke"])
    run = configs.specs(config, FIND, {"SM12X_PORT": "1", "SM12X_NONSENSE": "x"})
    assert run["smoke"].argv[-1].endswith("--port 18000")
    assert run["smoke"].arguments["port"] == "18000"
    assert not run["smoke"].sleeps
    assert run["smoke"].remarks == ()


def test_keys_have_priorities_and_the_admin_is_a_user() -> None:
    raw: dict[str, Any] = {
        "models": {"a": {"recipe": "smoke"}},
        "keys": {"priorities": {"FAST": 7}},
    }
    config, _ = declared.check(PoolConfig, raw)
    assert config is not None
    keys = Keys(config, {"VLLM_API_KEY": "one, two", "FAST": "three", "SM12X_POOL_ADMIN_KEY": "x"})

    def bearer(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    assert [keys.user(bearer(key)) for key in ("one", "two", "three", "x", "four", "")] == [
        *(0, 0, 7, 0, None, None)
    ]
    assert [keys.admin(bearer(key)) for key in ("x", "one", "")] == [True, False, False]
    assert keys.user({}) is None
    nobody = Keys(config, {})
    assert (nobody.open, nobody.user({}), nobody.admin(bearer(""))) == (True, 0, False)


@pytest.mark.parametrize(
    ("host", "origin", "priority"),
    [
        ("127.0.0.1:8000", "", 0),
        ("localhost:8000", "http://localhost:8000", 0),
        ("[::1]:8000", "", 0),
        ("pool", "", 0),
        ("127.0.0.1:8000", "https://page.example", None),
        ("page.example:8000", "http://page.example:8000", None),
        ("127.0.0.1:8000", "null", None),
    ],
)
def test_without_keys_no_web_page_is_let_in(host: str, origin: str, priority: int | None) -> None:
    config, _ = declared.check(PoolConfig, {"models": {"a": {"recipe": "smoke"}}})
    assert config is not None
    headers = {"Host": host, **({"Origin": origin} if origin else {})}
    assert Keys(config, {}).user(headers) == priority
    key = {"Authorization": "Bearer one"}
    assert Keys(config, {"VLLM_API_KEY": "one"}).user({**headers, **key}) == 0


# -- the ladder --


def need(name: str, **more: Any) -> Need:
    figures = {"gpus": frozenset({0}), "awake": 60.0, "weights": 20.0, "residue": 2.0, **more}
    return Need(name=name, rungs=figures.pop("rungs", ("kv_cache", "level_1", "stop")), **figures)


@pytest.mark.parametrize(
    ("needs", "gpu", "ram", "rungs"),
    [
        # All weights fit beside each other.
        ([need("a"), need("b")], 95.0, 500.0, {"a": "kv_cache", "b": "kv_cache"}),
        # One too many: the heaviest goes one rung down.
        ([need("a"), need("b", weights=40.0)], 95.0, 500.0, {"a": "kv_cache", "b": "level_1"}),
        ([need("a"), need("b")], 70.0, 500.0, {"a": "level_1", "b": "level_1"}),
        # The host has no room for both copies.
        ([need("a"), need("b", weights=30.0)], 65.0, 40.0, {"a": "level_1", "b": "stop"}),
        ([need("a", rungs=("level_1",)), need("b")], 95.0, 9.0, None),
        # Two that never sleep.
        ([need("a", rungs=()), need("b", rungs=())], 95.0, 500.0, None),
        ([need("a", rungs=()), need("b", awake=30.0)], 95.0, 500.0, {"b": "kv_cache"}),
        # GPU sets of their own.
        (
            [need("a"), need("b", gpus=frozenset({1}))],
            61.0,
            0.0,
            {"a": "kv_cache", "b": "kv_cache"},
        ),
        ([need("a", awake=100.0)], 95.0, 500.0, None),
    ],
)
def test_the_quickest_rungs_that_fit(
    needs: list[Need], gpu: float, ram: float, rungs: dict[str, str] | None
) -> None:
    if rungs is None:
        with pytest.raises(UsageError):
            ladder.choose(needs, gpu_gib=gpu, ram_gib=ram)
    else:
        assert ladder.choose(needs, gpu_gib=gpu, ram_gib=ram).rungs == rungs


def test_what_is_not_known_is_said_and_sleeps_at_level_1() -> None:
    chosen = ladder.choose([need("a"), need("b", awake=None)], gpu_gib=95.0, ram_gib=1.0)
    assert chosen.rungs == {"a": "level_1", "b": "level_1"}
    assert chosen.remarks
    assert ladder.choose([need("a")], gpu_gib=None, ram_gib=1.0).remarks


def test_the_plan_of_recipes_decides() -> None:
    run = specs(configs.from_words([FLASH, "+", MIMO]))
    needs = [command.need(spec, 95.0) for spec in run.values()]
    assert all(one.awake and one.weights and one.residue for one in needs)
    chosen = ladder.choose(needs, gpu_gib=95.0, ram_gib=700.0)
    # The weights of the second fit beside the first awake, and not the other way round.
    assert chosen.rungs == {FLASH: "level_1", MIMO: "kv_cache"}
    with pytest.raises(UsageError):
        ladder.choose(needs, gpu_gib=48.0, ram_gib=700.0)


def test_check_prints_what_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM12X_IMAGE_ROOT", str(layout.root()))
    path = tmp_path / "pool.yaml"
    path.write_text(f"machine: {{gpu_gib: 95, ram_gib: 700}}\nmodels:\n  a: {{recipe: {FLASH}}}\n")
    with pytest.raises(SystemExit) as ended:
        command.main(["--check", "--config", str(path)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "http://127.0.0.1:18000" in printed
    assert "kv_cache" in printed
    path.write_text("models: 3\n")
    with pytest.raises(SystemExit) as ended:
        command.main(["--check", "--config", str(path)])
    assert ended.value.code == BadFileError.exit_code


@pytest.mark.parametrize("words", [["--config"], ["--config", "a", "b"], ["--config=a", "b"]])
def test_config_takes_one_file(words: list[str]) -> None:
    with pytest.raises(Sm12xError):
        command.load(words, Places.of_image(), Gpus({}))
