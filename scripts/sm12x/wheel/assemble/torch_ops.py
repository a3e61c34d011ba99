"""Which torch ops the native modules register, found by loading them without a GPU."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import BuildFailedError, ToolFailedError
from sm12x.wheel.ledger import is_program
from sm12x.wheel.toolchain import cuda_home, libcuda_stub

# Run by its path, not imported: it needs torch, and this package does not.
_PROBE = Path(__file__).with_name("ops_probe.py")

_FOR_ONE_PYTHON = re.compile(r"\.cpython-(\d)(\d+)-[\w-]+\.so$")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """``ops`` are full names with overload (``_C::silu_and_mul``); ``names`` what a Python module
    offers besides. ``by`` is "loaded", or "read" (see ``opsread``): then no op has its namespace.
    """

    ops: tuple[str, ...]
    names: tuple[str, ...]
    by: str = "loaded"


def loads_on(path: str, python: str) -> bool:
    """Whether the library's name allows Python ``python`` ("3.13"): stable ABI, or that version.

    A program is not loaded on any.
    """
    match = _FOR_ONE_PYTHON.search(path)
    return not is_program(path) and (match is None or f"{match[1]}.{match[2]}" == python)


def find(
    folder: Path, paths: Sequence[str], *, python: Path, purelib: Path
) -> Mapping[str, Registered]:
    """Load ``paths`` (relative to ``folder``) in ``python`` and list what each registers.

    Args:
        purelib: the site-packages of ``python``, with torch and the CUDA toolkit's headers.

    Raises:
        BuildFailedError: a library does not load.
    """
    if not paths:
        return {}
    include = cuda_home.find_package(purelib) / "include"
    full = {str(folder / path): path for path in paths}
    with tempfile.TemporaryDirectory(prefix="sm12x-ops-") as driver:
        # The name that the loader asks for; only this process's children see the folder.
        libcuda_stub.build(include, Path(driver) / libcuda_stub.SONAME)
        try:
            done = process.run(
                [python, "-I", _PROBE, json.dumps(list(full))],
                env={"LD_LIBRARY_PATH": driver, "CUDA_VISIBLE_DEVICES": ""},
                timeout=600,
            )
        except ToolFailedError as error:
            raise BuildFailedError(
                f"the process that loads the native modules died: {error.message}",
                next_step="load them one by one to find which one does it",
            ) from None
    found = json.loads(done.stdout.splitlines()[-1])
    for path, result in found.items():
        if "error" in result:
            raise BuildFailedError(
                f"{full[path]} does not load: {result['error']}",
                next_step="check that it was compiled against the release's torch",
            )
    return {
        full[path]: Registered(ops=tuple(result["ops"]), names=tuple(result["names"]))
        for path, result in found.items()
    }


def lost(
    path: str, ours: Registered, official: Registered, allowed: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """What our build of ``path`` lacks of the official one's ops and names.

    Args:
        allowed: the third-party sources it was compiled without -> the ops made of each.

    Raises:
        BuildFailedError: it lacks something that is made of none of ``allowed``.
    """
    missing = sorted({*official.ops, *official.names} - {*ours.ops, *ours.names})
    known = {name for given in allowed.values() for name in given}
    if official.by == "read":
        known = {name.rpartition("::")[2] for name in known}
    unexplained = [name for name in missing if name not in known]
    if unexplained:
        more = f" and {len(unexplained) - 3} more" if len(unexplained) > 3 else ""
        without = f" (it was compiled without {', '.join(allowed)})" if allowed else ""
        raise BuildFailedError(
            f"{path} as compiled here lacks {len(unexplained)} of the official one's "
            f"{len(official.ops)} ops: {', '.join(unexplained[:3])}{more}{without}",
            next_step="see in the compile log which sources CMake left out, and why",
        )
    return tuple(missing)
