"""Stand-ins with which vLLM configures and builds a model on a machine without a GPU.

torch.cuda answers for a card, process groups know ranks and sizes only, whatever asks for CUDA gets
torch's meta device, and no weights are loaded. Each stand-in replaces one name of torch or vLLM for
the life of the process, which therefore does nothing else. torch and vLLM are imported by name: the
package is typed and tested where they are not installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


def load(name: str) -> Any:
    """Import a module of the release."""
    return importlib.import_module(name)


# A model's tables in host memory from this size on (n-grams, offloaded layers) are not allocated.
_LARGE_ON_HOST = 64 << 20
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn")
# Conversions of loaded weights look at the values of scales: any value does for the sizes.
_VALUES: dict[str, Callable[[Any], Any]] = {
    "item": lambda tensor: 1.0 if tensor.is_floating_point() else 1,
    "tolist": lambda tensor: [1.0 if tensor.is_floating_point() else 1] * tensor.numel(),
    "__bool__": lambda tensor: False,
    "__float__": lambda tensor: 1.0,
    "__int__": lambda tensor: 1,
    "__index__": lambda tensor: 1,
    "unique": lambda tensor: tensor.reshape(-1)[:1],
    "equal": lambda tensor: True,
    "allclose": lambda tensor: True,
}


# Registrations end with the objects that made them.
_KEPT: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class Card:
    """What vLLM asks of a GPU while it chooses kernels; ``memory`` in bytes."""

    name: str
    major: int
    minor: int
    memory: int
    multiprocessors: int
    integrated: bool = False


@dataclass(kw_only=True)
class Host:
    """Storages that are in host memory, by address: kept, so that no address is used twice."""

    storages: dict[int, Any] = field(default_factory=dict)

    def take(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    @property
    def size(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


class _Handle:
    """A stream, an event or a graph: created, never run."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def replace_torch(card: Card) -> None:
    """Let torch.cuda and torch.accelerator answer for ``card``."""
    torch = load("torch")
    properties = type("Properties", (), {})()
    vars(properties).update(
        name=card.name,
        major=card.major,
        minor=card.minor,
        total_memory=card.memory,
        multi_processor_count=card.multiprocessors,
        is_integrated=int(card.integrated),
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=99 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        max_threads_per_multi_processor=1536,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        L2_cache_size=128 << 20,
        gcnArchName="",
        uuid="GPU-00000000-0000-0000-0000-000000000000",
    )
    free = (card.memory, card.memory)
    both: dict[str, object] = {
        "is_available": True,
        "device_count": 1024,
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "current_stream": _Handle(),
    }
    cuda = {
        **both,
        "get_device_properties": properties,
        "get_device_capability": (card.major, card.minor),
        "get_device_name": card.name,
        "is_initialized": True,
        "is_bf16_supported": True,
        "current_device": 0,
        "set_device": None,
        "init": None,
        "_lazy_init": None,
        "mem_get_info": free,
        "default_stream": _Handle(),
        "manual_seed": None,
        "manual_seed_all": None,
        "can_device_access_peer": True,
    }
    accelerator = {
        **both,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "set_device_index": None,
        "get_memory_info": free,
    }
    for module, answers in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in answers.items():
            setattr(module, name, _constant(value))
    for name in ("Stream", "Event", "CUDAGraph"):
        setattr(torch.cuda, name, _Handle)
    torch.cuda.stream = torch.cuda.device = _constant(contextlib.nullcontext())
    torch.Stream = torch.Event = _Handle
    torch.set_num_threads(1)


