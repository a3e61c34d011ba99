"""The audit of the official wheels: the counts that were taken with cuobjdump."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.audit import policy, scan
from sm12x.audit.model import DEVICES, SM120, Audit
from sm12x.core import index
from sm12x.stack.model import base as bases

BASE = bases.load("0.33.0")
# Under 10 s is asked for. CPU time, not the clock's: the machine may be busy with other work.
CPU_SECONDS = 10


@pytest.fixture(scope="module", params=["x86_64", "aarch64"])
def official(request: pytest.FixtureRequest) -> tuple[str, Path]:
    wheel = BASE.wheels[request.param]
    path = index.fetch("vllm", wheel.name, wheel.sha256, cache=layout.cache())
    return request.param, path


def targets(audit: Audit) -> set[str]:
    return {name for library in audit.libraries for name in library.cubins}


def family(audit: Audit, path: str) -> tuple[int, int]:
    """Cubins of 12.0 and of 12.0f."""
    cubins = audit[path].cubins
    return cubins.get("12.0", 0), cubins.get("12.0f", 0)


def test_the_official_wheel(official: tuple[str, Path]) -> None:
    machine, path = official
    start = time.process_time()
    found = scan.scan(path)
    assert time.process_time() - start < CPU_SECONDS
    assert {library.machine for library in found.libraries} == {machine}
    assert family(found, "vllm/_C_stable_libtorch.abi3.so") == (50, 35)
    assert family(found, "vllm/_moe_C_stable_libtorch.abi3.so") == (8, 19)
    assert family(found, "vllm/_flashkda_C.abi3.so") == (0, 1)
    assert targets(found).isdisjoint({"12.0a", "12.1", "12.1a", "12.1f"})
    attention = found["vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"]
    assert (attention.cubins, attention.ptx) == ({"8.0": 76}, {"8.0": 76})
    assert (attention.sm120, attention.sm121) == ("ptx", "ptx")
    assert found["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"].sm120 == "none"
    assert found["vllm/cumem_allocator.abi3.so"].sm120 == "host"
    # A program, not a library, and read all the same.
    assert found["vllm/vllm-rs"].sm120 == "host"
    for device in DEVICES:
        units = found["vllm/_C_stable_libtorch.abi3.so"].units_on(device)
        assert (units["native"], units["ptx"], units["unknown"]) == (85, 6, 0)


def test_the_official_wheel_passes_its_own_policy_and_not_the_default(
    official: tuple[str, Path],
) -> None:
    found = scan.scan(official[1])
    own = policy.load(BASE.folder / "audit-policy.toml")
    assert policy.judge(found, own).offenders == ()
    default = policy.load(layout.data() / "policies" / "default.toml")
    offenders = {offender.path for offender in policy.judge(found, default, (SM120,)).offenders}
    assert "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" in offenders
    assert "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" not in offenders


def test_code_that_a_library_keeps_in_sections_of_its_own() -> None:
    """cuFFT: 23,983 fat binaries in .ldata and one device-link stub, as cuobjdump counts them."""
    name = "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    sha256 = "6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3"
    found = scan.scan(index.fetch("nvidia-cufft", name, sha256, cache=layout.cache()))
    library = found["nvidia/cu13/lib/libcufft.so.12"]
    assert len(library.embedded) == 23983
    assert library.cubins == {
        "7.5": 310, "8.0": 357, "8.6": 358, "8.7": 155, "8.9": 358, "9.0": 393, "10.0": 420,
        "11.0": 354, "12.0": 420,
    }  # fmt: skip
    assert library.ptx == {"7.5": 7189, "8.0": 583, "8.6": 291, "9.0": 68}
    assert library.lto == {"7.5": 12728}
    assert found["nvidia/cu13/lib/libcufftw.so.12"].sm120 == "host"
    default = policy.load(layout.data() / "policies" / "default.toml")
    assert policy.judge(found, default).offenders == ()
