"""Run one test in this process: python -m tests.gpu.child TREE LIBRARY FILE TEST"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path

from tests.gpu import rig


def main() -> None:
    tree, library, file, test = sys.argv[1:]
    code = 1
    try:
        gpu = rig.load(Path(tree), Path(library))
        spec = importlib.util.spec_from_file_location("gpu_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, test)(gpu)
        gpu.torch.cuda.synchronize()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # How torch takes down its pools at the end of the interpreter is not what is tested.
        os._exit(code)


if __name__ == "__main__":
    main()
