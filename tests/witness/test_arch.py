"""Native code for 12.0 and 12.1 in every unit that SM12x can use, and no trap in it.

The release's own CMake is configured, its commands are read, and the device code of some units is
really compiled: two to six minutes of one core for a tree, and up to 6.5 GiB of memory, one
compilation at a time.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.witness.archbuild import Build, Compiled, Rig, lines

from sm12x import layout

# What is asked for, and the code that each unit has to have then: that, and nothing else.
BOTH = "12.0a;12.1a"
SM12X = {BOTH: {"sm_120a", "sm_121a"}, "12.0f": {"sm_120f"}}
# A usual list, that of the release's images, and one with a group's name, whose architectures are
# all dropped, and with two that 10.0 and 12.0 stand for.
OTHERS = ("8.0;9.0a;10.0a", "7.5 8.0 8.6 8.9 9.0 10.0 11.0 12.0+PTX", "Maxwell;10.3;12.1")
# Another GPU's target beside those of SM12x.
MIXED = ("9.0a", BOTH)
# For Marlin and Marlin-MoE: it is told where to write.
MARLIN_SCRIPT = "csrc/quantization/marlin/generate_kernels.py"
MARLIN_CHECKS = ("csrc/quantization/marlin/marlin.cu", "csrc/moe/marlin_moe_wna16/ops.cu")
FP8 = "c3x/scaled_mm_sm120_fp8.cu"
# Of its sixteen kernels, one for each of the two templates that they are made of: an eighth of the
# code, a third of the time.
FP8_KERNELS = """
#include "scaled_mm_kernels.hpp"
#include "scaled_mm_sm120_fp8_dispatch.cuh"
#include "cutlass_extensions/epilogue/scaled_mm_epilogues_c3x.hpp"

namespace vllm {
using In = cutlass::float_e4m3_t;
using Out = cutlass::bfloat16_t;
template <typename C> using Kernel = typename C::Cutlass3xGemm::GemmKernel;
using Wide = Kernel<sm120_fp8_config_default<In, Out, c3x::ScaledEpilogue>>;
using Narrow = Kernel<sm120_fp8_config_M16<In, Out, c3x::ScaledEpilogue>>;
}

template __global__ void cutlass::device_kernel<vllm::Wide>(
    __grid_constant__ const vllm::Wide::Params);
template __global__ void cutlass::device_kernel<vllm::Narrow>(
    __grid_constant__ const vllm::Narrow::Params);
