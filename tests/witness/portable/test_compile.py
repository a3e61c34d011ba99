"""Every configuration of the DeepGEMM replacements compiles for SM12x without a GPU."""

import dataclasses
import re

import pytest
import torch
import triton
import triton.language as tl
from portable_mla import block_fp8_einsum, hc_prenorm, indexer_logits
from portable_mla.compile import (
    SM12X_SHARED_MEMORY,
    DeviceLimits,
    KernelCompilationError,
    KernelConfiguration,
    _compiler_process,
    compile_for,
)
from triton.backends.compiler import GPUTarget

# Per block (opt-in) of compute capability 9.0, in bytes.
HOPPER_SHARED_MEMORY = 232448
MODULES = (indexer_logits, block_fp8_einsum, hc_prenorm)
CONFIGURATIONS = [c for module in MODULES for c in module.configurations()]
# Bytes of stack frame per thread: a few registers spilled outside of the main loop
# are tolerated, an accumulator is not.
SPILL_BOUND = 64


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_sm12x(configuration: KernelConfiguration) -> None:
    for capability in (120, 121):
        compiled = compile_for(configuration, capability)
        assert compiled.shared_memory <= SM12X_SHARED_MEMORY
        assert 0 < compiled.registers <= 255
        assert compiled.spill_bytes <= SPILL_BOUND
        if "hc_prenorm_divide" in configuration.name:
            # Two terms of each value: no product, and nothing to share.
            assert "mma.sync" not in compiled.ptx
            continue
        assert compiled.shared_memory > 0
        assert "mma.sync" in compiled.ptx
        if capability == 120:
            counts = compiled.tensor_core_instructions()
            wanted = "HMMA" if "hc_prenorm" in configuration.name else "QMMA"
            assert counts.get(wanted, 0) > 0


@pytest.mark.parametrize(
    "configuration",
    [c for module in MODULES for c in module.configurations(HOPPER_SHARED_MEMORY)],
    ids=lambda c: c.name,
)
def test_hopper(configuration: KernelConfiguration) -> None:
    """On 9.0 each product is awaited in its own iteration.

    Triton 3.6 gives an operand that is also read into registers no more buffers of shared
    memory than loads are ahead: a product that runs on reads what the next load writes.
    """
    compiled = compile_for(configuration, 90)
    assert compiled.shared_memory <= HOPPER_SHARED_MEMORY
    assert compiled.spill_bytes <= SPILL_BOUND
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", compiled.ptx)) <= {"0"}


def test_names_are_unique() -> None:
    names = [c.name for c in CONFIGURATIONS]
    assert len(set(names)) == len(names)


Specialization = tuple[object, ...]


def listed_specializations() -> set[Specialization]:
    """What the configurations describe, in the form that the recorder returns."""
    return {
        (
            configuration.function.__name__,
            tuple(sorted(configuration.signature.items())),
            tuple(sorted(configuration.divisible_by_16)),
            tuple(sorted(configuration.constexprs.items())),
            configuration.num_warps,
            configuration.num_stages,
        )
        for module in MODULES
        for configuration in module.configurations()
    }


def launched_specializations() -> set[Specialization]:
    """What Triton's JIT derives from the arguments of launches of many shapes.

    The launch itself is replaced, so that no GPU is needed. Runs in a process without
    the interpreter.
    """
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 120, 32))
    launched: set[Specialization] = set()

    class Recorder:
        def __init__(self, kernel: object) -> None:
            self.name = kernel.__name__
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert 0 < grid[0] < 2**31
            assert all(0 < size < 65536 for size in grid[1:])
            return self.record

        def record(
            self, *arguments: object, num_warps: int, num_stages: int, **named: object
        ) -> None:
            bound, specialization, _ = self.bind(
                *arguments, **named, num_warps=num_warps, num_stages=num_stages
            )
            types = dict(zip(bound, specialization, strict=False))
            constexprs = [k for k, v in types.items() if v[0] == "constexpr"]
            launched.add(
                (
                    self.name,
                    tuple(sorted((k, v[0]) for k, v in types.items() if k not in named)),
                    tuple(sorted(k for k, v in types.items() if v[1] == "D")),
                    tuple(sorted((k, bound[k]) for k in constexprs)),
                    num_warps,
                    num_stages,
                )
            )

    limits = DeviceLimits(188, SM12X_SHARED_MEMORY)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        for module, names in (
            (indexer_logits, ("_mqa_logits_kernel", "_paged_mqa_logits_kernel")),
            (block_fp8_einsum, ("_einsum_kernel", "_einsum_sliced_kernel")),
            (hc_prenorm, ("_prenorm_kernel", "_divide_kernel")),
        ):
            for name in names:
                patched.setattr(module, name, Recorder(getattr(module, name)))
            patched.setattr(module, "device_limits", lambda _: limits)
        launch_many_shapes()
    return launched


