"""Launches paged attention, to keys and values of one size and to others: how a step is divided into tiles.

A sequence has long tiles, made for products, or one short tile, made for reading keys, if its query fits into that
(decode steps, mostly). A step that may have both launches both. The device plans which program computes what (see
`kernels/plan.py`): grids depend on the shapes of the tensors and on the meta's upper bounds alone, so a launch can be
captured in a CUDA graph.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from headrace_kernels.arguments import check_attention, check_uneven
from headrace_kernels.gpu.availability import interpreted, launches_early
from headrace_kernels.gpu.kernels import attend, ordered, plan
from headrace_kernels.gpu.tensors import FLOATS, halves, power_of_2, quantization, rows
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference

LOG2_E = 1.4426950408889634
CHUNK = 1024  # keys that deterministic attention sums before it merges them with the others
_LARGEST_HEAD = 512
_LARGEST_REST = 128  # by which a key is larger than a value
_LARGEST_GROUP = 64  # query heads per KV head: a tile holds a token with all of them
_SPLIT_KEYS = 128  # no piece of a split tile is shorter
_PIECES = 1056  # pieces of short tiles, wanted in a step: eight per multiprocessor of an H200, so late ones are short
_LONG_PIECES = 528
_MOST_PIECES = 64  # pieces of a tile, which one program merges
_PROGRAMS = 2048  # upper bound of a split grid of ordered attention: about 16 per multiprocessor of an H200
_PLANNED = 1024  # tiles that the planner's program handles at a time


@dataclass(frozen=True, slots=True)
class Tiles:
    """The constants of one launch."""

    rows: int  # BLOCK_M: query rows of a tile, padding included
    tokens: int  # tokens of a tile
    keys: int  # BLOCK_N
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The pieces of one step's tiles of one size, and where the softmax states of several pieces of a tile are kept."""

    pieces: Tensor  # [pieces, 8] int32
    counters: Tensor  # [tiles, K] int32
    mixed: Tensor  # [slots, K, rows, D] float32
    peaks: Tensor  # [slots, K, rows]
    totals: Tensor  # [slots, K, rows]


