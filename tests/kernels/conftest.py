"""A naive attention that follows the definition token by token, and random paged batches for it.

The Triton backend runs on the GPU if there is one, else in Triton's interpreter; tests pass CPU tensors in both cases.
Memory that ops allocate is NaN until they write it.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_kernels import AttentionMeta, catalog
from headrace_kernels.gpu import availability


def _plain_product(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """The interpreter's tl.dot with a device's property: a row's result does not depend on its place. A BLAS uses
    another order of addition per row, which has no effect once sums in float64 are rounded.
    """
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return type(d)(product + d.data, d.dtype.scalar)


def _interpret() -> None:
    """Loads the Triton kernels for the interpreter.


    Triton selects it when a function is decorated. Another package's import may have loaded Triton before, so its own
    library is decorated again. The variable is restored: processes of other packages' tests are not affected.
    """
    before = os.environ.get(availability.INTERPRET)
    os.environ[availability.INTERPRET] = "1"
    availability.interpreted.cache_clear()
    availability.missing.cache_clear()
    try:
        if not availability.interpreted() or availability.missing() is not None:
            return
        import triton
        import triton.experimental.gluon  # Triton imports it late, and it must be imported with the interpreter enabled
        from triton.runtime import interpreter
        from triton.runtime.jit import JITFunction

        for module in (triton.language, triton.language.standard):
            for name, member in list(vars(module).items()):
                if isinstance(member, JITFunction):
                    setattr(module, name, triton.jit(member.fn))
        interpreter.InterpreterBuilder.create_dot = _plain_product
        for op in catalog.ALL:
            if "triton" in op.available():
                op.named("triton")
    finally:
        if before is None:
            del os.environ[availability.INTERPRET]
        else:
            os.environ[availability.INTERPRET] = before


class _OnGpu:
    """A backend's function, run on copies of CPU tensors on the GPU; its writes are copied back."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

        def to_gpu(x: Any) -> Any:
            if isinstance(x, AttentionMeta):
                return AttentionMeta(*(to_gpu(getattr(x, entry.name)) for entry in dataclasses.fields(x)))
            if not isinstance(x, Tensor):
                return x
            storage = x.untyped_storage()
            copy = storages.setdefault(storage.data_ptr(), (storage, storage.cuda()))[1]
            return torch.empty(0, dtype=x.dtype, device="cuda").set_(copy, x.storage_offset(), x.shape, x.stride())

        result = self._run(*map(to_gpu, arguments), **{name: to_gpu(x) for name, x in options.items()})
        for storage, copy in storages.values():
            storage.copy_(copy)
        return (
            tuple(x.cpu() for x in result)
            if isinstance(result, tuple)
            else result.cpu()
            if result is not None
            else None
        )


if torch.cuda.is_available():
    _named = catalog.WRITE_KV.__class__.named

    def _named_on_gpu(op: Any, name: str) -> Any:
        return _OnGpu(_named(op, name)) if name == "triton" else _named(op, name)

    catalog.WRITE_KV.__class__.named = _named_on_gpu  # type: ignore[method-assign]
else:
    _interpret()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN (and the largest integers), so that an entry that an op does not write is detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Case:
    """A random batch: (query length, sequence length) pairs over a pool whose unused memory is NaN."""

    query: Tensor
    pool: Tensor
    meta: AttentionMeta
    lens: list[tuple[int, int]]
    keys: list[Tensor] = field(default_factory=list)  # [L, K, D] of each sequence
    values: list[Tensor] = field(default_factory=list)

    def naive(
        self, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:  # [T, H, D] in float64
        heads = self.query.shape[1]
        rows = []
        for s, (query_len, seq_len) in enumerate(self.lens):
            start = int(self.meta.query_starts[s])
            for i in range(query_len):
                position = seq_len - query_len + i
                low = max(0, position - window + 1) if window else 0
                out = []
                for h in range(heads):
                    kv = h // (heads // self.pool.shape[2])
                    key = self.keys[s][low : position + 1, kv].double()
                    scores = key @ self.query[start + i, h].double() * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[h : h + 1].double()))
                    weights = torch.softmax(scores, 0)[: len(key)]
                    out.append(weights @ self.values[s][low : position + 1, kv].double())
                rows.append(torch.stack(out))
        return torch.stack(rows)


def _make_case(
    lens: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    window: int = 0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // block_size) for _, seq_len in lens]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    pool = torch.full((2, len(order), kv_heads, block_size, head_dim), float("nan"))
    tables = torch.full((len(lens), max(counts) + 2), 2**30, dtype=torch.int32)  # beyond the pool: must not be read
    slots: list[int] = []
    case = Case(
        query=torch.randn(sum(q for q, _ in lens), heads, head_dim, generator=generator),
        pool=pool,
        meta=AttentionMeta(
            query_starts=torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int(),
            seq_lens=torch.tensor([length for _, length in lens], dtype=torch.int32),
            block_tables=tables,
            slots=torch.empty(0, dtype=torch.int64),
            max_query_len=max(q for q, _ in lens),
            max_seq_len=max(length for _, length in lens),
        ),
        lens=lens,
    )
    for s, (query_len, seq_len) in enumerate(lens):
        blocks = [order.pop() for _ in range(counts[s])]
        tables[s, : counts[s]] = torch.tensor(blocks, dtype=torch.int32)
        keys = torch.randn(seq_len, kv_heads, head_dim, generator=generator)
        values = torch.randn(seq_len, kv_heads, head_dim, generator=generator)
        case.keys.append(keys)
        case.values.append(values)
        first_seen = max(0, seq_len - query_len + 1 - window) if window else 0
        for p in range(seq_len):
            slot = blocks[p // block_size] * block_size + p % block_size
            if p >= seq_len - query_len:
                slots.append(slot)
            if p // block_size < first_seen // block_size:
                tables[s, p // block_size] = 2**30  # freed: the window has moved past this block
            else:
                pool[0, blocks[p // block_size], :, p % block_size] = keys[p]
                pool[1, blocks[p // block_size], :, p % block_size] = values[p]
    case.meta.slots = torch.tensor(slots, dtype=torch.int64)
    return case


@pytest.fixture
def make_case() -> Callable[..., Case]:
    return _make_case
