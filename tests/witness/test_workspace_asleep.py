"""The workspace that steps compute in is no memory of a server that sleeps."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.test_worker_sleep import WORKER, Rig
from tests.witness.world import World, expect

WORKSPACE = "vllm.v1.worker.workspace"
RUNNER = "vllm.v1.worker.gpu.model_runner"
pytestmark = [pytest.mark.loads(WORKER), pytest.mark.loads(WORKSPACE)]
SIZE = 4 * GRANULARITY


class Steps(Rig):
    """A worker whose device is set up by its own init_device, and what steps compute in.

    PyTorch takes device memory of the innermost pool that is in use, and of its own where none is.
    """

    def __init__(self, world: World, *, sleeps: bool = True) -> None:
        super().__init__(world)
        module: Any = importlib.import_module(WORKSPACE)
        self.manager = module.current_workspace_manager
        self.outside: list[int] = []
        self.taken: dict[int, Any] = {}
        module.torch = SimpleNamespace(
            Tensor=self.torch.Tensor,
            uint8=self.torch.uint8,
            accelerator=self.torch.accelerator,
            empty=self.take,
        )
        self.worker.model_config.enable_sleep_mode = sleeps
        self.set_up()

    def set_up(self) -> None:
        module: Any = importlib.import_module(WORKER)
        torch, worker = self.torch, self.worker
        module.current_platform = SimpleNamespace(
            check_if_supports_dtype=lambda dtype: None, dist_backend="nccl", is_rocm=lambda: False
        )
        module.init_worker_distributed_environment = lambda *arguments: None
        module.set_random_seed = lambda seed: None
        module.MemorySnapshot = lambda **options: SimpleNamespace()
        module.request_memory = lambda *arguments: 0
        torch.accelerator.set_device_index = lambda device: None
        runner: Any = SimpleNamespace(GPUModelRunner=lambda config, device: self)
        sys.modules[RUNNER] = runner
        worker.use_v2_model_runner = True
        worker.device_config = SimpleNamespace(device_type="cuda")
        worker.parallel_config = SimpleNamespace(
            distributed_executor_backend="ray", enable_dbo=False
        )
        worker.vllm_config.parallel_config = worker.parallel_config
        worker.model_config.dtype = torch.bfloat16
        worker.model_config.seed = 0
        worker.cache_config = None
        worker.distributed_init_method = ""
        worker.local_rank = 0
        worker.rank = 1
        worker.init_device()
        # What the runner that is set up here has of the Rig.
        expect("the model runner", worker.model_runner, self)

    def take(self, shape: tuple[int, ...], *, dtype: Any, device: Any) -> Any:
        """torch.empty of bytes on the device."""
        (size,) = shape
        pools = self.world.pools_in_use
        if not pools:
            self.outside.append(size)
            return self.torch.empty(size, dtype=dtype)
        address = pools[-1].allocate(self.world, size)
        memory = (ctypes.c_uint8 * size).from_address(address)
        tensor = self.torch.frombuffer(memory, dtype=dtype)
        self.taken[address] = pools[-1]
        return tensor

    def step(self, size: int = SIZE) -> Any:
        """The workspace of a step, written to; a fault where it is not mapped."""
        manager = self.manager()
        (tensor,) = manager.get_simultaneous(((size,), self.torch.uint8))
        tensor.fill_(7)
        expect("what a step wrote", tensor[-1].item(), 7)
        return tensor

    def expect_in_pool(self, *sizes: int) -> None:
        expect("bytes that no pool has", self.outside, [])
        expect("sizes in pools", [self.size(address) for address in self.taken], [*sizes])

    def size(self, address: int) -> int:
        return int(self.world.allocator.pointer_to_data[address].handle[1])


def forget(steps: Steps, address: int) -> None:
    """The manager lets go of a tensor before it takes a larger one: its segment is unused."""
    steps.taken.pop(address).free(address)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [[None], [["kv_cache"], ["weights"]], [["weights"], ["kv_cache"]]])
def test_a_sleep_frees_the_workspace(world: World, level: int, tags: list[Any]) -> None:
    steps = Steps(world)
    address = steps.step().data_ptr()
    steps.expect_in_pool(SIZE)
    for _ in range(2):
        steps.worker.sleep(level=level)
        expect("bytes in use asleep", world.fake.alive().physical, 0)
        for some in tags:
            steps.worker.wake_up(some)
        world.expect_awake(*steps.blocks, bytes_of=("weights",) if level == 1 else ())
        # A captured graph has the address.
        expect("the address", steps.step().data_ptr(), address)


def test_no_host_memory_is_taken_for_it(world: World) -> None:
    steps = Steps(world)
    address = steps.step().data_ptr()
    steps.expect_in_pool(SIZE)
    steps.worker.sleep(level=1)
    data = world.allocator.pointer_to_data[address]
    expect("the host copy", data.cpu_backup_tensor, None)


def test_it_goes_and_comes_with_the_kv_cache(world: World) -> None:
    steps = Steps(world)
    steps.step()
    steps.expect_in_pool(SIZE)
    (address,) = steps.taken
    steps.worker.discard(("kv_cache",))
    expect("whether it is mapped", world.fake.mapped(address, 1), False)
    steps.worker.wake_up(["weights"])
    expect("whether it is mapped", world.fake.mapped(address, 1), False)
    steps.worker.wake_up(["kv_cache"])
    steps.step()


def test_one_that_grows_leaves_no_memory_behind(world: World) -> None:
    steps = Steps(world)
    before = world.fake.alive().physical
    for times in (1, 2, 3):
        grown = times * SIZE
        steps.step(grown)
        steps.expect_in_pool(grown)
        # The next growth finds it unused.
        forget(steps, next(iter(steps.taken)))
    steps.step(4 * SIZE)
    expect("bytes in use besides the model", world.fake.alive().physical - before, 4 * SIZE)


@pytest.mark.guard
def test_a_workspace_of_a_model_s_load_is_the_weights(world: World) -> None:
    """An attention layer asks for one while it is made: in the pool that is in use."""
    steps = Steps(world)
    with world.allocator.use_memory_pool("weights"):
        address = steps.step().data_ptr()
    expect("its tag", world.allocator.pointer_to_data[address].tag, "weights")


@pytest.mark.guard
@pytest.mark.parametrize("sleeps", [True, False])
def test_a_capture_and_a_server_that_never_sleeps_take_no_pool(world: World, sleeps: bool) -> None:
    steps = Steps(world, sleeps=sleeps)
    world.torch.cuda.is_current_stream_capturing = lambda: sleeps
    steps.step()
    expect("bytes that no pool has", steps.outside, [SIZE])
