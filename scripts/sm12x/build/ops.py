"""Which torch ops the native modules register, found by loading them without a GPU."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.build import standin, toolchain
from sm12x.core import process
from sm12x.core.errors import BuildFailedError, ToolFailedError

# Run by its path, not imported: it needs torch, and this package does not.
_PROBE = Path(__file__).with_name("opsprobe.py")

_FOR_ONE_PYTHON = re.compile(r"\.cpython-(\d)(\d+)-[\w-]+\.so$")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """``ops`` are full names with overload (``_C::silu_and_mul``); ``names`` what a Python module
    offers besides."""

    ops: tuple[str, ...]
    names: tuple[str, ...]


def loads_on(path: str, python: str) -> bool:
    """Whether the library's name allows Python ``python`` ("3.13"): stable ABI, or that version."""
    match = _FOR_ONE_PYTHON.search(path)
    return match is None or f"{match[1]}.{match[2]}" == python


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
    include = toolchain.find_package(purelib) / "include"
    full = {str(folder / path): path for path in paths}
    with tempfile.TemporaryDirectory(prefix="sm12x-ops-") as driver:
        # The name that the loader asks for; only this process's children see the folder.
        standin.build(include, Path(driver) / standin.SONAME)
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


def require_all(path: str, ours: Registered, official: Registered) -> None:
    """Raise BuildFailedError if our build of ``path`` offers less than the official one."""
    lost = sorted(
        {*official.ops, *official.names} - {*ours.ops, *ours.names},
    )
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise BuildFailedError(
            f"{path} as compiled here lacks {len(lost)} of the official one's "
            f"{len(official.ops)} ops: {', '.join(lost[:3])}{more}",
            next_step="see in the compile log which sources CMake left out, and why",
        )
