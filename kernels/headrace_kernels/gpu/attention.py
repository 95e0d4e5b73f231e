"""Launches paged attention: how a step is divided into tiles, and which kernels run.

Short queries (decode steps, mostly) use the kernel that splits the keys, the others the one that iterates over them; a
mixed step launches both, and each program checks on the device whether its sequence is of its kind. The grids depend on
the shapes of the tensors and on the meta's two upper bounds alone, so a launch can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from headrace_kernels.arguments import check_attention
from headrace_kernels.gpu.availability import interpreted
from headrace_kernels.gpu.kernels import attention as kernels
from headrace_kernels.gpu.kernels import merge
from headrace_kernels.gpu.tensors import FLOATS, halves, power_of_2, quantization, rows
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference

LOG2_E = 1.4426950408889634
CHUNK = 1024  # keys that deterministic attention sums before it merges them with the others
_LARGEST_HEAD = 256
_LARGEST_GROUP = 64  # query heads per KV head: a tile holds a token with all of them
_SPLIT_KEYS = 128  # no piece of a split sequence is shorter
_MAX_SPLITS = 64
_PROGRAMS = 2048  # upper bound of a split grid: about 16 per multiprocessor of an H200


@dataclass(frozen=True, slots=True)
class Tiles:
    """The constants of one launch."""

    rows: int  # BLOCK_M: query rows of a tile, padding included
    tokens: int  # of a tile
    keys: int  # BLOCK_N
    warps: int
    stages: int


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
    """See ``headrace_kernels.ops.paged_attention``."""
    check_attention(query, pool, meta, sinks, window)
    if not _fits(query, pool, meta):
        return reference.paged_attention(
            query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scale=kv_scale,
            deterministic=deterministic,
        )  # fmt: skip
    return _Launch(query, pool, meta, scale, window, softcap, sinks, kv_scale, deterministic).run()


def _fits(query: Tensor, pool: Tensor, meta: AttentionMeta) -> bool:
    known = query.dtype in FLOATS and (pool.dtype in FLOATS or quantization(pool) != 0)
    small = query.shape[2] <= _LARGEST_HEAD and query.shape[1] // pool.shape[2] <= _LARGEST_GROUP
    plain = pool.stride(-1) == 1 and meta.query_starts.is_contiguous() and meta.seq_lens.is_contiguous()
    return known and small and plain


class _Launch:
    """One call: the arguments that its kernels have in common."""

    def __init__(
        self,
        query: Tensor,
        pool: Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        kv_scale: Tensor | None,
        ordered: bool,
    ) -> None:
        self.query, self.pool, self.meta, self.kv_scale = rows(query), pool, meta, kv_scale
        self.tokens, self.heads, self.head_dim = query.shape
        self.kv_heads, self.block_size = pool.shape[2:4]
        self.group = self.heads // self.kv_heads
        self.sequences = meta.seq_lens.shape[0]
        self.window, self.ordered, self.sinks = window, ordered, sinks
        self.scale = scale / softcap if softcap else scale * LOG2_E
        self.softcap = softcap * LOG2_E
        self.tables = rows(meta.block_tables)
        self.padded = max(16, power_of_2(self.head_dim))
        self.compute = _compute_dtype(query.dtype, pool.dtype)
        self.out = torch.empty(query.shape, dtype=query.dtype, device=query.device)

    def run(self) -> Tensor:
        if self.tokens == 0 or self.sequences == 0:
            return self.out.zero_()
        short = _ordered_tiles(self, 1) if self.ordered else _split_tiles(self)
        alone = self.meta.max_query_len <= short.tokens  # no sequence is for the other kernel
        if alone and self.tokens > self.sequences * short.tokens:
            self.out.zero_()  # more padding than the programs of the split grid cover
        if not alone:
            tiles = _ordered_tiles(self, 0) if self.ordered else _loop_tiles(self)
            grid = (-(-self.tokens // tiles.tokens) + self.sequences, self.kv_heads, 1)
            self._attend(grid, tiles, short.tokens, 1, self._parts(0, 1), split=False, zero_tail=True)
        splits = self._splits(short)
        programs = max(1, _PROGRAMS // (self.sequences * self.kv_heads))
        grid = (self.sequences, self.kv_heads, min(splits, programs))
        parts = self._parts(short.tokens * self.group, splits)
        self._attend(grid, short, short.tokens, splits, parts, split=True, zero_tail=alone)
        if splits > 1:
            self._merge(short, splits, parts)
        return self.out

    def _splits(self, tiles: Tiles) -> int:
        """Upper bound of the pieces of a sequence; the device derives the actual number from its length."""
        longest = min(self.tables.shape[1] * self.block_size, self.meta.max_seq_len)
        piece = CHUNK if self.ordered else max(_SPLIT_KEYS, tiles.keys)
        if self.window and self.window + tiles.tokens + piece < longest:
            longest = self.window + tiles.tokens + piece  # it may begin inside a piece
        pieces = max(1, -(-longest // piece))
        if self.ordered:
            return pieces
        return min(pieces, _MAX_SPLITS, max(1, _PROGRAMS // (self.sequences * self.kv_heads)))

    def _parts(self, tile_rows: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax states of pieces: mixed values [S, K, rows, splits, D], peaks and totals [S, K, rows, splits]."""
        shape = (self.sequences, self.kv_heads, tile_rows, splits) if splits > 1 else (1,)
        # Allocated one by one, and even if unread: Triton recompiles for other dtypes and alignments.
        mixed, peaks, totals = (
            torch.empty(size, dtype=torch.float32, device=self.out.device)
            for size in ((*shape, self.head_dim), shape, shape)
        )
        return mixed, peaks, totals

    def _attend(
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
        meta, pool = self.meta, self.pool
        kernels.attend[grid](
            self.out, *parts, self.query, *halves(pool, self.kv_scale), self._sinks(),
            meta.query_starts, meta.seq_lens, self.tables, self.scale, self.softcap, self.window,
            self.sequences, self.tokens, splits, self.query.stride(0), self.query.stride(1), self.tables.stride(0),
            pool.stride(1), pool.stride(2), pool.stride(3), 0 if self.kv_scale is None else self.kv_scale.stride(1),
            HEADS=self.heads, GROUP=self.group, HEAD_DIM=self.head_dim, D_PAD=self.padded, BLOCK_SIZE=self.block_size,
            TILE_TOKENS=tiles.tokens, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
            MIN_TILES=max(1, _SPLIT_KEYS // tiles.keys), CHUNK=CHUNK, SHORT=short, SPLIT=split, ORDERED=self.ordered,
            ZERO_TAIL=zero_tail, HAS_WINDOW=self.window > 0, HAS_SOFTCAP=self.softcap > 0,
            HAS_SINKS=self.sinks is not None, QUANT=quantization(pool), COMPUTE=self.compute,
            PRECISION="ieee", num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=not self.ordered,
        )  # fmt: skip

    def _merge(self, tiles: Tiles, splits: int, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        merge.merge[(self.sequences, self.kv_heads, tiles.tokens * self.group)](
            self.out, *parts, self._sinks(), self.meta.query_starts, self.meta.seq_lens, self.window, splits,
            HEADS=self.heads, GROUP=self.group, HEAD_DIM=self.head_dim, D_PAD=self.padded, TILE_TOKENS=tiles.tokens,
            BLOCK_N=tiles.keys, MIN_TILES=max(1, _SPLIT_KEYS // tiles.keys), CHUNK=CHUNK,
            SPLITS_PAD=16 if splits <= 16 else _MAX_SPLITS, ORDERED=self.ordered, HAS_WINDOW=self.window > 0,
            HAS_SINKS=self.sinks is not None, num_warps=4, enable_fp_fusion=not self.ordered,
        )  # fmt: skip

    def _sinks(self) -> Tensor:
        return self.out if self.sinks is None else self.sinks.contiguous()


def _compute_dtype(query: torch.dtype, pool: torch.dtype) -> object:
    """The operands' dtype of the products: the query's, or float32 if the pool has another floating dtype."""
    if query is torch.float32 or (pool in FLOATS and pool is not query):
        return tl.float32
    if query is torch.bfloat16:
        # The interpreter multiplies bfloat16 as if it were integers.
        return tl.float32 if interpreted() else tl.bfloat16
    return tl.float16


def _tiles(launch: _Launch, wanted_rows: int, keys: int, warps: int, stages: int) -> Tiles:
    tile_rows = max(wanted_rows, power_of_2(launch.group))
    return Tiles(tile_rows, tile_rows // launch.group, keys, warps, stages)


def _split_tiles(launch: _Launch) -> Tiles:
    """Decode reads each key once: the smallest tile of a matrix unit, and enough keys in flight."""
    if launch.compute is tl.float32:
        return _exact_tiles(launch)
    if launch.padded > 128:
        return _tiles(launch, 16, 64, 8, 2)
    return _tiles(launch, 16, 64, 8 if quantization(launch.pool) else 4, 3)


def _loop_tiles(launch: _Launch) -> Tiles:
    """Prefill is bound by multiplications.

    The fastest of 24 shapes on an H200 with heads of 128, and of 16 with heads of 256: 10 to 14 % and 17 to 22 % faster
    than what was estimated.
    """
    if launch.compute is tl.float32:
        return _exact_tiles(launch)
    return _tiles(launch, 64, 64, 4, 2) if launch.padded <= 128 else _tiles(launch, 128, 64, 8, 2)


def _ordered_tiles(launch: _Launch, tokens: int) -> Tiles:
    """One shape for prefill and decode, whose tiles hold one token: both do the same operations in the same order."""
    if launch.compute is tl.float32:
        tiles = _exact_tiles(launch)
    else:
        wide = launch.padded > 128
        tiles = _tiles(launch, 64, 32 if wide else 64, 8 if wide or quantization(launch.pool) else 4, 3)
    return Tiles(tiles.rows, tokens or tiles.tokens, tiles.keys, tiles.warps, tiles.stages)


def _exact_tiles(launch: _Launch) -> Tiles:
    """float32 is multiplied without matrix units: what fits into registers."""
    wide = launch.padded > 128
    return _tiles(launch, 16, 16 if wide else 32, 8, 2)
