"""Run a file of tests/witness/portable: pytest over the portable kernels of one tree.

Those kernels import nothing of vLLM, so that their folder goes on the path by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.witness.kernels import APART

TESTS = Path(__file__).parent / "portable"
# Folder of the tree that holds the package, by its name.
KERNELS = Path("vllm") / "v1" / "attention" / "ops"
PACKAGE = "portable_mla"
# Seconds that one file may take.
TIME_LIMIT = 1200


def run(tree: Path, name: str, folder: Path, *, interpret: bool) -> None:
    """Run tests/witness/portable/NAME on the kernels of ``tree``; ``folder`` is for Triton's cache.

    Raises:
        AssertionError: the tree has no such kernels, or a test failed; with pytest's output.
    """
    kernels = tree / KERNELS
    assert (kernels / PACKAGE).is_dir(), f"no portable kernels: {KERNELS / PACKAGE} is missing"
    settings = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(kernels), str(TESTS), str(APART)]),
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_INTERPRET": "1" if interpret else "0",
    }
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={TESTS}"]
    command = [sys.executable, "-m", "pytest", *options, f"--confcutdir={TESTS}", str(TESTS / name)]
    done = subprocess.run(
        command, env=settings, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
