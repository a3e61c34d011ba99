"""What the ledger says of patches and modules, by mode and by what was compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm12x.stack.model import base as bases
from sm12x.wheel import selection
from sm12x.wheel.assemble import assemble
from sm12x.wheel.compile.native import NativeModule, NativeRecord
from sm12x.wheel.ledger import ExtraEntry

BASE = bases.load("0.21.0")
PATHS = {module.target: module.path for module in BASE.modules}
ALLOCATOR = "csrc/cumem_allocator.cpp"
MOE = "csrc/moe/marlin_moe_wna16/ops.cu"
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
        ([MOE], _compiled("full", "cumem_allocator", "_moe_C"), "compiled"),
        ([ALLOCATOR, MOE], _compiled("full", "cumem_allocator"), "not compiled: _moe_C"),
    ],
)
def test_whether_a_patch_is_in_effect_in_native_code(
    paths: list[str], record: NativeRecord, state: str
) -> None:
    assert assemble.native_state(BASE, paths, record) == state


def test_the_ledger_names_extras() -> None:
    base = bases.load("0.33.0")
    (extra,) = base.extras
    assert assemble.extras(base) == (
        ExtraEntry(
            name="b12x", requirement="b12x==1.5.1", license="Apache-2.0", modules=extra.modules
        ),
    )
    assert assemble.extras(BASE) == ()


def test_what_a_module_may_lose() -> None:
    new = bases.load("0.33.0")
    (module,) = (module for module in new.modules if module.other_gpus)
    made = NativeModule(target=module.target, path=module.path, sha256="", size=1, glibc="")
    moe = NativeModule(target="_moe_C_stable_libtorch", path="moe", sha256="", size=1, glibc="")
    record = replace(_compiled("full"), modules=(made, moe))
    assert assemble.may_lose(new, record) == {
        module.path: {"kernels for other GPUs": module.other_gpus},
        "moe": {},
    }
    (qutlass,) = (source for source in BASE.sources if source.name == "qutlass")
    without = replace(_compiled("full", "_C").modules[0], allowed_missing=("qutlass",))
    record = replace(_compiled("full"), modules=(without,))
    assert assemble.may_lose(BASE, record) == {PATHS["_C"]: {"qutlass": qutlass.ops}}
