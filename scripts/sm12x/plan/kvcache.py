"""The size of the KV cache on one GPU, from a model's config.json, laid out as vLLM lays it out.

vLLM hands out memory in blocks of one size. Layers of one kind that keep the same tokens share a
block table; a block holds some tokens of as many layers as the smallest kind has. So a model needs
a number of blocks per sequence times the bytes of a block; this module computes that product.
Source of every formula: vLLM 0.21's v1/kv_cache_interface.py (bytes of a page) and
v1/core/kv_cache_utils.py (how layers are grouped into blocks), unless a docstring names another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from sm12x.core.errors import UsageError
from sm12x.core.text import GIB

# --kv-cache-dtype -> bytes of one cached value. nvfp4: half a byte, and a scale for every 16.
_DTYPES = {
    "bfloat16": Fraction(2),
    "float16": Fraction(2),
    "fp8": Fraction(1),
    "fp8_e4m3": Fraction(1),
    "fp8_e5m2": Fraction(1),
    "fp8_ds_mla": Fraction(1),
    "nvfp4": Fraction(9, 16),
}
KV_DTYPES = ("auto", *_DTYPES)
# What vLLM takes for --block-size on CUDA unless the attention asks for another.
DEFAULT_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of one kind: ``count`` of them.

    ``token_bytes`` is what one kept token takes in one layer on one GPU. ``window`` is the number
    of tokens a sequence keeps, None for all of them. Recurrent layers have ``state_bytes`` per
    sequence instead, whatever its length.
    """

    name: str
    count: int
    token_bytes: Fraction = Fraction(0)
    window: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share ``tables`` block tables; a block holds ``block_tokens`` of their tokens.

    ``block_tokens`` is 0 for recurrent layers, which take one block per sequence and table.
    """

    layers: Layers
    tables: int
    block_tokens: int

    def blocks(self, tokens: int, chunk: int = 0) -> int:
        """Blocks of one sequence of ``tokens``, ``chunk`` of them in the step under way.

        A window may start inside a block, hence the extra block; while a prompt is read, a window
        layer also keeps the whole chunk.
        """
        if self.block_tokens == 0:
            return self.tables
        if self.layers.window is None:
            return self.tables * _ceil(tokens, self.block_tokens)
        kept = min(self.layers.window - 1 + max(chunk, 1), tokens)
        whole = _ceil(tokens, self.block_tokens)
        return self.tables * min(_ceil(kept, self.block_tokens) + 1, whole)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one model's cache lies on one GPU. ``replicated`` if each rank of TP holds all of it."""

    attention: str
    groups: tuple[Group, ...]
    block_bytes: int
    replicated: bool

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token of a long sequence adds on one GPU, padding left out."""
        return float(
            sum(
                group.layers.count * group.layers.token_bytes
                for group in self.groups
                if group.layers.window is None
            )
        )

    @property
    def recurrent(self) -> bool:
        """Whether it keeps recurrent states: a sequence takes one block per table for them.

        vLLM captures full CUDA graphs only where it has a block for each of --max-num-seqs, and
        does not start where it has fewer (config/compilation.py, vllm#49064).
        """
        return any(group.layers.state_bytes for group in self.groups)

    def gib(self, *, tokens: int, sequences: int, chunk: int = 0) -> float:
        """GiB on one GPU for ``sequences`` of ``tokens`` each, ``chunk`` tokens being read in.

        The chunk (--max-num-batched-tokens) counts once: a step reads that many tokens in all.
        """
        resting = sum(group.blocks(tokens) for group in self.groups)
        reading = sum(group.blocks(tokens, min(chunk, tokens)) for group in self.groups)
        return (sequences * resting + reading - resting) * self.block_bytes / GIB


def value_bytes(kv_dtype: str, model_dtype: str) -> Fraction:
    """Bytes of one cached value. Raises UsageError for a dtype that is not known."""
    name = model_dtype if kv_dtype == "auto" else kv_dtype
    if name not in _DTYPES:
        raise UsageError(
            f"the KV cache dtype {name!r} is not known here",
            next_step=f"give --kv-dtype, one of {', '.join(_DTYPES)}",
        )
    return _DTYPES[name]


def paged(
    attention: str,
    layers: Iterable[Layers],
    *,
    block: int = DEFAULT_BLOCK,
    replicated: bool = False,
) -> Layout:
    """Lay out layers as vLLM does for every model but DeepSeek V4.

    Full attention alone: one table, a block holds ``block`` tokens of all layers. Mixed kinds: the
    page (one block of one layer) gets one size for all, by raising the tokens a block holds of the
    smaller ones; the block holds as many layers as the rarest kind has, and a kind with more of
    them takes several tables. A recurrent state is one page, and ``block`` is raised until a page
    holds it.
    """
    kinds = tuple(kind for kind in layers if kind.count)
    caching = [kind for kind in kinds if kind.state_bytes == 0]
    if all(kind.window is None for kind in caching) and len(caching) == len(kinds):
        groups = tuple(Group(layers=kind, tables=1, block_tokens=block) for kind in kinds)
        total = sum(kind.count * kind.token_bytes for kind in kinds) * block
        # The kinds of such a model share one table: a second one must not be counted again.
        return Layout(
            attention=attention,
            groups=(groups[0], *(_free(group) for group in groups[1:])),
            block_bytes=int(total),
            replicated=replicated,
        )
    states = max((kind.state_bytes for kind in kinds), default=0)
    if states and caching:
        least = min(kind.token_bytes for kind in caching)
        block = max(block, DEFAULT_BLOCK * _ceil(states, DEFAULT_BLOCK * least))
    page = max([Fraction(states), *(block * kind.token_bytes for kind in caching)])
    size = _group_size([kind.count for kind in kinds])
    return Layout(
        attention=attention,
        groups=tuple(
            Group(
                layers=kind,
                tables=_ceil(kind.count, size),
                block_tokens=0 if kind.state_bytes else int(page / kind.token_bytes),
            )
            for kind in kinds
        ),
        block_bytes=int(size * page),
        replicated=replicated,
    )


def compressed(
    *, ratios: tuple[int, ...], window: int, head: int, index: int, block: int, narrow: bool
) -> Layout:
    """DeepSeek V4: a short window in every layer, compressed entries in most, an index in some.

    fp8_ds_mla (``narrow``): 584 bytes per entry (448 e4m3, 64 bf16, 8 scales), 132 per index entry
    (128 fp8 and one fp32 scale); pages are padded to 576 bytes, which FlashMLA needs. Layers of
    ratio 4 keep one entry for 4 tokens and one of the index, layers of ratio 128 one for 128. The
    compressors keep fp32 states of the tokens not yet compressed, in blocks of 4 and 8 tokens with
    windows of 8 and 128. Layers of one ratio stand side by side in a tuple; a block holds as many
    tuples as pads the least.
    """
    entry, key = (584, index + 4) if narrow else (2 * head, 2 * index)
    four, wide = ratios.count(4), ratios.count(128)
    sizes = {
        "index": _pad(block // 4 * key),
        "four": _pad(block // 4 * entry),
        "wide": _pad(block // 128 * entry),
    }
    pages = {sizes["index"], sizes["four"]} if four else set()
    pages |= {sizes["wide"]} if wide else set()
    if not pages:
        raise UsageError(
            "compress_ratios has no layer of ratio 4 or 128",
            next_step="check that config.json is the model's own",
        )
    full = max(four, wide)
    tuples = _least_padding([full, len(ratios), four, wide], least=full)
    plain = {
        "compressed x4": Layers(name="compressed x4", count=four, token_bytes=Fraction(entry, 4)),
        "index x4": Layers(name="index x4", count=four, token_bytes=Fraction(key, 4)),
        "x128": Layers(name="compressed x128", count=wide, token_bytes=Fraction(entry, 128)),
    }
    kept = [
        (Layers(name="window", count=len(ratios), token_bytes=Fraction(entry), window=window), 64),
        # Two fp32 vectors (value and score), doubled where neighbours overlap, for both heads.
        (
            Layers(
                name="states x4",
                count=four,
                token_bytes=Fraction(4 * 4 * (head + index)),
                window=8,
            ),
            4,
        ),
        (
            Layers(name="states x128", count=wide, token_bytes=Fraction(2 * 4 * head), window=128),
            8,
        ),
    ]
    tables = {kind.name: _ceil(kind.count, tuples) for kind, _ in kept if kind.count}
    deep = max([full, *(_ceil(kind.count, tables[kind.name]) for kind, _ in kept if kind.count)])
    groups = [
        Group(layers=kind, tables=1, block_tokens=block) for kind in plain.values() if kind.count
    ]
    return Layout(
        attention="sparse MLA, compressed (DeepSeek V4)",
        groups=(
            groups[0],
            *(_free(group) for group in groups[1:]),
            *(
                Group(layers=kind, tables=tables[kind.name], block_tokens=tokens)
                for kind, tokens in kept
                if kind.count
            ),
        ),
        block_bytes=deep * sum(pages),
        replicated=True,
    )


def _free(group: Group) -> Group:
    """The same layers in a table that another group already counts."""
    return Group(layers=group.layers, tables=0, block_tokens=group.block_tokens)


def _group_size(counts: list[int]) -> int:
    """Layers a block holds: as many as the rarest kind, or the commonest when they are close."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _least_padding(counts: list[int], *, least: int) -> int:
    """The multiple that pads ``counts`` the least, the larger of equals."""
    return min(
        range(least, max(counts) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )


def _pad(size: int) -> int:
    return _ceil(size, 576) * 576


def _ceil(number: int | Fraction, by: int | Fraction) -> int:
    return int(-(-number // by))
