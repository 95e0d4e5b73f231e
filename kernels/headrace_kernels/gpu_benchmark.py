"""Times of the Triton ops on a GPU beside the same work in torch's libraries: the GPU part of ``benchmark``.

Shapes are Llama-3.1-8B's in bfloat16. Every run is recorded in a CUDA graph over several copies of its inputs, more
than fit into the L2 cache, so a figure is the device's time alone and all bytes are read from memory. On a CPU the
same calls run small, in float32, without a graph: to test them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels import catalog, ops
from headrace_kernels.invariant import InvariantLinear
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.rounded import GROUP, products_of, scaled_weight

HEADS, KV_HEADS, HEAD_DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
_BEYOND_L2 = 256 << 20
_SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: device seconds, and the bytes it must read and write, and operations it must compute."""

    case: str
    backend: str
    seconds: float
    bytes: int
    flop: int = 0

    def __str__(self) -> str:
        rates = f"{self.bytes / self.seconds / 1e9:.0f} GB/s"
        if self.flop:
            rates += f", {self.flop / self.seconds / 1e12:.1f} TFLOP/s"
        return f"{self.case}, {self.backend}: {self.seconds * 1e6:.1f} us ({rates})"


class GpuBenchmark:
    """All cases, on one device."""

    def __init__(self, device: str = "cuda", small: bool = False) -> None:
        """small: one short case of each."""
        self._device = device
        self._on_gpu = device == "cuda"
        self._small = small
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._backend = catalog.PAGED_ATTENTION.chosen(device)

    def decode(self) -> Iterator[Timing]:
        """One query per sequence: in each format and mode; torch's attention reads the same keys contiguously."""
        cases: Sequence[tuple[int, int]] = (
            (1, 1024), (1, 8192), (16, 16384), (32, 1024), (32, 8192), (68, 8192), (256, 1024),
        )  # fmt: skip
        for sequences, seq_len in ((2, 64),) if self._small else cases:
            case = f"decode {sequences} at {seq_len}"
            meta = self._meta([seq_len] * sequences, 1)
            flop = 4 * HEADS * HEAD_DIM * sequences * seq_len
            query = self._random(sequences, HEADS, HEAD_DIM)
            for name, dtype in self._formats():
                scales = 4 * (dtype.itemsize == 1)
                size = 2 * sequences * seq_len * KV_HEADS * (HEAD_DIM * dtype.itemsize + scales)
                pools = [self._pool(meta.block_tables.numel(), dtype) for _ in range(self._copies(size))]
                for mode in ("", ", deterministic") if self._on_gpu else ("",):
                    took = self._attend(query, pools, meta, mode != "")
                    yield Timing(f"{case}, {name}{mode}", self._backend, took, size, flop)
            size = 2 * sequences * seq_len * KV_HEADS * HEAD_DIM * self._dtype.itemsize
            pairs = [self._random(2, sequences, KV_HEADS, seq_len, HEAD_DIM) for _ in range(self._copies(size))]
            took = self._library(query.view(sequences, HEADS, 1, HEAD_DIM), pairs, causal=False)
            yield Timing(f"{case}, {self._formats()[0][0]}", "library", took, size, flop)
        lengths = [64, 300] if self._small else [512] * 255 + [32768]
        meta = self._meta(lengths, 1)
        flop, size = 4 * HEADS * HEAD_DIM * sum(lengths), 2 * sum(lengths) * KV_HEADS * HEAD_DIM * self._dtype.itemsize
        pools = [self._pool(sum(-(-length // BLOCK) for length in lengths), self._dtype)]
        took = self._attend(self._random(len(lengths), HEADS, HEAD_DIM), pools, meta, deterministic=False)
        yield Timing(
            f"decode {len(lengths) - 1} at {lengths[0]}, one at {lengths[-1]}", self._backend, took, size, flop
        )

    def prefill(self) -> Iterator[Timing]:
        """Chunks of a prompt; torch's attention where the chunk is the whole prompt."""
        cases: Sequence[tuple[int, int, int]] = (
            (1, 2048, 2048), (4, 2048, 2048), (1, 2048, 8192), (8, 128, 1024), (1, 300, 8192), (1, 16, 16384),
        )  # fmt: skip
        for sequences, query_len, seq_len in ((1, 32, 32),) if self._small else cases:
            case = f"prefill {sequences} x {query_len} at {seq_len}"
            meta = self._meta([seq_len] * sequences, query_len)
            keys = 2 * sequences * seq_len * KV_HEADS * HEAD_DIM * self._dtype.itemsize
            pools = [self._pool(meta.block_tables.numel(), self._dtype) for _ in range(self._copies(keys))]
            query = self._random(sequences * query_len, HEADS, HEAD_DIM)
            flop = int(4 * HEADS * HEAD_DIM * sequences * query_len * (seq_len - query_len / 2))
            size = 2 * query.nbytes + 2 * sequences * seq_len * KV_HEADS * HEAD_DIM * self._dtype.itemsize
            for mode in ("", ", deterministic") if self._on_gpu else ("",):
                yield Timing(f"{case}{mode}", self._backend, self._attend(query, pools, meta, mode != ""), size, flop)
            if query_len == seq_len:
                q = self._random(sequences, HEADS, query_len, HEAD_DIM)
                took = self._library(q, [self._random(2, sequences, KV_HEADS, seq_len, HEAD_DIM)], causal=True)
                yield Timing(case, "library", took, size, flop)

    def rows(self) -> Iterator[Timing]:
        """Row ops, as bytes read and written."""
        for count in (2,) if self._small else (1, 32, 256, 4096):
            x, weight = self._random(count, HIDDEN), self._random(HIDDEN)
            gate_up = self._random(count, 2 * INNER)
            heads = self._random(count, HEADS + 2 * KV_HEADS, HEAD_DIM)
            query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)  # type: ignore[no-untyped-call]
            cos = self._random(count, HEAD_DIM)
            slots = torch.arange(count, device=self._device)
            pool, _ = self._pool(-(-count // BLOCK), self._dtype)
            yield from self._op(count, "rms_norm", 2 * x.nbytes, x, weight, 1e-5)
            took = self._layers([partial(functional.rms_norm, x, (HIDDEN,), weight, 1e-5)] * 16)
            yield Timing(f"rms_norm rows {count}", "library", took, 2 * x.nbytes)
            yield from self._op(count, "add_rms_norm", 4 * x.nbytes, x, x, weight, 1e-5)
            yield from self._op(count, "silu_mul", gate_up.nbytes * 3 // 2, gate_up)
            for groups in (False, True):
                yield from self._op(count, "rounded_rms_norm", 4 * x.nbytes, x, x, weight, 1e-5, groups)
                yield from self._op(count, "rounded_silu_mul", gate_up.nbytes * 5 // 4, gate_up, groups)
            yield from self._op(count, "rope_write_kv", 2 * heads.nbytes, query, key, value, cos, cos, pool, slots)
        for count in (2,) if self._small else (1, 32, 256):
            scores = torch.randn(count, VOCAB, device=self._device) * 3
            yield from self._op(count, "row_logsumexp", scores.nbytes, scores)

    def products(self) -> Iterator[Timing]:
        """The linear layers of a step: torch's library, and the one of ``--deterministic``."""
        outputs = {"qkv": (HEADS + 2 * KV_HEADS) * HEAD_DIM, "gate and up": 2 * INNER, "head": VOCAB}
        for name, out in {"qkv": 256}.items() if self._small else outputs.items():
            size = out * HIDDEN * self._dtype.itemsize
            weights = [self._random(out, HIDDEN) for _ in range(self._copies(size))]
            invariant = [InvariantLinear(weight) for weight in weights]
            for count in (1, 2) if self._small else (1, 8, 32, 64, 256, 2048):
                x = self._random(count, HIDDEN)
                case, flop = f"{name} rows {count}", 2 * count * out * HIDDEN
                moved = size + x.nbytes + count * out * self._dtype.itemsize
                yield Timing(
                    case, "library", self._layers([partial(functional.linear, x, w) for w in weights]), moved, flop
                )
                yield Timing(
                    case, "deterministic", self._layers([partial(layer, x) for layer in invariant]), moved, flop
                )

    def products_of_8_bits(self) -> Iterator[Timing]:
        """The linear layers of a step in e4m3, rounded inputs given, where the device has such products."""
        supported = products_of(torch.device(self._device))
        sizes = {"qkv": (256, 256)} if self._small else {"gate and up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        for (name, (out, size)), blocks in product(sizes.items(), (False, True)):
            if not (self._small or (supported.blocks if blocks else supported.outputs)):
                continue
            scale = torch.rand(out // GROUP, size // GROUP if blocks else 1, device=self._device) / size
            weights = []
            for _ in range(self._copies(out * size)):
                codes = self._random(out, size).to(torch.float8_e4m3fn).view(torch.uint8)
                weights.append(scaled_weight(codes, scale.repeat_interleave(GROUP, 0)))
            for count in (2,) if self._small else (1, 8, 32, 64, 256, 2048):
                x = ops.round_rows(self._random(count, size), blocks)
                runs = [partial(ops.scaled_matmul, x, w, None, self._dtype) for w in weights if w is not None]
                moved = out * size + x.codes.nbytes + count * out * self._dtype.itemsize
                case = f"{name} rows {count}, e4m3 {'in blocks' if blocks else 'by output'}"
                yield Timing(case, "library", self._layers(runs), moved, 2 * count * out * size)

    def seconds(self, run: Callable[..., object], *arguments: Any) -> float:
        """The seconds of one call, on the device alone."""
        return self._layers([partial(run, *arguments)] * 16)

    def _op(self, count: int, name: str, size: int, *arguments: Any) -> Iterator[Timing]:
        op = next(op for op in catalog.ALL if op.name == name)
        # The reference's store waits for the device, which a graph cannot.
        references = () if name == "rope_write_kv" else ("torch",)
        for backend in dict.fromkeys((op.chosen(self._device), *references)):
            took = self._layers([partial(op.named(backend), *arguments)] * 16)
            yield Timing(f"{name} rows {count}", backend, took, size)

    def _attend(
        self, query: Tensor, pools: list[tuple[Tensor, Tensor | None]], meta: AttentionMeta, deterministic: bool
    ) -> float:
        attend = catalog.PAGED_ATTENTION.named(self._backend)

        def run(copy: int) -> Tensor:
            pool, scales = pools[copy % len(pools)]
            return attend(query, pool, meta, scale=_SCALE, kv_scale=scales, deterministic=deterministic)

        return self._seconds(run, max(4, len(pools)))

    def _library(self, query: Tensor, pairs: list[Tensor], causal: bool) -> float:
        def run(copy: int) -> Tensor:
            key, value = pairs[copy % len(pairs)]
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

        return self._seconds(run, max(4, len(pairs)))

    def _layers(self, runs: Sequence[Callable[[], object]]) -> float:
        return self._seconds(lambda copy: runs[copy](), len(runs))

    def _seconds(self, run: Callable[[int], object], copies: int) -> float:
        """The seconds of one ``run(copy)``: the fastest of ten rounds that run each copy once."""

        def each() -> None:
            for copy in range(copies):
                run(copy)

        each()
        if not self._on_gpu:
            began = time.perf_counter()
            each()
            return (time.perf_counter() - began) / copies
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            each()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        times = []
        for _ in range(10):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3 / copies)
        return min(times)

    def _copies(self, size: int) -> int:
        return max(1, min(64, -(-_BEYOND_L2 // size))) if self._on_gpu else 1

    def _formats(self) -> list[tuple[str, torch.dtype]]:
        own = str(self._dtype).removeprefix("torch.")
        return [(own, self._dtype), ("float8", torch.float8_e4m3fn), ("int8", torch.int8)][: 3 if self._on_gpu else 1]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _pool(self, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        shape = (2, blocks, KV_HEADS, BLOCK, HEAD_DIM)
        if dtype is self._dtype:
            return self._random(*shape), None
        numbers = torch.randint(0, 100, shape, dtype=torch.uint8, device=self._device).view(dtype)
        return numbers, torch.full(shape[:4], 0.01, device=self._device)

    def _meta(self, lengths: list[int], query_len: int) -> AttentionMeta:
        """A plan that is made for the first layer is for all, as in a step: it is not in the figures."""
        blocks = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(blocks), dtype=torch.int32)
        tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        used = 0
        for row, count in zip(tables, blocks, strict=True):
            row[:count] = order[used : used + count]
            used += count
        return AttentionMeta(
            query_starts=(torch.arange(len(lengths) + 1) * query_len).int().to(self._device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self._device),
            block_tables=tables.to(self._device),
            slots=torch.empty(0, dtype=torch.int64, device=self._device),
            max_query_len=query_len,
            max_seq_len=max(lengths),
            table_rows=torch.arange(len(lengths), dtype=torch.int32, device=self._device),
        )
