"""A naive attention that follows the definition token by token, and random paged batches for it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace_kernels import AttentionMeta


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


def make_attention_case(
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
