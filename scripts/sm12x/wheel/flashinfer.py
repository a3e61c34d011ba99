"""FlashInfer's CUDA modules, compiled ahead of time instead of at a server's first start.

FlashInfer compiles a module at its first use, unless ``data/aot/NAME/NAME.so`` of its package is
there (flashinfer/jit/env.py, FLASHINFER_AOT_DIR; jit/core.py, JitSpec). What goes there is made
by FlashInfer's own build, for the architectures of the bundle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from sm12x.audit import sections
from sm12x.audit.model import DEVICES, LibraryAudit
from sm12x.core import cudaarch, declared, files, machine, process
from sm12x.core.cudaarch import CudaArch
from sm12x.core.declared import Declared
from sm12x.core.errors import BuildFailedError, ToolFailedError
from sm12x.stack.model.base import FlashInferModule
from sm12x.wheel import flashinfer_jit
from sm12x.wheel.ledger import FLASHINFER_RECORD

# Where FlashInfer looks, below the folder that packages are installed in.
FOLDER = PurePosixPath("flashinfer/data/aot")
# Packages of the closure that determine the bytes: FlashInfer, its runtime, torch, the compiler.
MADE_OF = ("apache-tvm-ffi", "flashinfer-python", "ninja", "nvidia-cuda-nvcc", "torch")
# One cubin for all of SM12x. FlashInfer itself compiles for 12.0f where CUDA is 12.9 or newer.
_FAMILY = CudaArch(major=12, minor=0, suffix="f")
_NEXT = "read the compiler's message above; or build the bundle with --no-flashinfer"


@dataclass(frozen=True, kw_only=True)
class Request(Declared):
    """What to compile. ``arch_list`` is as FlashInfer reads it; ``key`` names the work folder: it
    covers every input that FlashInfer's build does not check itself.
    """

    arch_list: str
    key: str
    modules: tuple[FlashInferModule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Library(Declared):
    """One compiled module. ``size`` is in bytes, ``sha256`` in hex; ``cubins`` and ``ptx`` count
    its code by architecture ("12.0f").
    """

    module: FlashInferModule
    sha256: str
    size: int
    cubins: dict[str, int]
    ptx: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Record(Declared):
    """What was compiled; the image has it as ``flashinfer.json``."""

    arch_list: str
    libraries: tuple[Library, ...]
    schema: Literal[1] = 1


def read(path: Path) -> Record:
    """Return the record at ``path``. Raises BadFileError."""
    return declared.read_json(Record, path, next_step="rebuild the image with `make bundle`")


def targets(arch_list: str) -> str:
    """Convert TORCH_CUDA_ARCH_LIST to FLASHINFER_CUDA_ARCH_LIST, all of SM12x as one family.

    "9.0a;12.0a;12.1a" gives "9.0a 12.0f".
    """
    archs = [
        _FAMILY if arch.major == _FAMILY.major else arch for arch in cudaarch.parse_list(arch_list)
    ]
    return " ".join(f"{arch.major}.{arch.minor}{arch.suffix}" for arch in sorted({*archs}))


def key(pins: Iterable[str], arch_list: str) -> str:
    """Name the work folder: the pins of ``MADE_OF`` with their hashes, and the architectures."""
    text = "\0".join([arch_list, *sorted(pins)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(
    request: Request, out: Path, work: Path, *, on_line: Callable[[str], None] | None = None
) -> Record:
    """Compile the modules of ``request``, those that are not in ``work``; lay all out in ``out``.

    ``out`` gets ``aot/NAME/NAME.so`` and ``flashinfer.json``, or nothing. Interrupted, the next run
    goes on: finished modules are kept in ``work``, and ninja keeps the units of the others.

    Raises:
        BuildFailedError: a module does not compile, has another name than base.toml says, or holds
            code that does not run on one of ``DEVICES`` as compiled.
    """
    # ninja runs in another folder.
    place = work.absolute() / request.key
    place.mkdir(parents=True, exist_ok=True)
    # Work folders are removed by this date, after long disuse.
    os.utime(place)
    finished = {module.name: _finished(place, module) for module in request.modules}
    missing = [module for module in request.modules if not finished[module.name].is_file()]
    if missing:
        _compile(missing, request.arch_list, place, finished, on_line)
    with files.replacing_folder(out, FLASHINFER_RECORD) as staged:
        (staged / "aot").mkdir()
        libraries = []
        for module in request.modules:
            target = staged / "aot" / module.name / f"{module.name}.so"
            target.parent.mkdir()
            shutil.copyfile(finished[module.name], target)
            target.chmod(0o755)
            libraries.append(_library(module, target, request.arch_list))
        record = Record(arch_list=request.arch_list, libraries=tuple(libraries))
        declared.write_json(staged / FLASHINFER_RECORD, record)
        for path in staged.rglob("*"):
            # The same layer whenever it is made.
            os.utime(path, (files.DATE, files.DATE))
    return record


def jobs(modules: Sequence[FlashInferModule], *, cores: int, available: int | None) -> int:
    """Return how many units to compile at a time; ``available`` is in bytes, None where unknown."""
    peak = max((module.peak_gib for module in modules), default=1.0)
    return machine.fitting(cores=cores, available=available or 0, each_gib=peak)


def ask(
    verb: str,
    modules: Sequence[FlashInferModule],
    scratch: Path,
    *,
    env: dict[str, str | None],
    on_line: Callable[[str], None] | None = None,
) -> dict[str, str]:
    """Get FlashInfer's answer for each module from a separate process (``flashinfer_jit``).

    Raises:
        ToolFailedError: the process died; with its last lines.
    """
    question, answer = scratch / f"{verb}.json", scratch / f"{verb}-answer.json"
    question.write_text(json.dumps([asdict(module) for module in modules]), encoding="utf-8")
    answer.unlink(missing_ok=True)
    process.stream(
        [sys.executable, "-P", "-m", "sm12x.wheel.flashinfer_jit", verb, question, answer],
        env=env,
        on_line=on_line or (lambda _: None),
        next_step=_NEXT,
    )
    answers: dict[str, str] = json.loads(answer.read_text(encoding="utf-8"))
    return answers


def _finished(place: Path, module: FlashInferModule) -> Path:
    made_of = json.dumps([module.generator, dict(module.arguments)], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    return place / "finished" / f"{module.name}-{digest}.so"


def _compile(
    modules: Sequence[FlashInferModule],
    arch_list: str,
    place: Path,
    finished: dict[str, Path],
    on_line: Callable[[str], None] | None,
) -> None:
    parallel = jobs(modules, cores=machine.cores(), available=machine.available())
    env: dict[str, str | None] = {
        "FLASHINFER_CUDA_ARCH_LIST": arch_list,
        "FLASHINFER_WORKSPACE_BASE": str(place),
        "FLASHINFER_DISABLE_JIT": None,
        "MAX_JOBS": str(parallel),
        "NINJA_STATUS": "%f of %t units of FlashInfer: ",
    }
    try:
        libraries = ask(flashinfer_jit.BUILD, modules, place, env=env, on_line=on_line)
    except ToolFailedError as error:
        raise BuildFailedError(
            f"FlashInfer's modules cannot be compiled: {error.message}", next_step=_NEXT
        ) from None
    (place / "finished").mkdir(exist_ok=True)
    for name, path in libraries.items():
        with files.replacing(finished[name]) as staged:
            shutil.copyfile(path, staged)


def _library(module: FlashInferModule, path: Path, arch_list: str) -> Library:
    audit = sections.audit(path.as_posix(), path.read_bytes())
    problem = _problem(audit, arch_list)
    if problem:
        raise BuildFailedError(
            f"FlashInfer's module {module.name} {problem}", next_step="report it; " + _NEXT
        )
    return Library(
        module=module,
        sha256=files.sha256(path),
        size=path.stat().st_size,
        cubins=dict(audit.cubins),
        ptx=dict(audit.ptx),
    )


def _problem(audit: LibraryAudit, arch_list: str) -> str:
    """Return the fault of a module's machine code, "" without one."""
    if audit.unknown:
        return f"has machine code that cannot be read: {'; '.join(audit.unknown)}"
    archs = cudaarch.parse_list(arch_list)
    has = [CudaArch.parse(name) for name in audit.cubins]
    for device in DEVICES:
        if not any(arch.runs_on(device.major, device.minor) for arch in archs):
            continue
        if has and not any(arch.runs_on(device.major, device.minor) for arch in has):
            return f"has no code for {device}: {', '.join(map(str, has))}"
    return ""
