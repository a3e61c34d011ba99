"""What README.md and docs/ promise of the image, asked of the image."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sm12x.core import process
from sm12x.core.process import Completed
from sm12x.deploy.container import HARDENED
from sm12x.image.bundle.record import Record
from sm12x.image.engine.engine import Engine
from sm12x.runtime.places import CACHE_VARIABLES
from sm12x.stack.model.base import Base
from sm12x.wheel.ledger import FileEntry, Ledger, LibraryEntry

Run = Callable[..., Completed]

RECIPE = "deepseek-v4-flash-rtx-pro-6000-tp4"
SITE = "/opt/venv/lib/python3.13/site-packages"
# MiB that a Nomad specification gives a check.
CHECK_MIB = 6144


def test_with_no_argument_it_says_what_it_can_do(docker_run: Run, made: Record) -> None:
    done = docker_run()
    assert done.returncode == 0, done.stderr
    assert made.stack_id in done.stdout
    assert RECIPE in done.stdout
    assert "check" in done.stdout


def test_check_proves_it_without_gpu_and_network(docker_run: Run) -> None:
    """Also that it fits the memory and the rights that a Nomad specification gives it."""
    done = docker_run("check", options=(*HARDENED.split(), "--memory", f"{CHECK_MIB}m"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fail" not in done.stdout.split()


@pytest.fixture(scope="module")
def covered(ledger: Ledger) -> tuple[FileEntry, LibraryEntry, LibraryEntry]:
    """A patched file that is covered by another text, and a compiled module by another module."""
    patched = next(entry for entry in ledger.files if entry.origin == "patched")
    mine = next(entry for entry in ledger.libraries if entry.origin == "compiled")
    others = [entry for entry in ledger.libraries if entry.cubins and entry.path != mine.path]
    return patched, mine, min(others, key=lambda entry: entry.size)


@pytest.fixture(scope="module")
def failures(
    docker_run: Run,
    covered: tuple[FileEntry, LibraryEntry, LibraryEntry],
    made: Record,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, str]]:
    """The failed lines of one check of the image with both files covered."""
    patched, mine, other = covered
    scratch = tmp_path_factory.mktemp("covered")
    text = scratch / "other.py"
    text.write_text("# not what was built\n")
    with zipfile.ZipFile(folder / made.wheel) as wheel:
        swapped = Path(wheel.extract(other.path, scratch))
    swapped.chmod(0o755)
    covers = [f"{text}:{SITE}/{patched.path}:ro", f"{swapped}:{SITE}/{mine.path}:ro"]
    options = tuple(word for cover in covers for word in ("--volume", cover))
    done = docker_run("check", "--quick", "--json", options=options)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in json.loads(done.stdout)["lines"] if line["state"] == "fail"]


def test_check_finds_a_file_that_is_not_the_built_one(
    failures: list[dict[str, str]], covered: tuple[FileEntry, LibraryEntry, LibraryEntry]
) -> None:
    patched, _, _ = covered
    assert any(patched.path in line["text"] for line in failures)


def test_check_names_a_module_that_was_swapped(
    failures: list[dict[str, str]], covered: tuple[FileEntry, LibraryEntry, LibraryEntry]
) -> None:
    """Another real module of the same wheel in the place of one that was compiled."""
    _, mine, _ = covered
    topics = {line["topic"] for line in failures if mine.path in line["text"]}
    assert {"files", "machine code"} <= topics


def test_it_runs_as_a_normal_user_and_as_any_other(docker_run: Run) -> None:
    assert docker_run("id", "-u").stdout == "1000\n"
    # Any user writes there, and replaces nothing of another one's.
    assert docker_run("stat", "-c", "%a", "/cache").stdout == "1777\n"
    # As rendered commands start it: the compilers and the entry point need no more.
    closed = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", "16g")
    hardened = docker_run("sh", "-c", "touch /cache/x && id -u", options=closed)
    assert hardened.stdout == "1000\n", hardened.stderr
    any_user = docker_run(
        "sh", "-c", "touch /cache/x && id -u", options=("--user", "12345", "--read-only")
    )
    assert (any_user.returncode, any_user.stdout) == (0, "12345\n"), any_user.stderr


def test_what_is_compiled_at_a_start_outlives_the_container(docker_run: Run) -> None:
    """Compilers are asked for their folders: a name that none reads would be set in vain."""
    ask = """
