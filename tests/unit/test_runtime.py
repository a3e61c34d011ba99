"""The image's entry point: which words lead where."""

from __future__ import annotations

import dataclasses
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sm12x.core import declared, machine, process
from sm12x.core.errors import BadFileError, UsageError
from sm12x.runtime import entry, serve
from sm12x.runtime.check import (
    check,
    compiler,
    content,
    machinecode,
    native,
    versions,
)
from sm12x.runtime.check.report import Line
from sm12x.runtime.places import CACHE_VARIABLES, Places
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger, LibraryEntry, PatchEntry

RECIPE = """\
recipe_version: "1"
name: small
description: A small model
container: x
defaults:
  port: 8000
command: vllm serve some/model --port {port}
sm12x:
  hardware: [any]
  gpus: 1
  sleep: {level: 1}
  status: {state: untested, source: nobody}
"""
BLOCKED = RECIPE.replace("source: nobody", "source: nobody, blocked: a kernel is missing")


def make_ledger(**fields: Any) -> Ledger:
    """A ledger with the fields that matter here, and nothing in the others."""
    empty: dict[str, Any] = {
        field.name: "" if field.type == "str" else {} if "dict" in str(field.type) else ()
        for field in dataclasses.fields(Ledger)
        if field.name != "schema"
    }
    return Ledger(**{**empty, **fields})


class Became(Exception):  # noqa: N818 - not an error
    """What the process would have become."""


def replace(argv: Sequence[str], *, env: Mapping[str, str]) -> NoReturn:
    raise Became(tuple(argv), dict(env))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    for name in (*CACHE_VARIABLES, "SM12X_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Places(
        root=tmp_path / "root",
        site=tmp_path / "site",
        cuda_home=tmp_path / "cuda",
        cache=tmp_path / "cache",
        system=tmp_path,
    )
    found.recipes.mkdir(parents=True)
    (found.recipes / "small-model.yaml").write_text(RECIPE)
    ledger = make_ledger(
        base_version="1.2.3",
        stack_id="0123abcd",
        patches=(
            PatchEntry(
                name="0001-reset.patch",
                subject="Reset the error",
                upstream="",
                drop_when="",
                witness="",
                sha256="",
                state="applied",
                native="not compiled in quick mode",
            ),
        ),
        mode="quick",
        machine="x86_64",
        python="3.13",
        arch_list="12.0a;12.1a",
        files=(),
        libraries=tuple(
            LibraryEntry(
                path=kind,
                sha256="",
                size=0,
                official_size=0,
                origin="compiled" if kind == "native" else "official",
                reason="",
                cubins={},
                ptx={},
                sm120=kind,
                sm121="ptx",
                ops=(),
                lost=("_q::a", "_q::b") if kind == "native" else (),
            )
            for kind in ("native", "host")
        ),
        dependencies={},
    )
    declared.write_json(found.ledger, ledger)
    return found


def dispatch(places: Places, *words: str) -> int:
    return entry.dispatch(words, places, replace=replace)


