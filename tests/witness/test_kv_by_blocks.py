"""The worker's part: the memory by blocks is all that a block id stands for, in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.witness import executor_rig
from tests.witness import kept_kv_rig as kv
from tests.witness.executor_rig import isolated

executor_rig.use_tree()

LIMIT = 40
# Bytes of KV cache for the planner; some 30 blocks of the layouts below.
MEMORY = 1 << 18

pytestmark = pytest.mark.usefixtures("vllm_executor")


class NoStream:
    """Where there is no device: the release's offloading makes streams that are not used."""

    def __init__(self, **_: Any) -> None: ...

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return 0, -1


def specs(kind: str) -> dict[str, Any]:
    """The layers of a model of this kind, as its worker tells the engine."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    one: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}
    full = FullAttentionSpec(**one, dtype=torch.float32)
    wide = FullAttentionSpec(**{**one, "head_size": 16}, dtype=torch.float32)
    window = SlidingWindowSpec(**one, dtype=torch.float32, sliding_window=32)
    latent = MLAAttentionSpec(**{**one, "num_kv_heads": 1, "head_size": 32}, dtype=torch.uint8)
    state = MambaSpec(
        block_size=16,
        # As large as a page of full attention.
        shapes=((3, 16), (464,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
    )
    layers = {
        "full": [full] * 4,
        "window": [full, window, window, window],
        "state": [full, state, state, state],
        "latent": [latent] * 3,
        # A draft whose layers are of another size.
        "draft": [full, full, full, wide],
    }[kind]
    return {f"model.layers.{n}.attn": spec for n, spec in enumerate(layers)}


class Runner:
    """The part of a model runner that has the KV cache."""

    def __init__(self, kind: str, layout: str) -> None:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_configs, get_kv_cache_groups
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.device = torch.device("cpu")
        self.vllm_config = kv.config()
        self.vllm_config.cache_config.block_size = 16
        self.vllm_config.cache_config.kv_cache_layout = layout
        groups = get_kv_cache_groups(self.vllm_config, specs(kind))
        [self.kv_cache_config] = get_kv_cache_configs(
            self.vllm_config, [specs(kind)], [MEMORY], groups
        )
        caches = allocate_kv_cache(self.kv_cache_config, self.device, KVCacheLayout[layout])
        layers = {
            # States are bound as a list of views of one memory.
            name: SimpleNamespace(kv_cache=[cache] if kind == "state" else cache)
            for name, cache in caches.items()
        }
        self.compilation_config = SimpleNamespace(static_forward_context=layers)
        first = next(iter(caches.values()))
        self.memory = torch.empty(0, dtype=torch.int8).set_(first.untyped_storage())

    def pages(self, block: int) -> list[torch.Tensor]:
        """What every layer has under this block id, by the release's own views and strides."""
        caches = self.compilation_config.static_forward_context
        groups = self.kv_cache_config.kv_cache_groups
        pages = []
        for tensor in self.kv_cache_config.kv_cache_tensors:
            for index, name in enumerate(tensor.layers):
                [spec] = [g.kv_cache_spec for g in groups if name in g.layer_names]
                spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
                if spec.has_layer_views:
                    cache = caches[name].kv_cache
                    cache = cache[0] if isinstance(cache, list) else cache
                    pages.append(cache[block].view(torch.uint8))
                    continue
                start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                pages.append(self.memory[start : start + spec.page_size_bytes])
        return pages


