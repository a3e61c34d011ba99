"""The package with the sleep-mode backend: its metadata, and where it is used."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from sm12x.core.errors import UsageError
from sm12x.recipes import load
from sm12x.runtime import serve, sleep_backend

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "scripts" / "sleep-keep"


def test_vllm_finds_the_package() -> None:
    # GIVEN the package's metadata
    data = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    # THEN the entry point names a function that is there
    points = data["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = points["sleep_keep"].partition(":")
    text = (PACKAGE / module / "__init__.py").read_text(encoding="utf-8")
    assert f"def {function}() -> None:" in text
    assert data["tool"]["setuptools"]["packages"] == [module]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["MODEL", "--enable-sleep-mode"], ("--sleep-mode-backend", "keep")),
        (["MODEL"], ()),
        (["MODEL", "--enable-sleep-mode", "--sleep-mode-backend", "cumem"], ()),
        (["MODEL", "--enable-sleep-mode", "--sleep-mode-backend=cumem"], ()),
        # It takes effect with vLLM's own backend alone.
        (["MODEL", "--enable-sleep-mode", "--sleep-mode-offload-cudagraph"], ()),
        (None, ()),
    ],
)
def test_the_backend_is_chosen_where_nothing_else_is(
    given: Sequence[str] | None, wanted: tuple[str, ...]
) -> None:
    for setting in ("", "auto", "keep"):
        assert sleep_backend.arguments(given, setting=setting, installed=True) == wanted
        assert sleep_backend.arguments(given, setting=setting, installed=False) == ()
    assert sleep_backend.arguments(given, setting="release", installed=True) == ()


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="SLEEP_MODE_HOST_COPY=kept"):
        sleep_backend.arguments(["MODEL"], setting="kept", installed=False)


@pytest.mark.parametrize(
    ("installed", "environ", "chosen"),
    [
        (True, {"SLEEP_MODE_HOST_COPY": "auto"}, True),
        (False, {"SLEEP_MODE_HOST_COPY": "auto"}, False),
        (True, {}, True),
        (True, {"SLEEP_MODE_HOST_COPY": "release"}, False),
    ],
)
def test_a_recipe_that_sleeps_is_served_with_the_backend(
    installed: bool, environ: dict[str, str], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an image with the package, and one of others without it
    monkeypatch.setattr(sleep_backend, "is_installed", lambda: installed)
    recipe = load.load(ROOT / "recipes" / "mimo-v2.5-flash-rtx-pro-6000-tp4.yaml")
    # WHEN the recipe is prepared
    rendered, _ = serve.prepare(recipe, ["port=8001", "--", "--seed", "3"], environ)
    # THEN the backend comes after what was given
    last = ("--seed", "3", "--sleep-mode-backend", "keep") if chosen else ("--seed", "3")
    assert rendered.argv[-len(last) :] == last
    assert ("--sleep-mode-backend" in rendered.argv) == chosen
