"""DeepSeek V4's attention layer of a tree on the host: its own code, over caches made here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYER = "vllm.model_executor.layers.deepseek_v4_attention"
SWA = "vllm.v1.attention.backends.mla.sparse_swa"
WORKSPACE = "vllm.v1.worker.workspace"
# What most functions import first; what these decide at import does not depend on the device.
MODULES = (LAYER, SWA, WORKSPACE)
WINDOW = 96
SWA_TOKENS = 64
# vLLM's block size; a compressed block has this divided by the ratio.
BLOCK = 256
MAX_LEN = 1024
HEADS = 5
TOPK = 32


def prepare() -> Any:
    """Import the layer where no CUDA module of the release is."""
    torch: Any = importlib.import_module("torch")
    sys.path.append(str(Path(__file__).parent / "portable"))
    torch.Tensor.pin_memory = lambda self: self
    torch.accelerator.empty_cache = lambda: None
    workspace: Any = importlib.import_module(WORKSPACE)
    workspace.init_workspace_manager(torch.device("cpu"))
    return importlib.import_module(LAYER)


class Batch:
    """Decode requests first, then prefill requests: (context before the step, new tokens) each."""

    def __init__(self, ratio: int, decodes: list[list[int]], prefills: list[list[int]]) -> None:
        torch: Any = importlib.import_module("torch")
        inputs: Any = importlib.import_module("sparse_inputs")
        self.torch = torch
        self.ratio = ratio
        self.requests = [*decodes, *prefills]
        self.decode_tokens = sum(new for _, new in decodes)
        self.threshold = max((new for _, new in decodes), default=1)
        lens = [before + new for before, new in self.requests]
        starts = [0]
        for _, new in self.requests:
            starts.append(starts[-1] + new)
        self.tokens = starts[-1]
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.positions = torch.cat([torch.arange(b, b + n) for b, n in self.requests])
        self.owner = [i for i, (_, new) in enumerate(self.requests) for _ in range(new)]
        # Blocks of a request lie in any order.
        generator = torch.Generator().manual_seed(ratio)
        count = len(self.requests) * MAX_LEN // SWA_TOKENS
        order = torch.randperm(count, generator=generator).to(torch.int32)
        self.swa_table = order.reshape(len(self.requests), -1)
        self.swa_cache = inputs.cache(count, SWA_TOKENS, 1)
        count = len(self.requests) * MAX_LEN // BLOCK
        order = torch.randperm(count, generator=generator).to(torch.int32)
        self.table = order.reshape(len(self.requests), -1)
        self.cache = inputs.cache(count, BLOCK // ratio, 2) if ratio > 1 else None
        self.q = inputs.queries(self.tokens, HEADS, 3)
        self.sink = inputs.sinks(HEADS, 4)
        self.topk = torch.full((self.tokens, TOPK), -1, dtype=torch.int32)
        for token, position in enumerate(self.positions.tolist()):
            have = min((position + 1) // ratio, TOPK)
            chosen = torch.randperm((position + 1) // ratio, generator=generator)[:have]
            self.topk[token, :have] = chosen.to(torch.int32)

    def layer(self) -> Any:
        module: Any = importlib.import_module(LAYER)
        layer = module.DeepseekV4MLAAttention.__new__(module.DeepseekV4MLAAttention)
        self.torch.nn.Module.__init__(layer)
        layer.num_heads = layer.padded_heads = HEADS
        layer.head_dim = 512
        layer.nope_head_dim, layer.rope_head_dim = 448, 64
        layer.scale = 512**-0.5
        layer.window_size = WINDOW
        layer.compress_ratio = self.ratio
        layer.attn_sink = self.sink
        layer.topk_indices_buffer = self.topk
        layer.swa_cache_layer = SimpleNamespace(kv_cache=self.swa_cache, prefix="swa")
        layer.kv_cache = self.cache
        layer.max_model_len = MAX_LEN
        layer.max_num_batched_tokens = 64
        layer.prefix = "layer"
        return layer

    def swa_metadata(self) -> Any:
        """What the release's builder makes of the batch."""
        torch = self.torch
        module: Any = importlib.import_module(SWA)
        kind = module.DeepseekSparseSWAMetadataBuilder
        builder = kind.__new__(kind)
        builder.device = torch.device("cpu")
        builder.block_size = SWA_TOKENS
        builder.window_size = WINDOW
        builder.decode_threshold = self.threshold
        builder._layer_types = {module._layer_type_for(self.ratio)}
        builder.token_to_req_indices = torch.zeros(64, dtype=torch.int32)
        builder.decode_swa_indices = torch.zeros(64, 1, WINDOW, dtype=torch.int32)
        builder.decode_swa_lens = torch.zeros(64, dtype=torch.int32)
        builder.is_valid_token = torch.zeros(64, dtype=torch.bool)
        news = [new for _, new in self.requests]
        common = SimpleNamespace(
            num_reqs=len(self.requests),
            num_actual_tokens=self.tokens,
            max_query_len=max(news),
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts,
            seq_lens=self.lens,
            block_table_tensor=self.swa_table,
            slot_mapping=torch.arange(self.tokens),
            is_prefilling=None,
        )
        return builder.build(0, common)

    def metadata(self) -> Any:
        if self.ratio <= 1:
            return None
        torch = self.torch
        width = MAX_LEN // 128
        counts = (self.positions + 1) // self.ratio
        local = torch.arange(width).expand(self.tokens, width)
        local = torch.where(local < counts[:, None], local, -1).to(torch.int32)
        first = self.decode_tokens
        tokens = BLOCK // self.ratio
        owner = torch.tensor(self.owner)
        block = self.table[owner].long().gather(1, local.clamp(min=0).long() // tokens)
        slots = block * tokens + local.clamp(min=0) % tokens
        slots = torch.where(local < 0, -1, slots).to(torch.int32)
        return SimpleNamespace(
            block_size=BLOCK,
            block_table=self.table,
            c128a_global_decode_topk_indices=slots[:first].unsqueeze(1),
            c128a_decode_topk_lens=counts[:first].to(torch.int32),
            c128a_prefill_topk_indices=local[first:],
        )

    def wanted(self) -> Any:
        """[tokens, heads, 512] float64, from positions alone."""
        torch = self.torch
        reference: Any = importlib.import_module(
            "vllm.v1.attention.ops.portable_mla.sparse_mla_reference"
        )
        out = torch.zeros(self.tokens, HEADS, 512, dtype=torch.float64)
        for token, position in enumerate(self.positions.tolist()):
            request = self.owner[token]
            seen = torch.arange(max(0, position + 1 - WINDOW), position + 1)
            given: dict[str, Any] = {
                "q": self.q[token : token + 1],
                "swa_cache": self.swa_cache,
                "swa_slots": self.slots(seen, self.swa_table[request], SWA_TOKENS),
                "swa_lens": [len(seen)],
                "sink": self.sink,
                "scale": 512**-0.5,
            }
            if self.ratio > 1:
                chosen = self.topk[token][self.topk[token] >= 0]
                if self.ratio == 128:
                    chosen = torch.arange((position + 1) // 128)
                given["comp_cache"] = self.cache
                given["comp_slots"] = self.slots(chosen, self.table[request], BLOCK // self.ratio)
                given["comp_lens"] = [len(chosen)]
            out[token] = reference.sparse_mla_reference(**given)[0]
        return out

    def slots(self, positions: Any, row: Any, tokens: int) -> Any:
        positions = positions.long()
        return (row[positions // tokens].long() * tokens + positions % tokens)[None]