"""
# CUTLASS 2's kernels: none is for SM12x, and each has a guard that makes it a trap there.
TRAPS = "scaled_mm_c2x.cu"
# NVFP4 weights, FP16 activations: the fewest kernels that any Marlin-MoE unit has.
MOE = "marlin_moe_wna16/sm80_kernel_float16_fe2m1f_float16.cu"
# Bytes. The kernels of both have 5 to 60 KB of code, a trap with its message has less than 1.
LEAST_CODE = 3000

_FP8_CHECK = re.compile(r"  if \(a_type == vllm::kFE4M3fn\) \{\n.*?\n  \}\n", re.DOTALL)
_AZP = re.compile(r"^void cutlass_scaled_mm_azp\(.*?^\}\n", re.DOTALL | re.MULTILINE)
_VERSION = "int32_t version_num = get_sm_version_num();"


def release() -> Path:
    """The folder of the release under test in patches/."""
    information = (Path(os.environ["SM12X_TREE"]) / "PKG-INFO").read_text()
    version = re.search(r"^Version: (\S+)$", information, re.MULTILINE)
    assert version
    return layout.patches() / version[1]


@pytest.fixture(scope="module")
def rig(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tree, tmp_path_factory.mktemp("arch"))


# What is made in fixtures may fail for reasons that are not the tree's: no memory, no disk. Then a
# test has an error, which is neither red nor green.
@pytest.fixture(scope="module")
def build(rig: Rig, request: pytest.FixtureRequest) -> Build:
    """The tree's build for the list that is the fixture's parameter."""
    return configured(rig, request.param)


@pytest.fixture(scope="module")
def fp8(rig: Rig) -> Compiled:
    """For 12.1 alone, which is half the time. The base does not even build it for that; this is
    what it would have there."""
    unit = configured(rig, BOTH).unit(FP8)
    return rig.compile(unit, memory_gib=6.5, code="sm_121a", source=FP8_KERNELS)


@pytest.fixture(scope="module")
def moe(rig: Rig) -> Compiled | None:
    """As a full build does; None where that has no native code anyway."""
    unit = configured(rig, BOTH).unit(MOE)
    native = SM12X[BOTH] <= set(unit.codes)
    return rig.compile(unit, memory_gib=4) if native else None


def configured(rig: Rig, archs: str) -> Build:
    made = rig.build(archs)
    if made.failed:
        raise RuntimeError(f"CMake could not configure for {archs}:\n{made.log[-3000:]}")
    return made


@pytest.mark.parametrize(("build", "codes"), SM12X.items(), indirect=["build"], ids=list(SM12X))
def test_every_unit_has_native_code(build: Build, codes: set[str]) -> None:
    declared = tomllib.loads((release() / "base.toml").read_text())["module"]
    modules = {module["target"] for module in declared if module["sources"]}
    assert modules == {unit.module for unit in build.units}
    short = [unit for unit in build.units if set(unit.codes) != codes]
    assert not short, "\n".join([f"with other code than {codes}:", *lines(short)])


@pytest.mark.parametrize("build", SM12X, indirect=True)
def test_no_unit_is_all_traps(build: Build) -> None:
    assert not lines([unit for unit in build.units if unit.name.endswith(TRAPS)])


def test_another_target_takes_nothing_from_sm12x(rig: Rig) -> None:
    alone, both = (configured(rig, archs) for archs in (BOTH, ";".join(MIXED)))
    native = {(unit.module, unit.name) for unit in both.units if SM12X[BOTH] <= set(unit.codes)}
    short = [unit for unit in alone.units if (unit.module, unit.name) not in native]
    assert alone.units
    assert not short, "\n".join(["without native code:", *lines(short)])


@pytest.mark.guard
def test_sm12x_takes_nothing_from_another_target(rig: Rig) -> None:
    alone, both = (configured(rig, archs) for archs in (MIXED[0], ";".join(MIXED)))
    kept = {(unit.module, unit.name): set(unit.codes) for unit in both.units}
    assert alone.units
    for unit in alone.units:
        assert set(unit.codes) <= kept[unit.module, unit.name], unit.name


@pytest.mark.guard
@pytest.mark.parametrize("archs", OTHERS)
def test_other_lists_get_what_they_got(rig: Rig, archs: str) -> None:
    # What has no repository is the untouched release.
    if not (rig.tree / ".git").exists():
        return
    before = rig.build(archs, rig.untouched())
    after = configured(rig, archs)
    assert before.units
    assert lines(before.units) == lines(after.units)
    commands = [sorted(unit.command for unit in build.units) for build in (before, after)]
    folders = [str(build.units[0].directory.parent) for build in (before, after)]
    plain = [
        [command.replace(folder, "") for command in build]
        for build, folder in zip(commands, folders, strict=True)
    ]
    assert plain[0] == plain[1]


def test_an_architecture_that_would_be_dropped_stops_configuring(rig: Rig) -> None:
    build = rig.build("10.0a;10.3a")
    assert build.failed, "10.3a was dropped without a word"
    assert "architecture 10.3a" in re.sub(r"\s+", " ", build.log)


def test_marlin_for_fp8_activations_is_generated_for_12_1(tree: Path, tmp_path: Path) -> None:
    script = tmp_path / "generate_kernels.py"
    shutil.copyfile(tree / MARLIN_SCRIPT, script)
    subprocess.run([sys.executable, script, "12.1a", tmp_path], check=True)
    names = {path.name for path in tmp_path.glob("*_kernel_*.cu")}
    assert any(name.startswith("sm80_kernel_bfloat16_u4") for name in names)
    assert {name for name in names if name.startswith("sm89_kernel_fe4m3fn_")}


def accepts_fp8(tree: Path, name: str, device: tuple[int, int], folder: Path) -> bool:
    """Whether the source's own check lets FP8 activations through on ``device``."""
    (check,) = _FP8_CHECK.findall((tree / name).read_text())
    source = folder / "check.cpp"
    source.write_text(f"""
#define TORCH_CHECK(condition, ...) if (!(condition)) return 1;
#define STD_TORCH_CHECK TORCH_CHECK
namespace vllm {{ constexpr int kFE4M3fn = 1; }}
int main() {{
  const int a_type = vllm::kFE4M3fn, major_capability = {device[0]}, minor_capability = {device[1]};
{check}
  return 0;
}}
""")
    subprocess.run(["g++", "-o", folder / "check", source], check=True)
    return subprocess.run([folder / "check"], check=False).returncode == 0


@pytest.mark.parametrize("name", MARLIN_CHECKS)
def test_marlin_takes_fp8_activations_on_12_1(tree: Path, tmp_path: Path, name: str) -> None:
    assert accepts_fp8(tree, name, (12, 1), tmp_path)


@pytest.mark.guard
@pytest.mark.parametrize("name", MARLIN_CHECKS)
def test_marlin_takes_fp8_activations_where_it_did(tree: Path, tmp_path: Path, name: str) -> None:
    devices = [(8, 9), (12, 0), (8, 0), (9, 0), (10, 0), (10, 3)]
    taken = [device for device in devices if accepts_fp8(tree, name, device, tmp_path)]
    assert taken == [(8, 9), (12, 0)]


