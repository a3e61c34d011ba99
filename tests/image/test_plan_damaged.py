"""The image's verb `plan` on damaged folders: a clear reason, in time, and nothing is run.

SM12X_PLAN_SEEDS is how many folders there are (default: 8); a failure names the seed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.image import damaged

from sm12x.core import declared
from sm12x.core.process import Completed
from sm12x.plan.figures import Answer

CONFIGS = Path(__file__).with_name("configs")
SEEDS = int(os.environ.get("SM12X_PLAN_SEEDS", "8"))
# Seconds of imports, and of one answer on a busy machine.
IMPORTS, EACH = 300, 120


def test_damaged_folders_have_a_reason_each(
    docker_run: Callable[..., Completed], tmp_path: Path
) -> None:
    # GIVEN folders that have a damage or several, each of another published model
    names = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
    # pytest's folder is its user's alone, and the image's user is another one.
    tmp_path.chmod(0o755)
    damages = {}
    for seed in range(SEEDS):
        config = json.loads((CONFIGS / names[seed % len(names)] / "config.json").read_text())
        damages[f"seed-{seed}"] = damaged.write(tmp_path / f"seed-{seed}", config, seed)
    places = [word for name in damages for word in ("--checkpoint", f"/models/{name}")]
    # WHEN they are planned in one call
    began = time.monotonic()
    done = docker_run(
        *("plan", *places, "--tp", "2", "--json", "--", "--trust-remote-code"),
        options=("--volume", f"{tmp_path}:/models:ro"),
    )
    seconds = time.monotonic() - began
    # THEN each has figures, or a reason of one line, in time
    assert done.returncode in (0, 1, 16), done.stderr
    assert seconds < IMPORTS + EACH * SEEDS
    assert "own code runs" not in done.stdout + done.stderr
    answers, faults = declared.check(tuple[Answer, ...], json.loads(done.stdout))
    assert answers is not None, faults
    assert [answer.model for answer in answers] == [*damages]
    for answer in answers:
        why = f"{answer.model}: {damages[answer.model]}: {answer.failure}"
        assert (answer.figures is None) == bool(answer.failure), why
        assert "\n" not in answer.failure, why
        assert len(answer.failure) < 1000, why
        assert "Traceback" not in answer.failure, why
        assert not answer.failure.startswith("vLLM ended with"), why
