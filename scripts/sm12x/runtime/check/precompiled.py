"""Are FlashInfer's precompiled modules whole, and does FlashInfer load them?"""

from __future__ import annotations

from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadFileError, ToolFailedError
from sm12x.core.text import counted, size
from sm12x.runtime.check import machinecode
from sm12x.runtime.check.native import REBUILD, LoadedDriver
from sm12x.runtime.check.report import Line, failed, noted, passed
from sm12x.runtime.places import Places
from sm12x.wheel import flashinfer, flashinfer_jit
from sm12x.wheel.flashinfer import Library

TOPIC = "flashinfer"
# As FlashInfer has the two devices where no GPU is there to be asked.
_DEVICES = ("12.0f", "12.1a")


def check(places: Places, driver: LoadedDriver, scratch: Path) -> list[Line]:
    """Hashes and machine code against the record, then FlashInfer's own loader, without nvcc."""
    try:
        record = flashinfer.read(places.flashinfer)
    except BadFileError as error:
        return [failed(TOPIC, error.message, error.next_step)]
    if not record.libraries:
        return [noted(TOPIC, "no module is compiled ahead of time: the first start compiles")]
    lines = []
    for library in record.libraries:
        problem = _difference(library, places.site)
        if problem:
            lines.append(failed(TOPIC, f"{library.module.name} {problem}", REBUILD))
    modules = [library.module for library in record.libraries]
    for device in _DEVICES:
        env: dict[str, str | None] = {
            **driver.env,
            "FLASHINFER_CUDA_ARCH_LIST": device,
            "FLASHINFER_WORKSPACE_BASE": str(scratch),
            # A module that is not there is then an error, and no compilation.
            "FLASHINFER_DISABLE_JIT": "1",
        }
        try:
            answer = flashinfer.ask(flashinfer_jit.LOAD, modules, scratch, env=env)
        except ToolFailedError as error:
            said = f"loading for {device} stopped the probe: {error.message}"
            lines.append(failed(TOPIC, said, REBUILD))
            continue
        lines += [
            failed(TOPIC, f"{name} is not loaded for {device}: {problem}", REBUILD)
            for name, problem in answer.items()
            if problem
        ]
    if lines:
        return lines
    total = size(sum(library.size for library in record.libraries))
    said = f"{counted(len(modules), 'module')} for {record.arch_list} ({total})"
    return [passed(TOPIC, f"{said}: FlashInfer loads each, and compiles none")]


def _difference(library: Library, site: Path) -> str:
    name = library.module.name
    path = site / flashinfer.FOLDER / name / f"{name}.so"
    try:
        if files.sha256(path) != library.sha256:
            return "is not the file that was compiled"
        found = machinecode.read(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or 'it is empty'}"
    if dict(found.cubins) != library.cubins or dict(found.ptx) != library.ptx:
        return "has other machine code than was recorded"
    return ""