class Platform:
    """vLLM's current_platform, as far as Marlin asks it, with one GPU."""

    def __init__(self, major: int, minor: int) -> None:
        self._capability = major * 10 + minor

    def is_device_capability(self, capability: int) -> bool:
        return self._capability == capability

    def is_device_capability_family(self, capability: int) -> bool:
        return self._capability // 10 == capability // 10


def marlin_input_dtype(tree: Path, platform: Platform) -> Any:
    """What vLLM makes of VLLM_MARLIN_INPUT_DTYPE=fp8 on ``platform``."""
    path = tree / "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
    name = "get_marlin_input_dtype"
    module = ast.parse(path.read_text())
    module.body = [node for node in module.body if getattr(node, "name", "") == name]

    class Anything:
        VLLM_MARLIN_INPUT_DTYPE = "fp8"
        float8_e4m3fn = "float8"

    space: dict[str, Any] = {
        "envs": Anything, "torch": Anything, "current_platform": platform,
        "get__quant_fp8_method": lambda: None,
    }  # fmt: skip
    # The release's own function; the module around it imports half of vLLM.
    exec(compile(module, str(path), "exec"), space)  # noqa: S102
    return space[name]("")


def test_fp8_activations_can_be_chosen_on_12_1(tree: Path) -> None:
    assert marlin_input_dtype(tree, Platform(12, 1)) == "float8"


@pytest.mark.guard
def test_fp8_activations_can_be_chosen_where_they_could(tree: Path) -> None:
    for device in ((8, 9), (12, 0)):
        assert marlin_input_dtype(tree, Platform(*device)) == "float8"
    for device in ((8, 0), (9, 0), (10, 0)):
        with pytest.raises(ValueError, match="Marlin W4A8-FP8 only support"):
            marlin_input_dtype(tree, Platform(*device))


def int8_with_zero_point(tree: Path, capability: int, folder: Path) -> str:
    """Where the dispatch of cutlass_scaled_mm_azp ends: "sm80", or "refused"."""
    path = tree / "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"
    (function,) = (f for f in _AZP.findall(path.read_text()) if _VERSION in f)
    body = function[function.index(_VERSION) :]
    arguments = "int&, int, int, int, int, int, int, int"
    kernels = "\n".join(
        f'void cutlass_scaled_mm_azp_{sm}({arguments}) {{ puts("{sm}"); }}'
        for sm in ("sm75", "sm80", "sm89", "sm90")
    )
    source = folder / "dispatch.cpp"
    source.write_text(f"""
#include <cstdint>
#include <cstdio>
#define ENABLE_SCALED_MM_SM90 1
#define ENABLE_SCALED_MM_C2X 1
#define STD_TORCH_CHECK(condition, ...) if (!(condition)) return;
#define STD_TORCH_CHECK_NOT_IMPLEMENTED(condition, ...) \\
  if (!(condition)) {{ puts("refused"); return; }}
int get_sm_version_num() {{ return {capability}; }}
void check_c3x_scaled_mm_operands(int, int, int) {{}}
{kernels}
void dispatch() {{
  int c = 0, a = 0, b = 0, a_scales = 0, b_scales = 0, azp_adj = 0, azp = 0, bias = 0;
  {body}
int main() {{ dispatch(); }}
""")
    subprocess.run(["g++", "-o", folder / "dispatch", source], check=True)
    return subprocess.run([folder / "dispatch"], check=True, stdout=-1, text=True).stdout.strip()


@pytest.mark.parametrize("capability", [120, 121])
def test_int8_with_a_zero_point_is_refused(tree: Path, tmp_path: Path, capability: int) -> None:
    """There is no kernel for it: what it took on the base cannot run, or is a trap."""
    assert int8_with_zero_point(tree, capability, tmp_path) == "refused"


@pytest.mark.guard
def test_int8_with_a_zero_point_goes_where_it_went(tree: Path, tmp_path: Path) -> None:
    taken = [int8_with_zero_point(tree, sm, tmp_path) for sm in (75, 80, 86, 89, 90, 100, 103)]
    assert taken == ["sm75", "sm80", "sm80", "sm89", "sm90", "sm90", "sm90"]


def test_fp8_scaled_mm_is_no_trap_on_12_1(fp8: Compiled) -> None:
    assert list(fp8.kernels) == ["12.1a"]
    kernels = {name: size for name, size in fp8.kernels["12.1a"].items() if "Gemm" in name}
    assert len(kernels) == 2
    traps = {name: size for name, size in kernels.items() if size < LEAST_CODE}
    assert not traps, f"{len(traps)} of {len(kernels)} kernels are traps on 12.1: {traps}"


def test_marlin_moe_is_native(moe: Compiled | None) -> None:
    assert moe, "it has no command for native code"
    assert sorted(moe.kernels) == ["12.0a", "12.1a"]
    for target in moe.kernels:
        kernels = {name: size for name, size in moe.kernels[target].items() if "Marlin" in name}
        assert len(kernels) >= 10
        assert min(kernels.values()) > LEAST_CODE, kernels
