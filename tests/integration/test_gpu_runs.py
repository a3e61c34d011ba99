"""tests.gpu.walk with processes that stand in for servers: no GPU is used."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.gpu import payload
from tests.gpu.walk import UNPACKED, Run, walk

PASSES = ("-m", "json.tool", "--help")


def run(name: str, *words: str, base: str = "here", gpus: int = 1, limit: int = 60,
        after: tuple[str, ...] = ()) -> Run:  # fmt: skip
    return Run(base=base, name=name, words=words, gpus=gpus, limit=limit, after=after)


def target(folder: Path) -> Path:
    (folder / "stack").mkdir(parents=True)
    (folder / UNPACKED).touch()
    return folder


def test_every_run_gets_a_result(tmp_path: Path) -> None:
    """One passes, one fails, one takes too long, one comes after that, one has no packages."""
    here, out = target(tmp_path / "here"), tmp_path / "out"
    out.mkdir()
    (here / "unpacked.json").write_text("[]")
    tells = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SM12X_TEST_PORT'])"
    runs = [
        run("slow", "-m", "timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)", limit=2),
        run("fails", "-m", "json.tool", "/no/such/file"),
        run("passes", *PASSES),
        run("both", "-m", "timeit", "-n", "1", "-r", "1", tells, gpus=2, after=("slow",)),
        run("beside", "-m", "json.tool", "{target}/unpacked.json", "{out}/copied.json", gpus=0),
        run("nowhere", *PASSES, base="other"),
    ]
    results = walk(runs, {"here": here, "other": tmp_path / "other"}, out, gpus=2, patience=0)
    assert results["passes"].code == results["both"].code == 0
    assert results["beside"].code == 0
    assert (out / "copied.json").is_file()
    assert results["fails"].code not in {0, None}
    assert results["slow"].code not in {0, None}
    assert results["slow"].seconds < 30
    assert results["nowhere"].code is None
    assert json.loads((out / "walk.json").read_text()) == {
        name: asdict(result) for name, result in results.items()
    }
    assert "0,1 820" in (out / "both.txt").read_text()


WALK = """\
import pathlib
import sys

out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(out / "first.json").write_text("{}")
(out / "first.txt").write_text("a line")
print("walked", *sys.argv[1:])
"""


def test_a_walk_goes_on_between_commands(tmp_path: Path) -> None:
    """The checkout that it was started from is gone meanwhile."""
    gpu = tmp_path / "checkout" / "tests" / "gpu"
    gpu.mkdir(parents=True)
    script = shutil.copy(Path(__file__).parents[1] / "gpu" / "lease.sh", gpu)
    (gpu / "walk.py").write_text(WALK)
    carried, parts, out = tmp_path / "carried", tmp_path / "parts", tmp_path / "out"

    def lease(*words: object) -> str:
        done = subprocess.run(
            ["sh", *map(str, (script, *words))], check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    for name in ("part.00", "part.01"):
        carried.mkdir(exist_ok=True)
        (carried / name).touch()
        lease("keep", carried, parts)
    assert {path.name for path in parts.iterdir()} == {"part.00", "part.01"}
    (parts / "unpack.sh").write_text('mkdir "$1" && touch "$1/unpacked"\n')
    lease("unpack", parts, tmp_path / "target")
    assert (tmp_path / "target" / UNPACKED).is_file()
    assert not parts.exists()
    lease("start", out, "0.33.0=T", "--gpus", "1")
    script = shutil.copy(script, tmp_path)
    shutil.rmtree(tmp_path / "checkout")
    reports = tmp_path / "reports.tar.gz"
    assert lease("watch", out, 60, reports) == f"walked 0.33.0=T --gpus 1 --out {out}\n"
    with tarfile.open(reports) as archive:
        assert {Path(name).name for name in archive.getnames()} >= {"first.json", "first.txt"}


@pytest.mark.skipif(not shutil.which("zstd"), reason="a payload takes this machine's zstd")
def test_a_stack_is_unpacked_over_the_packages_and_again(tmp_path: Path) -> None:
    """The stock tree stays as it is, and a further stack has nothing of the one before."""
    zstd = f"{shutil.which('zstd')}"
    parts, target = tmp_path / "parts", tmp_path / "target"
    parts.mkdir()

    def pack(archive: str, files: dict[str, str]) -> None:
        tree = tmp_path / "tree"
        for name, text in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        payload.pack(tree, parts / archive, zstd)

    def unpacked() -> dict[str, str]:
        subprocess.run(["sh", f"{parts / 'unpack.sh'}", f"{target}"], check=True)
        assert (target / UNPACKED).is_file()
        return {
            path.relative_to(target).as_posix(): path.read_text()
            for path in target.rglob("*")
            if path.is_file() and path.suffix == ".py"
        }

    stock = {"vllm/same.py": "1", "vllm/other.py": "2", "vllm-1.dist-info/METADATA": "3"}
    pack("part.00", {f"stock/{name}": text for name, text in stock.items()})
    payload.add_unpack(parts, zstd)
    lists = {"removed.txt": "vllm-1.dist-info/METADATA\n", "changed.txt": "vllm/other.py\n"}
    seen = {"stock/vllm/same.py": "1", "stock/vllm/other.py": "2", "stack/vllm/same.py": "1"}
    for files in ({"vllm/other.py": "4", "vllm/new.py": "5"}, {"vllm/other.py": "6"}):
        stack = {f"stack/{name}": text for name, text in files.items()}
        pack(payload.STACK, {**stack, **lists})
        assert unpacked() == {**seen, **stack}
        assert not (target / "stack" / "vllm-1.dist-info").exists()
        assert (target / "stack/vllm/same.py").samefile(target / "stock/vllm/same.py")
        assert [*(target / "stack/vllm/__pycache__").glob("other.*.pyc")]
