"""Compile a native module for this host's GPU besides SM12x: python -m tests.gpu.native --help

    python -m tests.gpu.native TARGET --base 0.21.0 --module _vllm_fa2_C --out REPORT

TARGET/source is the output of `sm12x build source`; TARGET/third-party has the sources that the
release's CMake asks for with these architectures, each in a folder of its name. TARGET/stack, as
tests.gpu.payload unpacks it, is copied by hard links to TARGET/native, which gets the module: a
server of it, as one of tests.gpu.walk, runs what was compiled. Prints the audit of the module;
REPORT says what it was compiled of, the seconds, and its torch ops. Needs the host's nvcc.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import walk

from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.stack.model import base as bases
from sm12x.wheel.assemble import torch_ops
from sm12x.wheel.compile import cmake, native
from sm12x.wheel.selection import ModuleChoice
from sm12x.wheel.toolchain import arch

# Cores that are left to others.
SPARED = 5


@dataclass(frozen=True, kw_only=True)
class Report(Declared):
    """``ops`` are names without their namespace, as read from the file."""

    seconds: float
    ops: tuple[str, ...]
    record: native.NativeRecord


def compile_into(
    target: Path, base: bases.Base, name: str, arch_list: str, cuda_home: Path
) -> Report:
    """Make TARGET/native, in one step, and say what was compiled."""
    began = time.monotonic()
    third_party = target / "third-party"
    (module,) = (module for module in base.modules if module.target == name)
    # Whatever is there is used, also where CMake only asks for it.
    there = tuple(one.name for one in base.sources if (third_party / one.name).is_dir())
    module = dataclasses.replace(module, sources=there)
    base = dataclasses.replace(base, modules=(module,))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        settings = cmake.Settings(
            cuda_home=cuda_home,
            work=Path(scratch) / "work",
            python=Path(sys.executable),
            archs=arch.validate(arch_list, default=base.toolchain.arch_list),
            jobs=max(1, (os.cpu_count() or 1) - SPARED),
            third_party=third_party,
        )
        choice = ModuleChoice(modules=(module,), kept=(), allowed={})
        record = native.build(
            base, target / "source", made, choice, settings, mode="full", say=print
        )
        with walk.variant(target, "native") as staged:
            (staged / module.path).unlink(missing_ok=True)
            shutil.copy(made / module.path, staged / module.path)
        ops = torch_ops.read(made / module.path).ops
    return Report(seconds=round(time.monotonic() - began, 1), ops=ops, record=record)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--base", required=True, choices=bases.versions())
    parser.add_argument("--module", required=True, metavar="NAME", help="a target of base.toml")
    parser.add_argument("--arch-list", default="9.0a;12.0a;12.1a", help="default: %(default)s")
    parser.add_argument("--cuda-home", type=Path, default=Path("/usr/local/cuda"))
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    options = parser.parse_args()
    base = bases.load(options.base)
    if options.module not in {module.target for module in base.modules}:
        parser.error(f"{options.module} is no native module of {base.version}")
    # Servers and benchmarks run meanwhile.
    os.nice(19)
    target = options.target.resolve()
    report = compile_into(target, base, options.module, options.arch_list, options.cuda_home)
    declared.write_json(options.out, report)
    # The base's own policy asks for every module of the release.
    (compiled,) = report.record.modules
    words = [sys.executable, "-m", "sm12x", "audit", target / "native" / compiled.path]
    return subprocess.run(words, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
