"""Compile native modules on this host, for its GPU besides SM12x: python -m tests.gpu.native --help

    python -m tests.gpu.native TARGET --base 0.33.0 --module _vllm_fa2_C --out REPORT
    python -m tests.gpu.native TARGET --base 0.33.0 --arch-list "12.0a;12.1a" --out REPORT

TARGET/source is the output of `sm12x build source`; TARGET/third-party has the sources that the
release's CMake asks for with these architectures, each in a folder of its name. TARGET/stack, as
tests.gpu.payload unpacks it, is copied by hard links to TARGET/native, or to that of --into, which
gets the modules: a server of it, as one of tests.gpu.walk, runs what was compiled. Without --module
each module of the release is compiled. Prints the audit of each; REPORT says what they are compiled
of, the seconds, and of each module its torch ops and what it lacks that the one in TARGET/stack
has. Needs the host's nvcc.
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
from collections.abc import Collection
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
class ModuleOps(Declared):
    """Ops without their namespace, as read from the file. ``lost`` are ops and Python functions of
    the module in TARGET/stack; None where there is none.
    """

    ops: tuple[str, ...]
    lost: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Report(Declared):
    """``modules`` is by path."""

    seconds: float
    modules: dict[str, ModuleOps]
    record: native.NativeRecord


def compile_into(
    target: Path,
    base: bases.Base,
    names: Collection[str],
    arch_list: str,
    cuda_home: Path,
    *,
    into: str = "native",
) -> Report:
    """Make TARGET/INTO, in one step, and say what was compiled."""
    began = time.monotonic()
    third_party = target / "third-party"
    # Whatever is there is used, also where CMake only asks for it.
    there = tuple(one.name for one in base.sources if (third_party / one.name).is_dir())
    modules = tuple(
        dataclasses.replace(module, sources=there)
        for module in base.modules
        if module.target in names
    )
    base = dataclasses.replace(base, modules=modules)
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
        choice = ModuleChoice(modules=modules, kept=())
        record = native.build(
            base, target / "source", made, choice, settings, mode="full", say=print
        )
        with walk.variant(target, into) as staged:
            for module in modules:
                (staged / module.path).unlink(missing_ok=True)
                shutil.copy(made / module.path, staged / module.path)
        found = {module.path: compared(made, target / "stack", module.path) for module in modules}
    return Report(seconds=round(time.monotonic() - began, 1), modules=found, record=record)


def compared(made: Path, official: Path, path: str) -> ModuleOps:
    ours = torch_ops.read(made / path)
    if not (official / path).is_file():
        return ModuleOps(ops=ours.ops, lost=None)
    theirs = torch_ops.read(official / path)
    lost = {*theirs.ops, *theirs.names} - {*ours.ops, *ours.names}
    return ModuleOps(ops=ours.ops, lost=tuple(sorted(lost)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--base", required=True, choices=bases.versions())
    parser.add_argument(
        "--module", action="append", metavar="NAME", help="a target of base.toml (default: all)"
    )
    parser.add_argument("--into", default="native", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--arch-list", default="9.0a;12.0a;12.1a", help="default: %(default)s")
    parser.add_argument("--cuda-home", type=Path, default=Path("/usr/local/cuda"))
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT")
    options = parser.parse_args()
    base = bases.load(options.base)
    known = [module.target for module in base.modules]
    names = options.module or known
    for name in names:
        if name not in known:
            parser.error(f"{name} is no native module of {base.version}")
    # Servers and benchmarks run meanwhile.
    os.nice(19)
    target = options.target.resolve()
    report = compile_into(
        target, base, names, options.arch_list, options.cuda_home, into=options.into
    )
    declared.write_json(options.out, report)
    failed = [path for path, module in report.modules.items() if module.lost]
    for path in failed:
        print(f"{path} lacks {', '.join(report.modules[path].lost or ())}")
    # One by one: the base's own policy asks for every library of the release.
    for path in report.modules:
        words = [sys.executable, "-m", "sm12x", "audit", target / options.into / path]
        if subprocess.run(words, check=False).returncode:
            failed.append(path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
