"""Times of the Triton ops on a GPU, compared with torch: the GPU part of ``python -m headrace_kernels.benchmark``.

Shapes are Llama-3.1-8B's in bfloat16. Every run is recorded in a CUDA graph over several copies of its inputs, more
than fit into the L2 cache, so a figure is the device's time alone and all bytes are read from memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels import catalog
from headrace_kernels.meta import AttentionMeta

HEADS, KV_HEADS, HEAD_DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
_BEYOND_L2 = 256 << 20
_DTYPE = torch.bfloat16


def seconds(run: Callable[[int], object], copies: int) -> float:
    """Device seconds of one ``run(copy)``: the fastest of ten replays of a graph that runs each copy once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for copy in range(copies):
            run(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            run(copy)
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


def _copies(size: int) -> int:
    return max(1, min(64, -(-_BEYOND_L2 // size)))


def _meta(sequences: int, query_len: int, seq_len: int) -> AttentionMeta:
    blocks = -(-seq_len // BLOCK)
    return AttentionMeta(
        query_starts=(torch.arange(sequences + 1) * query_len).int().cuda(),
        seq_lens=torch.full((sequences,), seq_len, dtype=torch.int32, device="cuda"),
        block_tables=torch.randperm(sequences * blocks).view(sequences, blocks).int().cuda(),
        slots=torch.empty(0, dtype=torch.int64, device="cuda"),
        max_query_len=query_len,
        max_seq_len=seq_len,
    )


def decode() -> None:
    """One query per sequence: bytes of keys and values per second, in each format and mode."""
    attend = catalog.PAGED_ATTENTION.named("triton")
    for sequences, seq_len in ((1, 1024), (1, 8192), (32, 1024), (32, 8192), (256, 1024)):
        meta = _meta(sequences, 1, seq_len)
        blocks = meta.block_tables.numel()
        for name, dtype in (("bf16", _DTYPE), ("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
            size = 2 * sequences * seq_len * KV_HEADS * (HEAD_DIM * dtype.itemsize + 4 * (dtype.itemsize == 1))
            count = _copies(size)
            pools = [_pool(blocks, dtype) for _ in range(count)]
            query = torch.randn(sequences, HEADS, HEAD_DIM, dtype=_DTYPE, device="cuda")
            for mode in (False, True):

                def run(copy: int, mode: bool = mode) -> Tensor:
                    pool, scale = pools[copy]  # noqa: B023
                    return attend(query, pool, meta, scale=0.088, kv_scale=scale, deterministic=mode)  # noqa: B023

                took = seconds(run, count)
                kind = ", deterministic" if mode else ""
                print(
                    f"decode {sequences} at {seq_len} {name}{kind}: {took * 1e6:.0f} us, {size / took / 1e9:.0f} GB/s"
                )


def _pool(blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    shape = (2, blocks, KV_HEADS, BLOCK, HEAD_DIM)
    if dtype is _DTYPE:
        return torch.randn(shape, dtype=dtype, device="cuda"), None
    numbers = torch.randint(0, 100, shape, dtype=torch.uint8, device="cuda").view(dtype)
    return numbers, torch.full(shape[:4], 0.01, device="cuda")


def prefill() -> None:
    """Chunks of a prompt: TFLOP/s, compared with torch's attention over contiguous keys."""
    attend = catalog.PAGED_ATTENTION.named("triton")
    for sequences, query_len, seq_len in ((1, 2048, 2048), (4, 2048, 2048), (1, 2048, 8192), (8, 128, 1024)):
        meta = _meta(sequences, query_len, seq_len)
        pool, _ = _pool(meta.block_tables.numel(), _DTYPE)
        query = torch.randn(sequences * query_len, HEADS, HEAD_DIM, dtype=_DTYPE, device="cuda")
        flops = 4 * HEADS * HEAD_DIM * sequences * query_len * (seq_len - query_len / 2)
        line = []
        for mode in (False, True):
            took = seconds(lambda _, mode=mode: attend(query, pool, meta, scale=0.088, deterministic=mode), 4)  # type: ignore[misc] # noqa: B023
            line.append(
                f"{'deterministic' if mode else 'triton'} {took * 1e6:.0f} us ({flops / took / 1e12:.0f} TFLOP/s)"
            )
        if query_len == seq_len:
            q = torch.randn(sequences, HEADS, query_len, HEAD_DIM, dtype=_DTYPE, device="cuda")
            k, v = torch.randn(2, sequences, KV_HEADS, seq_len, HEAD_DIM, dtype=_DTYPE, device="cuda")
            took = seconds(
                lambda _: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),  # noqa: B023
                4,
            )
            line.append(f"torch {took * 1e6:.0f} us ({flops / took / 1e12:.0f} TFLOP/s)")
        print(f"prefill {sequences} x {query_len} at {seq_len}: {', '.join(line)}")


def rows() -> None:
    """Row ops: bytes read and written per second."""
    for count in (1, 32, 256, 4096):
        x, weight = (
            torch.randn(count, HIDDEN, dtype=_DTYPE, device="cuda"),
            torch.ones(HIDDEN, device="cuda").to(_DTYPE),
        )
        gate_up = torch.randn(count, 2 * INNER, dtype=_DTYPE, device="cuda")
        heads = torch.randn(count, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=_DTYPE, device="cuda")
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)  # type: ignore[no-untyped-call]
        cos = torch.randn(count, HEAD_DIM, dtype=_DTYPE, device="cuda")
        slots = torch.arange(count, device="cuda")
        pool, _ = _pool(-(-count // BLOCK), _DTYPE)
        _report(count, "rms_norm", 2 * x.nbytes, x, weight, 1e-5)
        _report(count, "add_rms_norm", 4 * x.nbytes, x, x, weight, 1e-5)
        _report(count, "silu_mul", gate_up.nbytes * 3 // 2, gate_up)
        _report(count, "rope_write_kv", 2 * heads.nbytes, query, key, value, cos, cos, pool, slots)
    for count in (1, 32, 256):
        scores = torch.randn(count, VOCAB, device="cuda") * 3
        _report(count, "gumbel_argmax", scores.nbytes, scores, torch.arange(count, device="cuda"))
        _report(count, "row_logsumexp", 2 * scores.nbytes, scores)


def _report(count: int, name: str, size: int, *arguments: object) -> None:
    op = next(op for op in catalog.ALL if op.name == name)
    backends = (
        [] if name == "rope_write_kv" else ["torch"]
    )  # the reference's store waits for the device, which a graph cannot
    parts = []
    for backend in ["triton", *backends]:
        run = op.named(backend)
        took = seconds(lambda _, run=run: run(*arguments), 16)  # type: ignore[misc]
        parts.append(f"{backend} {took * 1e6:.1f} us ({size / took / 1e9:.0f} GB/s)")
    print(f"{name} rows {count}: {', '.join(parts)}")
