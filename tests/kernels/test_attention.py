"""Every attention backend against the definition, with memory that is NaN where no valid data was written."""

import pytest
import torch

from headrace_kernels import AttentionMeta, catalog, ops
from support.kernels.attention_case import make_attention_case

BACKENDS = catalog.PAGED_ATTENTION.available()

MIXES = {
    "one token": [(1, 1)],
    "decode": [(1, 5), (1, 16), (1, 17), (1, 33)],
    "prefill": [(16, 16), (17, 17), (1, 1), (40, 40)],
    "mixed": [(1, 31), (20, 20), (7, 39), (1, 1), (16, 48), (3, 130)],
    "long": [(1, 1100), (2, 513), (66, 600)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(backend: str, mix: str) -> None:
    case = make_attention_case(MIXES[mix], heads=6, kv_heads=2, head_dim=32)
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.2)
    torch.testing.assert_close(out, case.naive(0.2).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [8, 24, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_head_sizes(backend: str, head_dim: int, group: int) -> None:
    case = make_attention_case(
        [(1, 20), (9, 25), (1, 3)], heads=2 * group, kv_heads=2, head_dim=head_dim, seed=head_dim
    )
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=head_dim**-0.5)
    torch.testing.assert_close(out, case.naive(head_dim**-0.5).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 5, 16, 64])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_window_reads_no_freed_block(backend: str, window: int, block_size: int) -> None:
    case = make_attention_case([(1, 100), (30, 90), (1, 3), (16, 16)], block_size=block_size, window=window)
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.25, window=window)
    torch.testing.assert_close(out, case.naive(0.25, window).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(backend: str, softcap: float, with_sinks: bool) -> None:
    case = make_attention_case([(1, 40), (12, 12), (5, 70)], heads=4, kv_heads=1)
    sinks = torch.tensor([3.0, -2.0, 0.0, 50.0]) if with_sinks else None
    out = catalog.PAGED_ATTENTION.named(backend)(
        case.query, case.pool, case.meta, scale=1.0, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(out, case.naive(1.0, 0, softcap, sinks).float(), atol=5e-6, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    case = make_attention_case([(1, 40), (12, 12)])
    case.query *= 1e3
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=1.0)
    torch.testing.assert_close(out, case.naive(1.0).float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_query(backend: str) -> None:
    case = make_attention_case([(1, 40), (12, 12)], heads=4)
    merged = torch.randn(13, 4 + 2 + 2, 16)
    merged[:, :4] = case.query
    out = catalog.PAGED_ATTENTION.named(backend)(merged[:, :4], case.pool, case.meta, scale=0.3)
    assert out.is_contiguous()
    torch.testing.assert_close(out, case.naive(0.3).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", catalog.WRITE_KV.available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv(backend: str, dtype: torch.dtype) -> None:
    pool = torch.full((2, 5, 3, 8, 16), float("nan"), dtype=dtype)
    merged = torch.randn(4, 8, 16, dtype=dtype)
    key, value = merged[:, 1:4], merged[:, 4:7]
    slots = torch.tensor([7, 8, 39, -1])
    catalog.WRITE_KV.named(backend)(key, value, pool, slots)
    assert torch.equal(pool[0, 0, :, 7], key[0])
    assert torch.equal(pool[1, 1, :, 0], value[1])
    assert torch.equal(pool[1, 4, :, 7], value[2])
    assert int(pool.isfinite().all(-1).sum()) == 3 * 2 * 3  # nothing else was written


def test_bits_do_not_depend_on_the_batch_or_on_prefill_and_decode() -> None:
    """A row alone, in a batch, as the tail of a prefill or as a decode: the same bits (C++ backend)."""
    if "cpu" not in BACKENDS:
        pytest.skip("no C++ compiler: apt-get install g++")
    run = catalog.PAGED_ATTENTION.named("cpu")
    case = make_attention_case([(1, 700), (90, 700), (40, 40), (3, 1030)], heads=6, kv_heads=2, head_dim=32)
    whole = run(case.query, case.pool, case.meta, scale=0.2)
    for s, (query_len, seq_len) in enumerate(case.lens):
        start = int(case.meta.query_starts[s])
        for first, count in ((0, query_len), (query_len - 1, 1), (query_len // 2, query_len - query_len // 2)):
            meta = AttentionMeta(
                query_starts=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([seq_len - query_len + first + count], dtype=torch.int32),
                block_tables=case.meta.block_tables[s : s + 1].contiguous(),
                slots=case.meta.slots,
                max_query_len=count,
                max_seq_len=seq_len,
            )
            rows = slice(start + first, start + first + count)
            assert torch.equal(run(case.query[rows], case.pool, meta, scale=0.2), whole[rows])


def test_bits_do_not_depend_on_threads() -> None:
    case = make_attention_case([(1, 1700), (90, 700), (3, 1030)], heads=6, kv_heads=2, head_dim=32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.paged_attention(case.query, case.pool, case.meta, scale=0.2, window=600)
        torch.set_num_threads(3)
        assert torch.equal(ops.paged_attention(case.query, case.pool, case.meta, scale=0.2, window=600), alone)
    finally:
        torch.set_num_threads(before)


def test_a_nan_sequence_affects_no_other() -> None:
    case = make_attention_case([(1, 40), (12, 12), (5, 70)], heads=4, kv_heads=2)
    expected = case.naive(0.3).float()
    case.query[1:13] = float("nan")
    out = ops.paged_attention(case.query, case.pool, case.meta, scale=0.3)
    assert out[1:13].isnan().all()
    torch.testing.assert_close(out[13:], expected[13:], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(out[:1], expected[:1], atol=2e-6, rtol=1e-5)