def paged_attention(
    query: Tensor,
    pool: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    check_attention(query, pool, meta, sinks, window)
    if not _fits(query, pool[0], pool[1], meta):
        return reference.paged_attention(
            query, pool, meta.gathered(pool.shape[3]), scale=scale, window=window, softcap=softcap, sinks=sinks,
            kv_scale=kv_scale, deterministic=deterministic,
        )  # fmt: skip
    launch = _Launch(query, *halves(pool, kv_scale), quantization(pool), meta, scale, window, softcap, sinks)
    return launch.run_ordered() if deterministic else launch.run()


def uneven_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    check_uneven(query, keys, values, meta, sinks, window)
    if not _fits(query, keys, values, meta) or quantization(keys):
        return reference.uneven_attention(
            query, keys, values, meta.gathered(keys.shape[2]), scale=scale, window=window, softcap=softcap, sinks=sinks,
            deterministic=deterministic,
        )  # fmt: skip
    launch = _Launch(query, keys, values, keys, values, 0, meta, scale, window, softcap, sinks)
    return launch.run_ordered() if deterministic else launch.run()


def _fits(query: Tensor, keys: Tensor, values: Tensor, meta: AttentionMeta) -> bool:
    known = query.dtype in FLOATS and (keys.dtype in FLOATS or quantization(keys) != 0) and values.dtype is keys.dtype
    size, rest = values.shape[3], keys.shape[3] - values.shape[3]
    small = size <= _LARGEST_HEAD and 0 <= rest <= (_LARGEST_REST if size <= 128 else 64)
    small = small and (keys.shape[1] == 1 or query.shape[1] // keys.shape[1] <= _LARGEST_GROUP)
    starts, lens = meta.query_starts, meta.seq_lens
    plain = keys.stride(-1) == values.stride(-1) == 1 and starts.is_contiguous() and lens.is_contiguous()
    plain = plain and (meta.table_rows is None or meta.table_rows.is_contiguous())
    return known and small and plain


class _Launch:
    """One call: the arguments that its kernels have in common."""

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        quant: int,
        meta: AttentionMeta,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        self.query, self.meta = rows(query), meta
        self.compute = _compute_dtype(query.dtype, keys.dtype, quant > 0)
        self.quant = _by_instructions(quant) if self.compute is tl.float16 else quant
        self.parts = keys, values, key_scales, value_scales
        self.tokens, self.heads, _ = query.shape
        self.head_dim = values.shape[3]
        self.rest = keys.shape[3] - self.head_dim
        self.kv_heads, self.block_size = keys.shape[1:3]
        (key_block, key_head, key_slot, _), (value_block, value_head, value_slot, _) = keys.stride(), values.stride()
        self.padded = max(16, power_of_2(self.head_dim))
        most = 16 if self.padded > 256 and _small_memory() else _LARGEST_GROUP
        if self.kv_heads == 1 and self.heads > most:  # in groups that a tile holds, which read the same keys
            self.kv_heads = next(n for n in range(2, self.heads + 1) if not self.heads % n and self.heads // n <= most)
            key_head = value_head = 0
        self.tables = rows(meta.block_tables)
        # Strides of a query token or head, table row, block, head and position, and of the scales of a block and head.
        self.strides = (
            self.query.stride(0), self.query.stride(1), self.tables.stride(0), key_block, key_head, key_slot,
            value_block, value_head, value_slot, *((key_scales.stride(0), key_scales.stride(1)) if quant else (0, 0)),
        )  # fmt: skip
        self.shared = quant == 0 and keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        self.group = self.heads // self.kv_heads
        self.sequences = meta.seq_lens.shape[0]
        self.window, self.sinks = window, sinks
        self.scale = scale / softcap if softcap else scale * LOG2_E
        self.softcap = softcap * LOG2_E
        self.table_rows = meta.table_rows
        if self.table_rows is None:
            self.table_rows = torch.arange(self.sequences, dtype=torch.int32, device=query.device)
        self.out = torch.empty(self.tokens, self.heads, self.head_dim, dtype=query.dtype, device=query.device)

    def run(self) -> Tensor:
        """By a plan that all layers of the step with tiles of these sizes share."""
        if self.tokens == 0 or self.sequences == 0:
            return self.out.zero_()
        short = _short_tiles(self)
        if self.meta.max_query_len > short.tokens:
            self._attend(_long_tiles(self), short.tokens, is_long=True, zero_tail=True)
            self._attend(short, short.tokens, is_long=False, zero_tail=False)
        else:
            self._attend(short, short.tokens, is_long=False, zero_tail=self._covers_padding(short))
        return self.out

    def run_ordered(self) -> Tensor:
        """With the same operations in the same order for a row, whatever else is in the step."""
        if self.tokens == 0 or self.sequences == 0:
            return self.out.zero_()
        short = _ordered_tiles(self, 1)
        alone = self.meta.max_query_len <= short.tokens  # no sequence has long tiles
        if not alone:
            tiles = _ordered_tiles(self, 0)
            grid = (-(-self.tokens // tiles.tokens) + self.sequences, self.kv_heads, 1)
            self._attend_ordered(grid, tiles, short.tokens, 1, self._parts(0, 1), split=False, zero_tail=True)
        splits = self._splits(short)
        programs = max(1, _PROGRAMS // (self.sequences * self.kv_heads))
        grid = (self.sequences, self.kv_heads, min(splits, programs))
        parts = self._parts(short.tokens * self.group, splits)
        zero_tail = alone and self._covers_padding(short)
        self._attend_ordered(grid, short, short.tokens, splits, parts, split=True, zero_tail=zero_tail)
        if splits > 1:
            ordered.merge_ordered[(self.sequences, self.kv_heads, short.tokens * self.group)](
                self.out, *parts, self._sinks(), self.meta.query_starts, self.meta.seq_lens, self.window, splits,
                HEADS=self.heads, GROUP=self.group, HEAD_DIM=self.head_dim, D_PAD=self.padded, TILE_TOKENS=short.tokens,
                CHUNK=CHUNK, HAS_WINDOW=self.window > 0, HAS_SINKS=self.sinks is not None, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
        return self.out

    def _covers_padding(self, short: Tiles) -> bool:
        """Whether the programs of short tiles zero all of the padding. If they do not, the output is zeroed here."""
        covers = self.tokens <= self.sequences * short.tokens
        if not covers:
            self.out.zero_()
        return covers

    def _plan(self, tiles: Tiles, short: int, is_long: bool) -> AttentionPlan:
        key = tiles, short, is_long, self.window, self.kv_heads, self.head_dim
        found: AttentionPlan | None = self.meta.plans.get(key)
        if found is not None:
            return found
        target = max(1, (_LONG_PIECES if is_long else _PIECES) // self.kv_heads)
        count = (self.tokens // tiles.tokens if is_long else 0) + self.sequences

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.out.device)

        states = 2 * target, self.kv_heads, tiles.rows
        made = AttentionPlan(
            new(count + target, 8, dtype=torch.int32), new(count, self.kv_heads, dtype=torch.int32),
            new(*states, self.head_dim), new(*states), new(*states),
        )  # fmt: skip
        plan.plan[(1,)](
            made.pieces, made.counters, self.meta.query_starts, self.meta.seq_lens, count, self.sequences, self.window,
            target, count + target, TILE_TOKENS=tiles.tokens, BLOCK_N=tiles.keys,
            MIN_TILES=max(1, _SPLIT_KEYS // tiles.keys), MOST=_MOST_PIECES, SHORT=short, LONG=is_long,
            HAS_WINDOW=self.window > 0, KV_HEADS=self.kv_heads, BLOCK=_PLANNED, num_warps=8,
        )  # fmt: skip
        self.meta.plans[key] = made
        return made

    def _attend(self, tiles: Tiles, short: int, *, is_long: bool, zero_tail: bool) -> None:
        meta, planned = self.meta, self._plan(tiles, short, is_long)
        attend.attend[(planned.pieces.shape[0], self.kv_heads)](
            self.out, planned.pieces, planned.counters, planned.mixed, planned.peaks, planned.totals, self.query,
            *self.parts, self._sinks(),
            meta.query_starts, meta.seq_lens, self.tables, self.table_rows, self.scale, self.softcap, self.window,
            self.sequences, self.tokens, *self.strides,
            HEADS=self.heads, GROUP=self.group, HEAD_DIM=self.head_dim, D_PAD=self.padded, REST=self.rest,
            REST_PAD=max(16, power_of_2(self.rest)), SHARED=self.shared, BLOCK_SIZE=self.block_size,
            TILE_TOKENS=tiles.tokens, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, ZERO_TAIL=zero_tail,
            HAS_WINDOW=self.window > 0, HAS_SOFTCAP=self.softcap > 0, HAS_SINKS=self.sinks is not None,
            QUANT=self.quant, COMPUTE=self.compute, PRECISION="ieee", num_warps=tiles.warps,
            MOST=_MOST_PIECES, EARLY=launches_early(), num_stages=tiles.stages, launch_pdl=launches_early(),
        )  # fmt: skip

    def _splits(self, tiles: Tiles) -> int:
        """Upper bound of the chunks of a sequence; the device derives the actual number from its length."""
        longest = min(self.tables.shape[1] * self.block_size, self.meta.max_seq_len)
        if self.window and self.window + tiles.tokens + CHUNK < longest:
            longest = self.window + tiles.tokens + CHUNK  # it may begin inside a chunk
        return max(1, -(-longest // CHUNK))

    def _parts(self, tile_rows: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax states of chunks: mixed values [S, K, rows, splits, D], peaks and totals [S, K, rows, splits]."""
        shape = (self.sequences, self.kv_heads, tile_rows, splits) if splits > 1 else (1,)
        # Allocated one by one, and even if unread: Triton recompiles for other dtypes and alignments.
        mixed, peaks, totals = (
            torch.empty(size, dtype=torch.float32, device=self.out.device)
            for size in ((*shape, self.head_dim), shape, shape)
        )
        return mixed, peaks, totals

    def _attend_ordered(
        self,
        grid: tuple[int, int, int],
        tiles: Tiles,
        short: int,
        splits: int,
        parts: tuple[Tensor, Tensor, Tensor],
        *,
        split: bool,
        zero_tail: bool,
    ) -> None:
        meta = self.meta
        ordered.attend_ordered[grid](
            self.out, *parts, self.query, *self.parts, self._sinks(),
            meta.query_starts, meta.seq_lens, self.tables, self.table_rows, self.scale, self.softcap, self.window,
            self.sequences, self.tokens, splits, *self.strides,
            HEADS=self.heads, GROUP=self.group, HEAD_DIM=self.head_dim, D_PAD=self.padded, REST=self.rest,
            REST_PAD=max(16, power_of_2(self.rest)), SHARED=self.shared, BLOCK_SIZE=self.block_size,
            TILE_TOKENS=tiles.tokens, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
            CHUNK=CHUNK, SHORT=short, SPLIT=split, ZERO_TAIL=zero_tail, HAS_WINDOW=self.window > 0,
            HAS_SOFTCAP=self.softcap > 0, HAS_SINKS=self.sinks is not None, QUANT=self.quant,
            COMPUTE=self.compute, PRECISION="ieee", num_warps=tiles.warps, num_stages=tiles.stages,
            enable_fp_fusion=False,
        )  # fmt: skip

    def _sinks(self) -> Tensor:
        return self.out if self.sinks is None else self.sinks.contiguous()


@functools.cache
def _small_memory() -> bool:
    """Whether a program has some 100 KB of shared memory (compute capability 8.6 and 8.9), and not 160 and more."""
    if not torch.cuda.is_available():
        return False
    properties: Any = torch.cuda.get_device_properties(0)
    return int(properties.shared_memory_per_block_optin) < 150 << 10


@functools.cache
def _by_instructions(quant: int) -> int:
    """The kernels' code for a format whose numbers the device converts itself."""
    if quant == 0 or interpreted():
        return quant
    if quant == 1:
        return 4
    return 3 if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9) else quant


def _compute_dtype(query: torch.dtype, pool: torch.dtype, of_8_bits: bool) -> object:
    """The operands' dtype of the products: the query's, float32 if the pool has another floating dtype, and float16,
    which has all of their values, if it has 8 bits.
    """
    if query is torch.float32 or (pool in FLOATS and pool is not query):
        return tl.float32
    if of_8_bits:
        return tl.float16
    if query is torch.bfloat16:
        # The interpreter multiplies bfloat16 as if it were integers.
        return tl.float32 if interpreted() else tl.bfloat16
    return tl.float16


def _tiles(launch: _Launch, wanted_rows: int, keys: int, warps: int, stages: int) -> Tiles:
    tile_rows = max(wanted_rows, power_of_2(launch.group))
    return Tiles(tile_rows, tile_rows // launch.group, keys, warps, stages)


def _short_tiles(launch: _Launch) -> Tiles:
    """Decode reads each key once: the smallest tile of a matrix unit, and enough keys in flight."""
    if launch.compute is tl.float32:
        return _exact_tiles(launch)
    if launch.padded > 256:
        return _tiles(launch, 16, 32, 8, 2)
    if launch.padded > 128:
        return _tiles(launch, 16, 64, 8, 2)
    return _tiles(launch, 16, 128 if launch.quant else 64, 4, 3)


def _long_tiles(launch: _Launch) -> Tiles:
    """Prefill is bound by multiplications.

    The fastest of 24 shapes on an H200 with heads of 128, and of 16 with heads of 256: 10 to 14 % and 17 to 22 % faster
    than what was estimated.
    """
    if launch.compute is tl.float32:
        return _exact_tiles(launch)
    if launch.padded > 256:
        return _tiles(launch, 16 if _small_memory() else 64, 32, 8, 2)
    return _tiles(launch, 64, 64, 4, 2) if launch.padded <= 128 else _tiles(launch, 128, 64, 8, 2)


def _ordered_tiles(launch: _Launch, tokens: int) -> Tiles:
    """One shape for prefill and decode, whose tiles hold one token: both do the same operations in the same order."""
    if launch.compute is tl.float32:
        tiles = _exact_tiles(launch)
    elif launch.padded > 256:
        tiles = _tiles(launch, 16 if _small_memory() else 64, 32, 8, 2)
    else:
        wide = launch.padded > 128
        tiles = _tiles(launch, 64, 32 if wide else 64, 8 if wide or launch.quant else 4, 3)
    return Tiles(tiles.rows, tokens or tiles.tokens, tiles.keys, tiles.warps, tiles.stages)


def _exact_tiles(launch: _Launch) -> Tiles:
    """float32 is multiplied without matrix units: what fits into registers."""
    wide = launch.padded > 128
    return _tiles(launch, 16, 16 if wide else 32, 8, 2)
