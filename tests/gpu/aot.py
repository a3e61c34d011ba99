"""Compile a module of FlashInfer for this host's GPU as a bundle does: python -m tests.gpu.aot

    python -m tests.gpu.aot TARGET --base 0.33.0 --out REPORT

TARGET/stack, as tests.gpu.payload unpacks it, is copied by hard links to TARGET/aot, which gets the
module of top-k and top-p sampling, the one of the base's list that 9.0 uses too. A server of
TARGET/aot starts without compiling it; tests.gpu.walk runs one of each. Needs the host's nvcc.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.gpu import walk

from sm12x.core import declared
from sm12x.stack.model import base as bases
from sm12x.wheel import flashinfer

MODULE = "sampling"


def compile_into(target: Path, base: bases.Base, arch_list: str) -> flashinfer.Record:
    """Make TARGET/aot, in one step, and say what was compiled."""
    modules = tuple(module for module in base.flashinfer if module.name == MODULE)
    request = flashinfer.Request(
        arch_list=flashinfer.targets(arch_list), key="walk", modules=modules
    )
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        record = flashinfer.build(request, made, Path(scratch) / "work", on_line=print)
        with walk.variant(target, "aot") as staged:
            shutil.copytree(made / "aot", staged / flashinfer.FOLDER, dirs_exist_ok=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--base", required=True, choices=bases.versions())
    parser.add_argument("--arch-list", default="9.0a;12.0a;12.1a", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    options = parser.parse_args()
    record = compile_into(options.target.resolve(), bases.load(options.base), options.arch_list)
    declared.write_json(options.out, record)


if __name__ == "__main__":
    main()
