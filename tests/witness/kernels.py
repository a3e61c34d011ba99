"""Triton kernels of a vLLM tree without a GPU: compiled for a stand-in device, or interpreted.

A function of a witness that takes a ``Gpu`` runs in a fork of a process that has loaded torch,
Triton and vLLM from the tree. There vLLM finds a CUDA device of the compute capability and the
shared memory that the function asked for, before it imports what decides by them at import.

- compiled: the release's own code launches the kernel. Triton specializes and compiles it as it
  would on that device, and refuses it where it would there; a launch is recorded, not executed.
- interpreted (``TRITON_INTERPRET=1``): the kernel is executed on tensors in host memory.

    python -m tests.witness.kernels TREE
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.witness import forked

# Shared memory that one block can opt in to, bytes: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability" (99 KiB on 12.0 and 12.1, 227 KiB on 9.0).
SM12X_SHARED = 101376
SM90_SHARED = 232448
# Triton, where the witnesses' environment keeps it from whatever would import it.
APART = Path(sys.prefix) / "apart"
# Seconds that one function may take in its fork.
TIME_LIMIT = 120


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel as it was compiled for one configuration.

    ``config`` has the constants of the kernel by name, and num_warps and num_stages; ``shared`` is
    the shared memory of one block in bytes.
    """

    name: str
    config: dict[str, Any]
    shared: int


@dataclass(frozen=True, kw_only=True)
class Launch(Compiled):
    """One launch of a compiled kernel, and its machine code."""

    grid: tuple[int, int, int]
    cubin: bytes

    def sass(self) -> str:
        """Its machine code, as nvdisasm writes it."""
        return _tool("nvdisasm", self.cubin)

    def count(self, opcode: str) -> int:
        """Instructions in its machine code whose opcode matches the regular expression."""
        line = rf"^\s+/\*[0-9a-f]{{4,}}\*/\s+(?:@!?U?P\w+ )?{opcode}"
        return len(re.findall(line, self.sass(), re.MULTILINE))

    def resources(self) -> dict[str, int]:
        """What ptxas allotted: REG (registers of a thread), STACK and LOCAL (bytes of a thread)."""
        said = _tool("cuobjdump", self.cubin, "--dump-resource-usage")
        found = re.search(r"^ *(REG:.*)$", said, re.MULTILINE)
        assert found, f"cuobjdump names no resources: {said}"
        return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", found[1])}


def _tool(name: str, cubin: bytes, *options: str) -> str:
    triton: Any = importlib.import_module("triton")
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(program), *options, file.name]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout


class Gpu:
    """The device that vLLM and Triton find in this process; no kernel is executed on it."""

    def __init__(self, platform: Any, library: Any) -> None:
        self._platform = platform
        # Its operators go with it.
        self._library = library
        # In order; what the autotuner only measures is not among the launches.
        self.compiled: list[Compiled] = []
        self.launches: list[Launch] = []
        self.shared = SM12X_SHARED
        # Triton caches by it what was compiled, and what the device has.
        self.index = 0

    def become(self, capability: tuple[int, int], *, shared: int = SM12X_SHARED) -> None:
        """From here on it has this compute capability, and ``shared`` bytes for one block."""
        self.index += 1
        self.shared = shared
        self._platform.chosen = capability


class _Launcher:
    """What Triton makes of a compiled kernel before it looks whether the device can take it."""

    def __init__(self, gpu: Gpu, source: Any, metadata: Any) -> None:
        self._gpu = gpu
        names = source.fn.arg_names
        self._kernel = Compiled(
            name=metadata.name,
            config={
                **{names[path[0]]: value for path, value in source.constants.items()},
                "num_warps": metadata.num_warps,
                "num_stages": metadata.num_stages,
            },
            shared=metadata.shared,
        )
        gpu.compiled.append(self._kernel)

    def __call__(self, *given: Any) -> None:
        # Grid, stream, function, ...; see _driver for what the function is.
        launch = Launch(**vars(self._kernel), grid=given[:3], cubin=given[4])
        self._gpu.launches.append(launch)


