"""A max_num_seqs that no GPU memory holds states for is refused before weights are loaded."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.world import World

LOADER = "vllm.model_executor.model_loader.base_loader"
CHECK = "vllm.model_executor.model_loader.state_blocks"
ATTENTION = "vllm.model_executor.layers.attention"
MAMBA = "vllm.model_executor.layers.mamba.abstract"
BACKEND = "vllm.v1.attention.backend"
INTERFACE = "vllm.v1.kv_cache_interface"
pytestmark = [pytest.mark.loads(LOADER), pytest.mark.loads(MAMBA)]
GIB = 1 << 30
# A gated DeltaNet layer: 3 of 4 inputs of its convolution, and a matrix of 128 x 128 a head.
STATE = ((3, 10_240), (48, 128, 128))


class Loaded(Exception):  # noqa: N818 (it is no error: the load was reached)
    """The weights would be loaded now."""


class Start:
    """A start of a hybrid model up to the load: its layers, its memory and its settings."""

    def __init__(self, world: World, *, full: int = 16, state: int = 48, window: int = 0) -> None:
        self.torch = world.torch
        self.module: Any = importlib.import_module(LOADER)
        self.dtypes = (self.torch.bfloat16, self.torch.float32)
        self.memory = 94 * GIB
        self.platform = SimpleNamespace(
            is_cuda=lambda: True,
            is_cuda_alike=lambda: True,
            device_type="cpu",
            mem_get_info=lambda device=None: (self.memory // 2, self.memory),
        )
        self.torch.accelerator.get_memory_info = lambda device=None: (
            self.memory // 2,
            self.memory,
        )
        self.support = importlib.import_module(BACKEND).AttentionCGSupport.UNIFORM_BATCH
        self.layers: dict[str, Any] = {}
        for index in range(state):
            self.layers[f"state.{index}"] = self.recurrent(STATE)
        for index in range(full):
            self.layers[f"full.{index}"] = self.attention(None)
        for index in range(window):
            self.layers[f"window.{index}"] = self.attention(4096)
        mode = importlib.import_module("vllm.config.compilation").CUDAGraphMode
        self.mode = mode
        self.model_config = SimpleNamespace(
            is_hybrid=True,
            dtype=self.torch.bfloat16,
            quantization=None,
            quantization_config=None,
            model_arch_config=SimpleNamespace(quantization_config=None),
            supports_kv_cache_grouping=False,
            use_mla=False,
        )
        self.config = SimpleNamespace(
            model_config=self.model_config,
            compilation_config=SimpleNamespace(
                cudagraph_mode=mode.FULL_AND_PIECEWISE, static_forward_context=self.layers
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=1024, disable_hybrid_kv_cache_manager=False
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=None,
                kv_cache_memory_bytes=None,
                gpu_memory_utilization=0.92,
                get_resolved_kv_cache_layout=lambda: self.layout(),
                prefix_cache_retention_interval=None,
            ),
            offload_config=SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=0),
                prefetch=SimpleNamespace(offload_group_size=0),
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            num_speculative_tokens=0,
            device_config=SimpleNamespace(device="cpu"),
            load_config=SimpleNamespace(device=None),
        )
        # Parameters of 54 GiB, as 27 billion of bfloat16, that take no memory.
        self.weights = 54 * GIB

    def layout(self) -> Any:
        return importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBHNC

    def backend(self) -> Any:
        start = self

        class Builder:
            @classmethod
            def get_cudagraph_support(cls, config: Any, spec: Any) -> Any:
                return start.support

        return SimpleNamespace(get_builder_cls=lambda: Builder, is_mla=lambda: False)

    def recurrent(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        base: Any = importlib.import_module(MAMBA).MambaBase
        start = self

        class Recurrent(base):  # type: ignore[misc]
            mamba_type = "gdn_attention"

            def get_state_shape(self) -> Any:
                return shapes

            def get_state_dtype(self) -> Any:
                return start.dtypes

            def get_attn_backend(self) -> Any:
                return start.only_backend

        Recurrent.__qualname__ = "Recurrent"
        return self.kept("recurrent", Recurrent)()

    def attention(self, window: int | None) -> Any:
        base: Any = importlib.import_module(ATTENTION).Attention
        start = self

        class Caching(base):  # type: ignore[misc]
            def __init__(self) -> None:
                start.torch.nn.Module.__init__(self)
                self.head_size = self.head_size_v = 256
                self.num_kv_heads = 4
                self.sliding_window = window
                self.kv_cache_dtype = "auto"
                self.attn_type = "decoder"
                self.kv_sharing_target_layer_name = None

            def get_attn_backend(self) -> Any:
                return start.only_backend

        return self.kept("caching", Caching, window)()

    def kept(self, name: str, made: Any, *more: Any) -> Any:
        """One class for all layers of a kind, as a model has."""
        classes = self.__dict__.setdefault("classes", {})
        return classes.setdefault((name, *more), made)

    @property
    def only_backend(self) -> Any:
        return self.__dict__.setdefault("kept_backend", _Backend(self.backend()))

    def model(self) -> Any:
        torch = self.torch
        model = torch.nn.Module()
        one = torch.zeros(1, dtype=torch.bfloat16)
        model.weight = torch.nn.Parameter(one.expand(self.weights // 2), requires_grad=False)
        return model

    def run(self, model_config: Any = None) -> None:
        """Load the model as the release does. Raises Loaded where the weights would be loaded."""
        module = self.module
        module.initialize_model = lambda **words: self.model()
        module.current_platform = self.platform
        for name in ("log_online_quantization", "log_model_inspection"):
            setattr(module, name, lambda *words: None)
        if importlib.util.find_spec(CHECK) is not None:
            check: Any = importlib.import_module(CHECK)
            check.current_platform = self.platform

        class Loader(module.BaseModelLoader):  # type: ignore[misc, name-defined]
            def download_model(self, config: Any) -> None:
                raise AssertionError("not downloaded before")

            def load_weights(self, model: Any, config: Any) -> None:
                raise Loaded

        given = self.model_config if model_config is None else model_config
        Loader(self.config.load_config).load_model(self.config, given)

    def refused(self) -> str:
        """The error, "" where the weights are loaded."""
        try:
            self.run()
        except Loaded:
            return ""
        except ValueError as error:
            return str(error)
        raise AssertionError("neither refused nor loaded")

    def page(self) -> int:
        torch = self.torch
        return sum(
            math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
            for shape, dtype in zip(STATE, self.dtypes, strict=True)
        )

    def blocks_after_the_load(self, available: int) -> int:
        """The blocks that the release makes of ``available`` bytes, with its own grouping."""
        interface: Any = importlib.import_module(INTERFACE)
        name = "vllm.v1.core.kv_cache_planning"
        if importlib.util.find_spec(name) is None:
            name = "vllm.v1.core.kv_cache_utils"
        planning: Any = importlib.import_module(name)
        torch = self.torch
        token = 2 * 4 * 256 * 2
        tokens = 16 * -(-self.page() // (16 * token))
        specs: dict[str, Any] = {}
        for name, layer in self.layers.items():
            if name.startswith("state"):
                specs[name] = interface.MambaSpec(
                    shapes=STATE,
                    dtypes=self.dtypes,
                    block_size=tokens,
                    page_size_padded=tokens * token,
                )
                continue
            common = {
                "block_size": tokens,
                "num_kv_heads": 4,
                "head_size": 256,
                "dtype": torch.bfloat16,
            }
            if layer.sliding_window is None:
                specs[name] = interface.FullAttentionSpec(**common)
            else:
                specs[name] = interface.SlidingWindowSpec(
                    **common, sliding_window=layer.sliding_window
                )
        groups = planning.get_kv_cache_groups(self.config, specs)
        made = planning.get_kv_cache_config_from_groups(self.config, groups, available)
        return int(made.num_blocks)


class _Backend:
    """Hashable, and one for all layers."""

    def __init__(self, answers: Any) -> None:
        self.get_builder_cls = answers.get_builder_cls
        self.is_mla = answers.is_mla


def test_what_cannot_fit_is_refused_before_the_load_with_the_largest_that_can(
    world: World,
) -> None:
    """27B in bfloat16 on 94 GiB, as in vllm#49064: 1024 sequences, and room for some 800."""
    start = Start(world)
    most = (math.ceil(0.92 * start.memory) - int(0.9 * start.weights)) // (16 * start.page())
    assert 600 < most < 1024
    said = start.refused()
    assert "(1024)" in said
    assert f"--max-num-seqs to at most {most}" in said
    start.config.scheduler_config.max_num_seqs = most + 1
    assert start.refused()
    start.config.scheduler_config.max_num_seqs = most
    assert not start.refused()


