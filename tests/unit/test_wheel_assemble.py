"""What the ledger says of patches and modules, by mode and by what was compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm12x.stack.model import base as bases
from sm12x.wheel import selection
from sm12x.wheel.assemble import assemble
from sm12x.wheel.compile.native import NativeModule, NativeRecord
from sm12x.wheel.ledger import ExtraEntry

BASE = bases.load("0.33.0")
PATHS = {module.target: module.path for module in BASE.modules}
ALLOCATOR = "csrc/cumem_allocator.cpp"
MOE = "csrc/moe/marlin_moe_wna16/ops.cu"
MOE_MODULE = "_moe_C_stable_libtorch"
PYTHON = "vllm/device_allocator/cumem.py"


def _compiled(mode: str, *targets: str) -> NativeRecord:
    return NativeRecord(
        base_version=BASE.version,
        inputs="",
        arch_list="12.0a;12.1a",
        cmake_archs="12.0a;12.1a",
        compiler="",
        nvcc="",
        modules=tuple(
            NativeModule(target=target, path=PATHS[target], sha256="", size=1, glibc="")
            for target in targets
        ),
        mode=mode,
        kept=tuple(
            selection.Kept(target=target, path=path, reason="a reason")
            for target, path in PATHS.items()
            if target not in targets
        ),
    )


@pytest.mark.parametrize(
    ("paths", "record", "state"),
    [
        ([PYTHON], _compiled("quick", "cumem_allocator"), ""),
        ([PYTHON, ALLOCATOR], _compiled("quick", "cumem_allocator"), "compiled"),
        ([MOE, PYTHON], _compiled("quick", "cumem_allocator"), "not compiled in quick mode"),
        ([MOE], _compiled("full", "cumem_allocator", MOE_MODULE), "compiled"),
        ([ALLOCATOR, MOE], _compiled("full", "cumem_allocator"), f"not compiled: {MOE_MODULE}"),
    ],
)
def test_whether_a_patch_is_in_effect_in_native_code(
    paths: list[str], record: NativeRecord, state: str
) -> None:
    assert assemble.native_state(BASE, paths, record) == state


def test_the_ledger_names_extras() -> None:
    (extra,) = BASE.extras
    assert assemble.extras(BASE) == (
        ExtraEntry(
            name="b12x", requirement="b12x==1.5.1", license="Apache-2.0", modules=extra.modules
        ),
    )
    assert assemble.extras(replace(BASE, extras=())) == ()