import json, os
from cutlass.base_dsl import cache_helpers
from tilelang.env import env
from triton import knobs
from flashinfer.jit import env as flashinfer
print(json.dumps([str(path) for path in (
    cache_helpers.default_generated_ir_path, env.TILELANG_CACHE_DIR, env.TILELANG_TMP_DIR,
    knobs.cache.dir, flashinfer.FLASHINFER_WORKSPACE_DIR, os.environ["CUDA_CACHE_PATH"],
)]))
"""
    done = docker_run("python", "-c", ask)
    assert done.returncode == 0, done.stderr
    folders = json.loads(done.stdout.splitlines()[-1])
    assert [folder for folder in folders if not folder.startswith("/cache/")] == []
    environment = docker_run("env").stdout.splitlines()
    lost = [
        name
        for name in CACHE_VARIABLES
        if not any(line.startswith(f"{name}=/cache/") for line in environment)
    ]
    assert lost == []


def test_a_mistyped_recipe_names_the_near_one(docker_run: Run) -> None:
    done = docker_run("deepseek-v4-flash-rtx-pro-6000-tp")
    assert done.returncode == 2
    assert RECIPE in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_is_checked_without_a_gpu(docker_run: Run) -> None:
    recipes = ("deepseek-v4-flash-rtx-pro-6000-tp4", "mimo-v2.5-flash-rtx-pro-6000-tp4")
    done = docker_run("pool", "--check", recipes[0], "+", recipes[1])
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in recipes)
    assert "http://127.0.0.1:18001" in done.stdout
    done = docker_run("pool", "--check", recipes[0], "+", "no-such")
    assert done.returncode == 2
    assert "no-such" in done.stderr


def test_vllm_says_which_stack_it_carries(docker_run: Run, ledger: Ledger) -> None:
    done = docker_run("python", "-c", "import importlib.metadata as m; print(m.version('vllm'))")
    assert done.stdout.strip() == ledger.wheel_version, done.stderr


@pytest.mark.parametrize(("verb", "option"), [("verify", "--max-wake"), ("bench", "--swaps")])
def test_a_verb_is_the_command_of_a_build_machine(docker_run: Run, verb: str, option: str) -> None:
    done = docker_run(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
    done = docker_run(verb, "http://127.0.0.1:1")
    assert done.returncode == 17, done.stdout + done.stderr
    assert "nothing listens there" in done.stderr


def test_no_libcuda_is_on_the_default_path(docker_run: Run) -> None:
    done = docker_run("/sbin/ldconfig", "-p")
    assert done.returncode == 0, done.stderr
    assert "libc.so.6" in done.stdout
    assert "libcuda.so" not in done.stdout


def test_labels_and_environment(engine: Engine, made: Record) -> None:
    labels = engine.labels(made.tags[0])
    assert labels["sm12x.stack"] == made.stack_id
    assert labels["sm12x.mode"] == made.mode
    assert labels["sm12x.ledger.sha256"] == made.ledger_sha256
    assert labels["org.opencontainers.image.base.digest"] == made.base_digest
    shown = process.run(
        [engine.program, "inspect", "--format", "{{json .Config.Env}}", made.tags[0]]
    )
    names = {entry.partition("=")[0] for entry in json.loads(shown.stdout)}
    host_only = {name for name in names if "PROXY" in name.upper() or name.startswith("PIP_")}
    assert not host_only
    assert not names & {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "LD_LIBRARY_PATH"}


def test_both_tags_name_the_same_image(engine: Engine, made: Record) -> None:
    assert {engine.image_id(tag) for tag in made.tags} == {made.image_id}


def test_a_second_bundle_builds_nothing(made: Record, base: Base) -> None:
    sm12x = Path(sys.executable).with_name("sm12x")
    words = ["--base", base.version, "--build", made.mode, "--engine", "docker", "--json"]
    done = process.run([sm12x, "bundle", *words])
    assert json.loads(done.stdout)["unchanged"] is True


def test_a_second_build_from_nothing_gives_the_same_bytes(made: Record, base: Base) -> None:
    if made.mode != "quick":
        pytest.skip("a full build takes an hour: `make bundle ARGS=--twice` does it")
    sm12x = Path(sys.executable).with_name("sm12x")
    words = ["--base", base.version, "--build", made.mode, "--engine", made.engine.split()[0]]
    done = process.run([sm12x, "bundle", *words, "--twice", "--json"])
    assert f"built twice, the same bytes: {made.wheel}" in done.stderr
    assert json.loads(done.stdout)["wheel_sha256"] == made.wheel_sha256


@pytest.mark.parametrize("what", ["wheel", "image"])
def test_the_audit_passes(made: Record, folder: Path, base: Base, what: str) -> None:
    sm12x = Path(sys.executable).with_name("sm12x")
    target = str(folder / made.wheel) if what == "wheel" else made.tags[0]
    done = process.run([sm12x, "audit", "--base", base.version, target], check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_carries_its_ledger(made: Record, folder: Path) -> None:
    with zipfile.ZipFile(folder / made.wheel) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/sm12x-ledger.json"))
        assert wheel.read(name) == (folder / "ledger.json").read_bytes()


def test_no_file_runs_as_another_user(docker_run: Run) -> None:
    done = docker_run("sh", "-c", "find / -xdev -type f -perm /6000 2>/dev/null; true")
    assert done.returncode == 0, done.stderr
    assert not done.stdout


def test_the_working_folder_brings_no_modules(docker_run: Run) -> None:
    """The working folder is a volume, say a model's, with modules of known names."""
    script = (
        "cd $(mktemp -d) && for name in json vllm click; do echo 'raise SystemExit(99)' > "
        "$name.py; done && python -P -m sm12x.runtime health"
    )
    done = docker_run("sh", "-c", script)
    assert done.returncode == 0, done.stderr