def launch_many_shapes() -> None:
    fp8 = torch.float8_e4m3fn
    for heads in indexer_logits.SUPPORTED_HEADS:
        for queries, keys in ((1, 1), (3, 64), (16, 16), (700, 5000)):
            for clean in (False, True):
                # Bounds, weights and output that start at an odd element.
                bounds = torch.zeros(queries + 1, dtype=torch.int32)
                indexer_logits.mqa_logits(
                    torch.zeros((queries, heads, 128), dtype=fp8),
                    torch.zeros((keys, 128), dtype=fp8),
                    torch.zeros(keys + 1)[1:],
                    torch.zeros((queries, heads + 1))[:, 1:],
                    bounds[1:],
                    bounds[:-1],
                    torch.zeros((queries, keys + 1))[:, 1:],
                    clean=clean,
                )
        for next_n in range(1, 20):
            for requests in (1, 16, 300):
                indexer_logits.paged_mqa_logits(
                    torch.zeros((requests, next_n, heads, 128), dtype=fp8),
                    torch.zeros((2, 64, 1, 132), dtype=torch.uint8),
                    torch.zeros((requests * next_n, heads)),
                    torch.zeros(requests + 1, dtype=torch.int32)[1:],
                    torch.zeros((requests, 17), dtype=torch.int32)[:, 1:],
                    500,
                )
    for tokens in (1, 7, 16, 17, 32, 33, 64, 65, 128, 256, 1024, 4096):
        for groups in (1, 2, 4, 8):
            for dtype in (torch.float32, torch.float8_e8m0fnu):
                block_fp8_einsum.fp8_einsum_bhr_hdr_bhd(
                    torch.zeros((groups, tokens, 128), dtype=fp8).transpose(0, 1),
                    torch.zeros((tokens, groups, 1)),
                    torch.zeros((groups, 1024, 128), dtype=fp8),
                    torch.zeros((groups, 8, 1)).to(dtype),
                    torch.zeros((tokens, groups, 1024), dtype=torch.bfloat16),
                )
        for outputs in (1, 16, 24, 40, 64):
            for num_split in (1, 2, 47):
                hc_prenorm.tf32_hc_prenorm_gemm(
                    torch.zeros((tokens, 128), dtype=torch.bfloat16),
                    torch.zeros((outputs, 128)),
                    torch.zeros((num_split, tokens, outputs)),
                    torch.zeros((num_split, tokens)),
                    num_split,
                )


def test_launches_are_the_listed_specializations() -> None:
    """Launch code over many shapes compiles what is listed, all of it, and no more."""
    if triton.knobs.runtime.interpret:
        launched = _compiler_process().submit(launched_specializations).result()
    else:
        launched = launched_specializations()
    listed = listed_specializations()
    assert launched <= listed
    assert listed <= launched


@triton.jit
def _scaled(value, FACTOR: tl.constexpr):  # noqa: N803
    return value * FACTOR


@triton.jit
def _probe(in_ptr, out_ptr, count, SIZE: tl.constexpr, FACTOR: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, SIZE)
    values = tl.load(in_ptr + offsets, mask=offsets < count)
    tl.store(out_ptr + offsets, _scaled(values, FACTOR), mask=offsets < count)


PROBE = KernelConfiguration(
    name="probe",
    function=_probe,
    signature={"in_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"},
    constexprs={"SIZE": 256, "FACTOR": 3.0},
    num_warps=4,
    num_stages=1,
)


def test_nested_functions_compile_under_the_interpreter() -> None:
    compiled = compile_for(PROBE, 120)
    assert "FMUL" in compiled.sass
    assert compiled.tensor_core_instructions() == {}
    assert compiled.spill_bytes == 0


def test_divisibility_is_passed_on() -> None:
    aligned = dataclasses.replace(
        PROBE,
        divisible_by_16=frozenset({"in_ptr", "out_ptr", "count"}),
        num_warps=1,
    )
    assert "LDG.E.128" in compile_for(aligned, 120).sass
    plain = dataclasses.replace(PROBE, num_warps=1)
    assert "LDG.E.128" not in compile_for(plain, 120).sass


@pytest.mark.parametrize(
    "change",
    [
        {"signature": {"in_ptr": "*fp32", "out_ptr": "*fp32"}},
        {"signature": PROBE.signature | {"other": "i32"}},
        {"constexprs": {"SIZE": 100, "FACTOR": 3.0}},
        {"divisible_by_16": frozenset({"absent"})},
    ],
    ids=["missing", "unknown", "not_a_power_of_two", "unknown_divisible"],
)
def test_errors_name_the_configuration(change: dict[str, object]) -> None:
    with pytest.raises(KernelCompilationError, match="probe: compilation for sm_120"):
        compile_for(dataclasses.replace(PROBE, **change), 120)


def test_disassembly_of_sm121_is_refused() -> None:
    with pytest.raises(KernelCompilationError, match="compile for 120"):
        compile_for(PROBE, 121).sass  # noqa: B018


def test_spills_are_seen() -> None:
    """A tile too large for the registers of its warps has a stack frame."""
    tile = block_fp8_einsum.EinsumTile(128, 128, 1, 2, 2)
    configuration = next(c for c in block_fp8_einsum.configurations() if "128" in c.name)
    compiled = compile_for(
        dataclasses.replace(
            configuration,
            name="spilling",
            constexprs=block_fp8_einsum._constexprs(tile, False),
            num_warps=2,
            num_stages=2,
        ),
        120,
    )
    assert compiled.spill_bytes > SPILL_BOUND