def backend_class() -> Any:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

    class HostBackend(SleepModeBackend):  # type: ignore[misc]
        """Keeps copies of blocks, as simply as can be."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, torch.Tensor] = {}
            self.blocks: list[int] = []
            self.changed = False

        def suspend(self, level: int = 1) -> None: ...

        def resume(self, tags: list[str] | None = None) -> None: ...

        def kv_room(self, block_bytes: int, limit: int | None) -> tuple[int, str]:
            return (7 * block_bytes if limit is None else limit), "no more than the limit"

        def keep_kv(self, regions: Mapping[str, torch.Tensor], blocks: Sequence[int]) -> None:
            self.regions, self.blocks = regions, list(blocks)
            self.kept = {name: region[self.blocks].clone() for name, region in regions.items()}

        def restore_kv(self) -> None:
            for name, region in self.regions.items():
                region[self.blocks] = self.kept[name]

        def drop_kv(self) -> None:
            self.kept, self.blocks = {}, []

        def kept_kv(self) -> tuple[int, int]:
            return len(self.blocks), sum(copy.nbytes for copy in self.kept.values())

        def weights_changed(self) -> bool:
            return self.changed

    return HostBackend


def worker(kind: str, layout: str = "LBNHC") -> tuple[Any, Runner]:
    from vllm.v1.worker.kept_kv import KeepsKV

    torch.cuda.Stream = NoStream
    made = KeepsKV()
    made.model_runner = Runner(kind, layout)
    made.sleep_mode_backend = backend_class()()
    return made, made.model_runner


KINDS = ("full", "window", "state", "latent")


LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# Of states the heads of attention have other blocks where they are outermost.
APART = ("state", "LHBNC")
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if (kind, layout) != APART]
# The release has pages of several sizes in these layouts alone.
CASES += [("draft", layout) for layout in ("BLHNC", "BLNHC")]


@pytest.mark.parametrize(("kind", "layout"), CASES)
@isolated(LIMIT)
def test_a_block_has_all_its_bytes_back(kind: str, layout: str) -> None:
    made, runner = worker(kind, layout)
    blocks = [1, 2, 5, runner.kv_cache_config.num_blocks - 1]
    generator = torch.Generator().manual_seed(1)
    runner.memory.random_(-128, 127, generator=generator)
    before = {block: [page.clone() for page in runner.pages(block)] for block in blocks}
    other = [page.clone() for page in runner.pages(3)]
    made.keep_kv(blocks)
    room, size, _ = made.kv_room()
    assert made.sleep_mode_backend.kept_kv() == (len(blocks), len(blocks) * size)
    assert room == 7 * size
    # No byte of a block is in two regions.
    assert size * runner.kv_cache_config.num_blocks <= runner.memory.numel()
    # Asleep, and awake again with other memory.
    runner.memory.fill_(7)
    assert made.restore_kv(len(blocks)) is False
    for block in blocks:
        for now, then in zip(runner.pages(block), before[block], strict=True):
            assert torch.equal(now, then)
    assert any(not torch.equal(now, then) for now, then in zip(runner.pages(3), other, strict=True))


@isolated(LIMIT)
def test_what_is_not_whole_is_not_restored() -> None:
    made, runner = worker("full")
    made.keep_kv([1, 2])
    runner.memory.fill_(7)
    with pytest.raises(RuntimeError, match="2 of 3 blocks"):
        made.restore_kv(3)
    assert bool((runner.memory == 7).all())
    made.sleep_mode_backend.changed = True
    assert made.restore_kv(2) is True
    made.sleep_mode_backend.changed = False
    assert made.restore_kv(2) is False
    made.drop_kv()
    with pytest.raises(RuntimeError, match="0 of 2 blocks"):
        made.restore_kv(2)


@isolated(LIMIT)
def test_blocks_that_share_bytes_with_other_ids_are_not_kept() -> None:
    made, _ = worker(*APART)
    assert made.kv_room()[:2] == (0, 0)
    with pytest.raises(RuntimeError, match="other blocks"):
        made.keep_kv([1])


@isolated(LIMIT)
def test_a_sleep_does_not_wait_for_copies_that_are_under_way() -> None:
    waits: list[str] = []
    torch.accelerator.synchronize = lambda: waits.append("device")
    made, _ = worker("full")
    made.wait_before_sleep()
    assert waits == ["device"]
    made.keep_kv([1])
    made.wait_before_sleep()
    assert waits == ["device"]
    # The next sleep has no copies of its own.
    made.wait_before_sleep()
    assert waits == ["device", "device"]


@isolated(LIMIT)
def test_a_layer_without_memory_is_not_passed_over() -> None:
    made, runner = worker("window")
    layers = runner.compilation_config.static_forward_context
    for name in runner.kv_cache_config.kv_cache_tensors[0].layers:
        layers[name].kv_cache = torch.tensor([], device="meta")
    assert made.kv_room()[:2] == (0, 0)
    with pytest.raises(RuntimeError, match="no KV cache is bound"):
        made.keep_kv([1])


@isolated(LIMIT)
def test_a_backend_keeps_nothing_unless_it_says_so() -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.worker.gpu_worker import Worker

    made, _ = worker("full")
    made.sleep_mode_backend = CuMemBackend()
    room, size, reason = made.kv_room()
    assert room == 0 < size
    assert "CuMemBackend" in reason
    with pytest.raises(RuntimeError, match="CuMemBackend"):
        made.keep_kv([1])
    assert made.sleep_mode_backend.kept_kv() == (0, 0)
    assert not made.sleep_mode_backend.weights_changed()
    made.drop_kv()
    assert Worker.keep_kv is type(made).keep_kv