def _driver(gpu: Gpu, platform: Any) -> Any:
    """Triton's driver of the stand-in device."""
    target = importlib.import_module("triton.backends.compiler").GPUTarget

    def load(name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # Module, function, registers, spills, threads: the function is what the launcher gets.
        return 1, cubin, 0, 0, 1024

    def bench(call: Callable[[], object], quantiles: Any = None, **_: Any) -> list[float]:
        before = len(gpu.launches)
        call()
        del gpu.launches[before:]
        return [1.0] * len(quantiles or (1,))

    def properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": gpu.shared, "multiprocessor_count": 48}

    def arch() -> int:
        major, minor = platform.chosen
        return int(major * 10 + minor)

    return SimpleNamespace(
        get_current_device=lambda: gpu.index,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target("cuda", arch(), 32),
        get_active_torch_device=lambda: importlib.import_module("torch").device("cpu"),
        get_benchmarker=lambda: bench,
        launcher_cls=lambda source, metadata: _Launcher(gpu, source, metadata),
        utils=SimpleNamespace(load_binary=load, get_device_properties=properties),
    )


def _nothing(name: str) -> Any:
    """A function of a compiled package that is not there: it does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None


def _load(tree: Path) -> Gpu:
    """Load torch, Triton and vLLM from ``tree``, on a stand-in for a 12.0."""
    torch: Any = importlib.import_module("torch")
    # Last: the tree has a package named tests, too.
    sys.path.append(str(tree))
    for name in ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C"):
        # Compiled modules; a call of their operators fails, but for those below.
        sys.modules[name] = types.ModuleType(name)
    flash: Any = types.ModuleType("vllm.vllm_flash_attn")
    flash.__getattr__ = _nothing
    sys.modules[flash.__name__] = flash
    library = torch.library.Library("_C", "FRAGMENT")
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
        # Asked while vLLM is imported; true on 9.0, 10.0 and 12.x alike.
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: True, "CompositeExplicitAutograd")
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class Platform(cuda.CudaPlatformBase):  # type: ignore[misc]
        chosen = (12, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*cls.chosen)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            # There is no tuned configuration for a device of this name.
            return "Stand-in"

    vars(platforms)["_current_platform"] = Platform()
    # What modules ask torch directly.
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: Platform.get_device_name()
    torch.cuda.get_device_capability = lambda device=None: Platform.chosen
    utils: Any = importlib.import_module("vllm.triton_utils")
    assert utils.HAS_TRITON, "vLLM does not use Triton"
    gpu = Gpu(Platform, library)
    # Mends the interpreter as it is imported.
    importlib.import_module("tests.witness.portable.interpreter")
    importlib.import_module("triton").runtime.driver.set_active(_driver(gpu, Platform))
    return gpu


class KernelProcess:
    """A process that has loaded a tree once, and forks for every function it is given."""

    def __init__(self, tree: Path, folder: Path, *, interpret: bool) -> None:
        settings = {
            **os.environ,
            # vLLM uses Triton without an active driver only where no device is visible.
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(
                [str(APART), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TRITON_INTERPRET": "1" if interpret else "0",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._server = forked.Server(
            "tests.witness.kernels", str(tree), log=folder / "kernels.log", env=settings
        )

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What ``function(gpu, **arguments)``, of a module's top level, returns in a fork there.

        Arguments and result go through JSON. The modules that ``PRELOAD`` of the function's module
        names are imported before the fork, on a device of 12.0.

        Raises:
            AssertionError: it raised, crashed or hung; with its output.
        """
        answer = self._server.ask(
            {
                "file": sys.modules[function.__module__].__file__,
                "function": function.__name__,
                "arguments": arguments,
            }
        )
        assert answer["passed"], answer["text"]
        return answer["value"]

    def close(self) -> None:
        self._server.close(TIME_LIMIT)


@contextlib.contextmanager
def process(tree: Path, folder: Path, *, interpret: bool) -> Iterator[KernelProcess]:
    """A ``KernelProcess`` that is ended with the context; ``folder`` is for its files."""
    started = KernelProcess(tree, folder, interpret=interpret)
    try:
        yield started
    finally:
        started.close()


def prepare() -> Callable[[dict[str, Any]], forked.Outcome]:
    gpu = _load(Path(sys.argv[1]))

    def answer(request: dict[str, Any]) -> forked.Outcome:
        module = forked.witness(request["file"])
        # Here, and not in every fork: the first time, these imports take seconds.
        for name in getattr(module, "PRELOAD", ()):
            importlib.import_module(name)
        gc.freeze()
        function = getattr(module, request["function"])
        return forked.run(lambda: function(gpu, **request["arguments"]), TIME_LIMIT)

    return answer


if __name__ == "__main__":
    forked.serve(prepare)