@pytest.mark.parametrize("words", [(), ("help",), ("--help",)])
def test_without_a_word_it_says_what_it_is(
    places: Places, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(places, *words) == 0
    golden = Path(__file__).with_name("data") / "inside-help.txt"
    assert capsys.readouterr().out == golden.read_text()


def test_patches_are_listed(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = ledgers.read(places.ledger)
    assert dispatch(places, "patches") == 0
    out = capsys.readouterr().out
    assert all(f"{patch.name}: {patch.subject}" in out for patch in ledger.patches)
    dispatch(places)
    assert ledger.patches[0].name not in capsys.readouterr().out


def test_a_source_of_another_patch_level_is_said(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = ledgers.read(places.ledger)
    for version, said in (("v4.7.0", True), ("v4.7.1", False), ("", False)):
        source = ledgers.SourceEntry(name="cutlass", pin="v4.7.1", version=version)
        declared.write_json(places.ledger, dataclasses.replace(ledger, sources=(source,)))
        dispatch(places)
        assert ("cutlass v4.7.0 in place of v4.7.1" in capsys.readouterr().out) is said


def test_a_blocked_recipe_is_not_offered_to_be_run(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    (places.recipes / "small-model.yaml").write_text(BLOCKED)
    dispatch(places)
    out = capsys.readouterr().out
    assert "cannot serve yet: a kernel is missing" in out
    assert "--gpus" not in out
    # GIVEN another that can serve THEN it stands first
    (places.recipes / "zz-model.yaml").write_text(RECIPE)
    dispatch(places, "recipes")
    out = capsys.readouterr().out
    assert out.index("zz-model") < out.index("small-model")


def test_a_recipe_becomes_vllm(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM12X_PORT", "1")
    with pytest.raises(Became) as became:
        dispatch(places, "small-model", "--", "--seed", "3")
    assert became.value.args[0] == ("vllm", "serve", "some/model", "--port", "1", "--seed", "3")
    with pytest.raises(Became) as became:
        dispatch(places, "small-model", "port=2")
    assert became.value.args[0][-1] == "2"


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_a_verb_of_a_build_machine_becomes_that_command(places: Places, verb: str) -> None:
    with pytest.raises(Became) as became:
        dispatch(places, verb, "http://127.0.0.1:8000", "--model", "2")
    words = ("-P", "-m", "sm12x", verb, "http://127.0.0.1:8000", "--model", "2")
    assert became.value.args[0] == (sys.executable, *words)


def test_a_blocked_recipe_says_so_and_goes_on(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    (places.recipes / "small-model.yaml").write_text(BLOCKED)
    with pytest.raises(Became):
        dispatch(places, "small-model")
    assert "warning: small-model cannot serve yet: a kernel is missing" in capsys.readouterr().err


def test_a_mounted_file_is_a_recipe_with_one_gpu(places: Places, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    text = RECIPE.split("sm12x:")[0].replace("port: 8000", "port: 8000\n  tensor_parallel: 2")
    path.write_text(text.replace("{port}", "{port} -tp {tensor_parallel}"))
    with pytest.raises(Became) as became:
        dispatch(places, str(path))
    assert became.value.args[0][-1] == "1"


def machine_of(
    monkeypatch: pytest.MonkeyPatch, *, cores: int, gib: float | None, name: str = "x86_64"
) -> None:
    """Have a machine with that many processors and that much free memory."""
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "available", lambda: None if gib is None else int(gib * 2**30))
    monkeypatch.setattr(platform, "machine", lambda: name)


@pytest.mark.parametrize(
    ("cores", "gib", "name", "jobs"),
    [
        (16, 480, "x86_64", "16"),
        (16, 61, "x86_64", "15"),
        (16, 32, "x86_64", "8"),
        (16, 31.9, "x86_64", "7"),
        (2, 3, "x86_64", "1"),
        (2, 0, "x86_64", "1"),
        (20, 110, "aarch64", "13"),
        (20, 7, "aarch64", "1"),
        (20, None, "aarch64", None),
    ],
)
def test_compilers_of_a_first_start_follow_cores_and_memory(
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cores: int,
    gib: float | None,
    name: str,
    jobs: str | None,
) -> None:
    machine_of(monkeypatch, cores=cores, gib=gib, name=name)
    for words in (("small-model",), ("vllm", "serve", "x")):
        monkeypatch.setattr(process, "which", lambda _: Path("/bin/vllm"))
        with pytest.raises(Became) as became:
            dispatch(places, *words)
        assert became.value.args[1].get("MAX_JOBS") == jobs
        err = capsys.readouterr().err
        assert err.count("MAX_JOBS=") == (2 if jobs else 0)
        assert (f"note: MAX_JOBS={jobs}:" in err) is bool(jobs)


@pytest.mark.parametrize(("name", "jobs"), [("aarch64", "5"), ("x86_64", "16")])
def test_a_model_in_the_hosts_memory_counts_before_compilers(
    places: Places, monkeypatch: pytest.MonkeyPatch, name: str, jobs: str
) -> None:
    machine_of(monkeypatch, cores=16, gib=110, name=name)
    term = "{ gib: 35, basis: estimated, source: a test }"
    memory = f"  memory: {{ weights: {term}, kv: {term} }}\n"
    (places.recipes / "small-model.yaml").write_text(RECIPE.rstrip("\n") + "\n" + memory)
    with pytest.raises(Became) as became:
        dispatch(places, "small-model")
    # (110 - 70) / 8, and beside a GPU's own memory 110 / 4, of 16 processors.
    assert became.value.args[1]["MAX_JOBS"] == jobs


def test_compilers_are_left_to_whoever_limits_them(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_of(monkeypatch, cores=16, gib=32)
    # Another program than a server gets what it was given.
    with pytest.raises(Became) as became:
        dispatch(places, "sh", "-c", "exit 3")
    assert "MAX_JOBS" not in became.value.args[1]
    monkeypatch.setenv("MAX_JOBS", "3")
    with pytest.raises(Became) as became:
        dispatch(places, "small-model")
    assert "MAX_JOBS" not in became.value.args[1]
    # Empty is not set: ninja would refuse it.
    monkeypatch.setenv("MAX_JOBS", "")
    with pytest.raises(Became) as became:
        dispatch(places, "small-model")
    assert became.value.args[1]["MAX_JOBS"] == "8"
    assert capsys.readouterr().err.count("note:") == 1
    # The recipe's own.
    (places.recipes / "small-model.yaml").write_text(
        RECIPE.replace("command:", "env:\n  MAX_JOBS: 5\ncommand:")
    )
    with pytest.raises(Became) as became:
        dispatch(places, "small-model")
    assert became.value.args[1]["MAX_JOBS"] == "5"
    assert "MAX_JOBS" not in capsys.readouterr().err


SLEEPY = RECIPE.replace("--port {port}", "--port {port} --enable-sleep-routes")


@pytest.mark.parametrize(
    ("text", "words", "key", "refused"),
    [
        (RECIPE, (), "", ""),
        (SLEEPY, (), "", "with sleep routes and no key"),
        (SLEEPY, (), "k", ""),
        (SLEEPY, ("--", "--host", "127.0.0.1"), "", ""),
        (SLEEPY, ("--", "--host", "10.0.0.1"), "", "listens on 10.0.0.1 with sleep routes"),
        (SLEEPY, ("--", "--api-key", "$KEY"), "", ""),
        (SLEEPY, ("--", "--headless"), "", ""),
        (RECIPE, ("--", "--trust-remote-code"), "", "no commit of it is named"),
        (RECIPE, ("--", "--trust-remote-code", "--revision", "main"), "", "no commit"),
        (RECIPE, ("--", "--trust-remote-code", "--revision", "f" * 40), "", ""),
        (RECIPE.replace("some/model", "/models/m"), ("--", "--trust-remote-code"), "", ""),
    ],
)
def test_a_server_that_strangers_could_stop_or_change_is_refused(
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: tuple[str, ...],
    key: str,
    refused: str,
) -> None:
    (places.recipes / "small-model.yaml").write_text(text)
    monkeypatch.setenv("VLLM_API_KEY", key)
    if refused:
        with pytest.raises(UsageError, match=refused):
            dispatch(places, "small-model", *words)
        return
    with pytest.raises(Became):
        dispatch(places, "small-model", *words)
    public = not key and not {"127.0.0.1", "--api-key", "--headless"} & {*words}
    assert ("asks for no key" in capsys.readouterr().err) == public


def test_a_cache_that_all_may_write_gets_the_sticky_bit(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.cache.mkdir(parents=True, exist_ok=True)
    for before, after in ((0o777, 0o1777), (0o755, 0o755), (0o1777, 0o1777), (0o707, 0o1707)):
        places.cache.chmod(before)
        assert serve.require_caches(places, {}) == []
        assert stat.S_IMODE(places.cache.stat().st_mode) == after

    def refused(self: Path, mode: int) -> None:
        raise PermissionError

    places.cache.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", refused)
    assert "any user may replace" in serve.require_caches(places, {})[0]


def test_any_other_program_is_run_as_given(places: Places) -> None:
    with pytest.raises(Became) as became:
        dispatch(places, "sh", "-c", "exit 3")
    assert became.value.args[0] == ("sh", "-c", "exit 3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("smal-model",), "perhaps you meant small-model"),
        (("chekc",), "perhaps you meant check"),
        (("--max-model-len", "3"), "go after a recipe's name and --"),
        (("qwertyuiop",), "run the image without an argument"),
        (("recipes", "smal-model"), "perhaps you meant small-model"),
        (("check", "--jsno"), "check takes no '--jsno'"),
        (("small-model", "--port", "3"), "put vLLM's own arguments after --"),
        (("small-model", "prot=3"), "perhaps you meant port"),
    ],
)
def test_a_wrong_word_is_refused_with_a_hint(
    places: Places, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        dispatch(places, *words)
    assert error.value.exit_code == 2


def test_a_recipe_for_several_machines_is_refused(places: Places) -> None:
    theirs = "cluster_only: true\n" + RECIPE.split("sm12x:")[0]
    (places.recipes / "small-model.yaml").write_text(theirs)
    with pytest.raises(UsageError, match="several machines"):
        dispatch(places, "small-model")


def test_a_recipe_for_several_machines_needs_the_address_of_the_first(places: Places) -> None:
    text = "cluster_only: true\n" + RECIPE.replace(
        "defaults:", "defaults:\n  master_addr: 127.0.0.1"
    ).replace("{port}", "{port} --master-addr {master_addr}")
    (places.recipes / "small-model.yaml").write_text(text)
    with pytest.raises(UsageError, match="needs the first machine's address"):
        dispatch(places, "small-model")
    with pytest.raises(Became) as became:
        dispatch(places, "small-model", "master_addr=10.0.0.1", "--", "--headless")
    assert became.value.args[0][-2:] == ("10.0.0.1", "--headless")


def test_recipes_are_listed_and_shown(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(places, "recipes") == 0
    assert "small-model [untested]: A small model" in capsys.readouterr().out
    assert dispatch(places, "recipes", "small-model") == 0
    out = capsys.readouterr().out
    assert "    port=8000" in out
    assert "-p 127.0.0.1:8000:8000" in out


def test_an_image_without_a_ledger_says_so(places: Places) -> None:
    places.ledger.unlink()
    with pytest.raises(BadFileError, match="ledger"):
        dispatch(places)


def test_a_cache_that_cannot_be_written_is_said_before_vllm_starts(
    places: Places, tmp_path: Path
) -> None:
    # A file where a folder should be: refused to root as well.
    (tmp_path / "cache").write_text("")
    with pytest.raises(BadFileError, match=r"cannot be written by uid .* `-v sm12x-cache:/cache`"):
        dispatch(places, "small-model")


def test_a_container_without_tmp_is_told_the_option(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for words in (("small-model",), ("check",)):
        with pytest.raises(BadFileError, match="--tmpfs /tmp:exec"):
            dispatch(places, *words)


def test_a_uid_without_a_name_gets_one_and_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert serve.identity({"HOME": "/"}) == {"LOGNAME": "vllm", "USER": "vllm", "HOME": "/cache"}


def test_places_follow_the_environment() -> None:
    found = Places.of_image({"CUDA_HOME": "/c"})
    assert found == dataclasses.replace(found, root=Path("/opt/sm12x"), cuda_home=Path("/c"))


def test_a_quick_check_compiles_nothing(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(name: str) -> Callable[..., list[Line]]:
        def step(*_: object) -> list[Line]:
            asked.append(name)
            return []

        return step

    for module, name in (
        (versions, "check"),
        (content, "check"),
        (machinecode, "check"),
        (native, "check_modules"),
        (machinecode, "check_flashinfer"),
        (native, "check_arguments"),
        (compiler, "check"),
        (compiler, "check_kernels"),
    ):
        monkeypatch.setattr(module, name, noted(f"{module.__name__.rpartition('.')[2]}.{name}"))
    driver = native.LoadedDriver(path=None, env={})
    monkeypatch.setattr(native, "check_driver", lambda *_: (driver, []))
    monkeypatch.setattr(check, "_ldconfig", lambda: "")
    whole = ["versions.check", "content.check", "machinecode.check"]
    whole += ["native.check_modules", "machinecode.check_flashinfer", "native.check_arguments"]
    assert dispatch(places, "check", "--quick") == 0
    assert asked == whole
    asked.clear()
    assert dispatch(places, "check") == 0
    assert asked == [*whole, "compiler.check", "compiler.check_kernels"]
