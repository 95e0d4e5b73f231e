"""Recorded steps: the launch of attention depends on shapes alone, padding has no effect; and determinism."""

from typing import Any

import pytest
import torch

from headrace_kernels import AttentionMeta, catalog
from headrace_kernels.meta import StateMeta
from support.kernels.attention_case import Case, make_attention_case

BACKENDS = catalog.PAGED_ATTENTION.available()


def _padded(
    case: Case, tokens: int, sequences: int, entries: int, max_query_len: int, max_seq_len: int
) -> tuple[torch.Tensor, AttentionMeta]:
    """The same batch in larger buffers: tokens of no sequence, sequences of no token, tables of all rows."""
    meta, count = case.meta, case.query.shape[0]
    query = torch.full((tokens, *case.query.shape[1:]), float("nan"))
    query[:count] = case.query
    tables = torch.full((2 * sequences, entries), 1 << 20, dtype=torch.int32)  # of other rows, and earlier sequences
    rows = torch.full((sequences,), 2 * sequences - 1, dtype=torch.int32)
    rows[: len(case.lens)] = torch.randperm(2 * sequences - 1)[: len(case.lens)]
    tables[rows[: len(case.lens)].long(), : meta.block_tables.shape[1]] = meta.block_tables
    starts = torch.full((sequences + 1,), count, dtype=torch.int32)
    starts[: len(case.lens) + 1] = meta.query_starts
    lens = torch.zeros(sequences, dtype=torch.int32)
    lens[: len(case.lens)] = meta.seq_lens
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    return query, AttentionMeta(starts, lens, tables, slots, max_query_len, max_seq_len, rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize(
    ("lens", "tokens", "sequences", "longest"),
    [
        ([(1, 5), (1, 16), (1, 33)], 8, 8, 1),
        ([(1, 5)], 1, 1, 1),
        ([(1, 31), (20, 20), (3, 70)], 64, 16, 64),
        ([(7, 7)], 16, 16, 16),
    ],
)
def test_padding_changes_nothing(
    backend: str, lens: list[tuple[int, int]], tokens: int, sequences: int, longest: int, window: int
) -> None:
    case = make_attention_case(lens, heads=6, kv_heads=2, head_dim=32, window=window)
    query, meta = _padded(case, tokens, sequences, 16, longest, 256)
    if backend == "torch":
        meta = meta.gathered(case.pool.shape[3])
    out = catalog.PAGED_ATTENTION.named(backend)(query, case.pool, meta, scale=0.2, window=window)
    count = case.query.shape[0]
    torch.testing.assert_close(out[:count], case.naive(0.2, window).float(), atol=2e-6, rtol=1e-5)
    assert not out[count:].any(), "tokens of no sequence are zero, not NaN"
    case.values[:] = case.keys
    parts = case.pool[0], case.pool[0, ..., :16]  # latents
    out = catalog.UNEVEN_ATTENTION.named(backend)(query, *parts, meta, scale=0.2, window=window)
    torch.testing.assert_close(out[:count], case.naive(0.2, window).float()[..., :16], atol=2e-6, rtol=1e-5)
    assert not out[count:].any()


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed")
# The interpreter computes bfloat16 as float32.
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.bfloat16][: 3 if torch.cuda.is_available() else 2], ids=str
)
@pytest.mark.parametrize("window", [0, 40])
def test_deterministic_rows_do_not_depend_on_other_rows(dtype: torch.dtype, window: int) -> None:
    """Bit for bit: alone, in a batch, as a decode step or within a prefill, whatever the bounds of the launch."""
    attend = catalog.PAGED_ATTENTION.named("triton")
    lens = [(1, 50), (30, 75), (70, 70), (1, 130)]
    case = make_attention_case(lens, heads=4, kv_heads=2, head_dim=64, window=window)
    pool, query = case.pool.to(dtype), case.query.to(dtype)
    options: dict[str, Any] = {"scale": 0.125, "window": window, "deterministic": True}
    together = attend(query, pool, case.meta, **options)
    starts = case.meta.query_starts.tolist()
    for place, (count, length) in enumerate(lens):
        for rows in {1, count}:  # the last token alone, and all
            first = starts[place] + count - rows
            meta = AttentionMeta(
                torch.tensor([0, rows], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
                case.meta.block_tables[place : place + 1], torch.empty(0), rows, length,
            )  # fmt: skip
            alone = attend(query[first : first + rows], pool, meta, **options)
            assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("backend", [name for name in catalog.DELTA_RULE.available() if name != "torch"])
def test_padding_of_recurrent_layers_changes_nothing(backend: str) -> None:
    """Pieces without tokens read and write slot 0, which stays as it is; tokens of no piece get zeros."""
    inputs = [torch.randn(8, 2, 16), torch.randn(8, 2, 16), torch.randn(8, 4, 16), -torch.rand(8, 4), torch.rand(8, 4)]
    x, weight = torch.randn(8, 20), torch.randn(20, 4)
    delta_rule: Any = catalog.DELTA_RULE.named(backend)
    results = []
    for more in (0, 5):
        states, rows = torch.zeros(4, 4, 16, 16), torch.zeros(4, 3, 20)
        starts = torch.tensor([0, 1, 4, *[4] * more], dtype=torch.int32)
        reads, writes = (torch.tensor([*slots, *[0] * more], dtype=torch.int32) for slots in ((0, 3), (2, 1)))
        meta, tokens = StateMeta(starts, reads, writes), slice(0, 8 if more else 4)
        out = delta_rule(*(part[tokens] for part in inputs), states, meta)
        conv = catalog.CAUSAL_CONV.named(backend)(x[tokens], weight, rows, meta, None, False)
        assert not states[0].any() and not rows[0].any() and not out[4:].any() and not conv[4:].any()
        results.append((out[:4], conv[:4], states, rows))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_every_op_has_a_reference_and_runs_its_fastest_backend() -> None:
    for op in catalog.ALL:
        assert op.available()[-1] == "torch"
        assert op.chosen("cpu") in ("cpu", "torch")
        assert op.chosen("cuda") == ("triton" if "triton" in op.available() else "torch")
