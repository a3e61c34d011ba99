"""Loads libraries and prints which torch ops each registers. Run as a script, by its path.

It runs in a Python that has torch and in a process of its own: an op can be registered only once,
and a library that does not load may take the process with it. Nothing of this package is imported,
so that Python needs no more than torch.

Arguments: a JSON list of paths. Output: the last line, JSON, {path: {"ops": [...], "names": [...]}}
or {path: {"error": ...}}. ``names`` are the public names of a library that is a Python module.
"""

import importlib
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

# By name: mypy runs without torch.
torch = importlib.import_module("torch")


def load(path: str) -> list[str]:
    name = Path(path).name.split(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # noqa: S101 - a loader was given
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        # No PyInit_<name>: a library of ops and nothing else. All other failures are real.
        if "module export function" not in str(error):
            raise
        torch.ops.load_library(path)
        return []
    return sorted(public for public in dir(module) if not public.startswith("_"))


def main() -> None:
    results: dict[str, dict[str, object]] = {}
    for path in json.loads(sys.argv[1]):
        before = set(torch._C._dispatch_get_all_op_names())
        try:
            names = load(path)
        except (ImportError, OSError, RuntimeError) as error:
            results[path] = {"error": str(error).splitlines()[0]}
            continue
        after = set(torch._C._dispatch_get_all_op_names())
        results[path] = {"ops": sorted(after - before), "names": names}
    print(json.dumps(results))  # noqa: T201 - the caller reads it


if __name__ == "__main__":
    main()