def _constant(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def meta_mode(host: Host) -> Any:
    """Return the mode in which whatever asks for CUDA gets the meta device."""
    torch = load("torch")
    base: Any = load("torch.overrides").TorchFunctionMode
    meta = torch.device("meta")

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return meta if value.type == "cuda" else value
        return meta if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

    def to_host(value: Any) -> bool:
        return isinstance(value, str | torch.device) and str(value) == "cpu"

    # torch is not here to be checked against.
    class Meta(base):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            first: Any = args[0] if args else None
            on_meta = isinstance(first, torch.Tensor) and first.device.type == "meta"
            if on_meta and name in _VALUES:
                return _VALUES[name](first)
            if on_meta and (
                name in ("cpu", "pin_memory")
                or (name == "to" and (to_host(kwargs.get("device")) or any(map(to_host, args[1:]))))
            ):
                return first
            if name == "cuda":
                return first.to(meta)
            device = kwargs.get("device")
            if name in _FACTORIES and to_host(device):
                shape = kwargs.get("size", args if isinstance(first, int) else first)
                dtype = kwargs.get("dtype") or torch.get_default_dtype()
                if math.prod(shape) * dtype.itemsize > _LARGE_ON_HOST:
                    return host.take(function(*args, **{**kwargs, "device": meta}))
            if device is not None:
                kwargs["device"] = meta if isinstance(device, int) else moved(device)
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return function(*map(moved, args), **kwargs)

    return Meta()


def replace_platform() -> None:
    """Put vLLM's CUDA platform in place, in its form without NVML."""
    torch = load("torch")
    platforms = load("vllm.platforms")
    base: Any = load("vllm.platforms.cuda").NonNvmlCudaPlatform
    answers: dict[str, object] = {
        "is_fully_connected": False,
        "is_integrated_gpu": bool(torch.cuda.get_device_properties().is_integrated),
        "current_device": torch.device("meta"),
        "logical_device_id_to_visible_device_id": 0,
    }
    replaced = {name: staticmethod(_constant(value)) for name, value in answers.items()}
    platforms._current_platform = type("PlannedPlatform", (base,), replaced)()


def replace_registry() -> None:
    """Inspect a model's class in this process: vLLM starts another one, without stand-ins."""
    registry = load("vllm.model_executor.models.registry")

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def replace_groups(world: int, rank: int) -> None:
    """Let process groups know their ranks and sizes, and have no communicator."""
    distributed = load("torch.distributed")
    state = load("vllm.distributed.parallel_state")
    store = load("torch.testing._internal.distributed.fake_pg").FakeStore()
    distributed.init_process_group(backend="fake", rank=rank, world_size=world, store=store)
    create = distributed.new_group
    distributed.new_group = lambda ranks=None, **rest: create(ranks, backend="fake")
    initialize = state.GroupCoordinator.__init__

    def init(
        self: Any,
        group_ranks: Any,
        local_rank: int,
        torch_distributed_backend: Any,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        **rest: Any,
    ) -> None:
        initialize(self, group_ranks, local_rank, "fake", False, False, group_name)
        self.use_device_communicator = use_device_communicator

    state.GroupCoordinator.__init__ = init
    state._node_count = _constant(1)
    state.in_the_same_node_as = _constant([True] * world)


def replace_scales() -> None:
    """Give DeepGEMM's conversion of scales, which has no form for the meta device, its sizes.

    On 10.x and 12.x (csrc/apis/layout.hpp there) each row has a scale for every ``gran_k`` values,
    of one byte, four in an integer; rows are aligned to 16 bytes. 9.x keeps scales of blocks. What
    vLLM does to the values before that, expert by expert, is in place.
    """
    torch = load("torch")
    utils = vars(load("vllm.model_executor.layers.quantization.utils.fp8_utils"))
    if "requant_weight_ue8m0_inplace" in utils:
        utils["requant_weight_ue8m0_inplace"] = _constant(None)
    try:
        load("vllm.third_party.deep_gemm")
    except (ImportError, OSError):
        # A release or a machine without it converts by other kernels.
        return
    packed = torch.cuda.get_device_properties().major >= 10

    def convert(
        sf: Any,
        mn: int,
        k: int,
        recipe: Any,
        num_groups: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if not packed:
            return sf
        columns = math.ceil(math.ceil(k / recipe[-1]) / 4)
        rows = math.ceil(mn / 4) * 4
        shape, strides = [mn, columns], [1, rows]
        if num_groups is not None:
            shape, strides = [num_groups, *shape], [columns * rows, *strides]
        return torch.empty_strided(shape, strides, dtype=torch.int32, device="meta")

    library = torch.library.Library("deep_gemm", "IMPL", "Meta")
    library.impl("transform_sf_into_required_layout", convert)
    _KEPT.append(library)


LOAD_FORMAT = "sm12x_plan"


def replace_loader(convert: Callable[[Any, Any], None]) -> None:
    """Register a load format that loads nothing; ``convert`` gets the model that is left.

    The stack's refusal by the card's memory before loading is left out: the plan has the figures.
    """
    loaders = load("vllm.model_executor.model_loader")
    base_loader = load("vllm.model_executor.model_loader.base_loader")
    nothing = staticmethod(_constant(None))
    loader = type(
        "PlannedLoader",
        (base_loader.BaseModelLoader,),
        {"download_model": nothing, "load_weights": nothing},
    )
    loaders.register_model_loader(LOAD_FORMAT)(loader)
    base_loader.process_weights_after_loading = lambda model, config, device: convert(model, config)
    # Its copies of the weights' shapes would keep each replaced weight alive: both are on meta.
    load("vllm.model_executor.model_loader.utils").record_metadata_for_reloading = _constant(None)
    if hasattr(base_loader, "check_state_blocks"):
        base_loader.check_state_blocks = _constant(None)


def replace_offloader(host: Host) -> None:
    """Count what vLLM offloads as host memory."""
    vars(load("vllm.model_executor.offloader.uva")).update(
        is_uva_available=_constant(True),
        should_pin_memory=_constant(False),
        get_accelerator_view_from_cpu_tensor=host.take,
    )


def storages(tensors: Iterable[Any], host: Host) -> dict[int, int]:
    """Return the bytes of each storage on the meta device that is not in host memory."""
    sizes = {}
    for tensor in tensors:
        if tensor.device.type == "meta":
            storage = tensor.untyped_storage()
            if storage._cdata not in host.storages:
                sizes[storage._cdata] = storage.nbytes()
    return sizes


def alive(host: Host) -> int:
    """Return the bytes of every tensor on the meta device that something refers to."""
    gc.collect()
    torch = load("torch")
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return sum(storages(tensors, host).values())
