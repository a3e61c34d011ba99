"""tests.gpu.walk with processes that stand in for servers: no GPU is used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

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