def test_what_is_refused_would_not_have_started(world: World) -> None:
    """Random models and memory: the release's own grouping never makes more blocks than asked."""
    draw = random.Random(0)  # noqa: S311
    refused = 0
    for _ in range(150):
        start = Start(
            world,
            full=draw.randint(1, 24),
            state=draw.randint(1, 60),
            window=draw.choice((0, 0, 1, 5, 20)),
        )
        start.memory = draw.randint(20, 180) * GIB
        start.weights = draw.randint(0, 100) * GIB // 2
        available = math.ceil(0.92 * start.memory) - start.weights
        blocks = start.blocks_after_the_load(max(available, 0))
        wanted = start.config.scheduler_config.max_num_seqs = draw.randint(1, 3 * blocks + 64)
        if start.refused():
            refused += 1
            assert blocks < wanted
    assert refused > 40


@pytest.mark.parametrize("given", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_blocks_that_are_given_are_taken(world: World, given: str) -> None:
    start = Start(world)
    start.memory = 1
    value = 500 if given == "num_gpu_blocks_override" else 500 * 16 * start.page() + 1
    setattr(start.config.cache_config, given, value)
    assert "to at most 500" in start.refused()
    start.config.scheduler_config.max_num_seqs = 500
    assert not start.refused()


@pytest.mark.parametrize(
    "where", ["offloaded", "prefetched", "quantized later", "set to be", "elsewhere"]
)
def test_weights_that_may_take_nothing_are_not_counted(world: World, where: str) -> None:
    """1,024 states of 16 layers take 52 GiB: they fit in 86 only if the weights are left out."""
    start = Start(world)
    assert start.refused()
    if where == "offloaded":
        start.config.offload_config.uva.cpu_offload_gb = 40
    elif where == "prefetched":
        start.config.offload_config.prefetch.offload_group_size = 8
    elif where == "quantized later":
        start.model_config.quantization = "fp8"
    elif where == "set to be":
        start.model_config.quantization_config = SimpleNamespace()
    else:
        start.platform.device_type = "cuda"
    assert not start.refused()
    if where == "quantized later":
        start.model_config.model_arch_config.quantization_config = {"quant_method": "fp8"}
        assert start.refused()
        # As torchao does where a configuration is given with the command.
        start.model_config.quantization = "torchao"
        assert not start.refused()


@pytest.mark.parametrize(
    "what",
    [
        "not hybrid",
        "not CUDA",
        "no full graphs",
        "no graphs",
        "unset graphs",
        "graphs not supported",
        "a draft model",
        "speculative decoding",
        "pipeline stages",
        "states of two sizes",
        "another cache",
        "no states",
    ],
)
def test_all_else_starts_as_before(world: World, what: str) -> None:
    """Red on the release through its first line: there the same model is not refused either."""
    start = Start(world)
    assert start.refused()
    model_config = None
    if what == "not hybrid":
        start.model_config.is_hybrid = False
    elif what == "not CUDA":
        start.platform.is_cuda = lambda: False
    elif what == "no full graphs":
        start.config.compilation_config.cudagraph_mode = start.mode.PIECEWISE
    elif what == "no graphs":
        start.config.compilation_config.cudagraph_mode = start.mode.NONE
    elif what == "unset graphs":
        start.config.compilation_config.cudagraph_mode = None
    elif what == "graphs not supported":
        start.support = importlib.import_module(BACKEND).AttentionCGSupport.NEVER
    elif what == "a draft model":
        model_config = SimpleNamespace(**vars(start.model_config))
    elif what == "speculative decoding":
        start.config.speculative_config = SimpleNamespace(method="mtp")
    elif what == "pipeline stages":
        start.config.parallel_config.pipeline_parallel_size = 2
    elif what == "states of two sizes":
        start.__dict__.pop("classes")
        start.layers["state.0"] = start.recurrent(((4, 4), (2, 2, 2)))
    elif what == "another cache":
        base: Any = importlib.import_module(
            "vllm.model_executor.layers.attention_layer_base"
        ).AttentionLayerBase

        class Other(base):  # type: ignore[misc]
            def get_attn_backend(self) -> Any:
                return start.only_backend

            def get_kv_cache_spec(self, config: Any) -> Any:
                return None

        start.layers["other"] = Other()
    else:
        for name in [name for name in start.layers if name.startswith("state")]:
            del start.layers[name]
    with pytest.raises(Loaded):
        start.run(model_config)


def test_layers_that_share_a_cache_are_not_counted_twice(world: World) -> None:
    """Eight layers that read the cache of others make the rarest kind 8, not 16."""
    start = Start(world)
    assert start.refused()
    for index in range(8):
        start.layers[f"full.{index}"].kv_sharing_target_layer_name = "full.15"
    assert not start.refused()


def test_no_memory_at_all_is_left_to_the_error_about_memory(world: World) -> None:
    start = Start(world)
    assert start.refused()
    start.memory = start.weights // 2
    assert not start.refused()


@pytest.mark.parametrize("what", ["the model", "the hot cache on the host"])
def test_groups_of_another_making_are_not_counted(world: World, what: str) -> None:
    """0.33.0 has both, 0.21.0 neither: there nothing of the kind is asked for."""
    start = Start(world)
    assert start.refused()
    if what == "the model":
        interfaces: Any = importlib.import_module("vllm.model_executor.models.interfaces")
        known = hasattr(interfaces, "SupportsKVCacheGrouping")
        start.model_config.supports_kv_cache_grouping = True
    else:
        known = importlib.util.find_spec("vllm.v1.hisparse") is not None
        start.config.attention_config.hisparse_config = SimpleNamespace()
    assert bool(start.refused()) == (not known)
