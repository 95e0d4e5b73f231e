"""Layers with recurrent state, every backend: slots, the recurrences of transformers, and bits for any split."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from headrace_kernels import catalog
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.meta import StateMeta

DELTA_RULE: Any = catalog.DELTA_RULE
CAUSAL_CONV: Any = catalog.CAUSAL_CONV
K, H, D, E, C, W = 3, 6, 12, 20, 45, 4  # nothing is a multiple of a vector
BACKENDS = DELTA_RULE.available()
FAST = [name for name in BACKENDS if name != "torch"]
# Of heads and channels; in Triton's interpreter some, since it is slow.
SIZES = [(name, size) for name in FAST for size in (range(1, 41) if name == "cpu" else (1, 7, 16, 40))]
needs_cpp = pytest.mark.skipif("cpu" not in BACKENDS, reason="no C++ compiler: apt-get install g++")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def _meta(lengths: list[int], reads: list[int], writes: list[int]) -> StateMeta:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return StateMeta(*(torch.as_tensor(values).to(torch.int32) for values in (starts, reads, writes)))


def _inputs(
    tokens: int, by_channel: bool = False, sizes: tuple[int, int, int, int] = (K, H, D, E)
) -> tuple[torch.Tensor, ...]:
    """Query, key, value, decay and beta; the first three are views of one tensor."""
    key_heads, heads, rows, columns = sizes
    merged = torch.randn(tokens, 2 * key_heads * rows + heads * columns)
    parts = torch.split(merged, [key_heads * rows, key_heads * rows, heads * columns], 1)
    query, key, value = (part.unflatten(1, (-1, size)) for part, size in zip(parts, (rows, rows, columns), strict=True))
    decay = torch.randn((tokens, heads, rows) if by_channel else (tokens, heads))
    return query, key, value, -decay.abs() / 4, torch.rand(tokens, heads)


def test_the_delta_rule_is_that_of_transformers(backend: str) -> None:
    torch.manual_seed(0)
    query, key, value, decay, beta = _inputs(21)
    pool = torch.zeros(2, H, D, E)
    found = DELTA_RULE.named(backend)(query, key, value, decay, beta, pool, _meta([21], [0], [1]))
    heads = [x.repeat_interleave(H // K, 1)[None] for x in (query, key)]
    expected, state = torch_recurrent_gated_delta_rule(
        *heads, value[None], g=decay[None], beta=beta[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool[1], state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution_is_that_of_transformers(backend: str, silu: bool) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(9, C), torch.randn(C, W), torch.randn(C)
    pool = torch.zeros(2, W - 1, C)
    found = CAUSAL_CONV.named(backend)(x, weight, pool, _meta([9], [0], [1]), bias, silu)
    expected = causal_conv1d_fn(x.t()[None], weight, bias, activation="silu" if silu else None)
    torch.testing.assert_close(found, expected[0].t(), atol=1e-5, rtol=1e-5)
    assert torch.equal(pool[1], x[-3:])


@pytest.mark.parametrize(("backend", "size"), SIZES)
def test_any_size_of_heads_and_channels(backend: str, size: int) -> None:
    """Against the reference: in place, into other slots, into none, and with tokens of no sequence."""
    meta = _meta([3, 0, 1, 2], [1, 2, 3, 0], [1, 4, 5, 0])
    for by_channel in (False, True):
        for sizes in ((1, 2, size, 41 - size), (2, 2, 41 - size, size)):
            inputs = _inputs(8, by_channel, sizes)
            pool = torch.randn(6, *sizes[1:])
            pool[0] = 0.0
            other = pool.clone()
            expected = DELTA_RULE.named("torch")(*inputs, other, meta)
            found = DELTA_RULE.named(backend)(*inputs, pool, meta)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(pool, other, atol=2e-5, rtol=1e-5)
            assert not pool[0].any() and not found[6:].any()
    for width in (1, 2, 4):
        for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2 if backend == "cpu" else 4e-2)):
            x, weight = torch.randn(8, 2 * size).to(dtype)[:, :size], torch.randn(size, width).to(dtype)
            rows = torch.randn(6, width - 1, size).to(dtype)
            rows[0] = 0.0
            others = rows.clone()
            for bias, silu in ((None, True), (torch.randn(size).to(dtype), False)):
                expected = CAUSAL_CONV.named("torch")(x, weight, others, meta, bias, silu)
                found = CAUSAL_CONV.named(backend)(x, weight, rows, meta, bias, silu)
                torch.testing.assert_close(found, expected, atol=near, rtol=near)
                assert torch.equal(rows, others)


# The interpreter is slow.
@pytest.mark.parametrize(
    ("backend", "by_channel"), [(name, kind) for name in FAST for kind in (True, False) if kind or name == "cpu"]
)
def test_a_state_continues_whatever_the_pieces_and_the_batch_are(backend: str, by_channel: bool) -> None:
    """Bit by bit: in pieces, from a slot into another one, beside other sequences and empty ones."""
    torch.manual_seed(2)
    delta_rule, causal_conv = DELTA_RULE.named(backend), CAUSAL_CONV.named(backend)
    inputs = _inputs(13, by_channel)
    x, weight = torch.randn(13, C), torch.randn(C, W)
    whole, rows = torch.zeros(2, H, D, E), torch.zeros(2, W - 1, C)
    query, key, value, decay, beta = inputs
    expected = delta_rule(query, key, value, decay, beta, whole, _meta([13], [0], [1]))
    conv = causal_conv(x, weight, rows, _meta([13], [0], [1]), None, True)
    pool, states = torch.zeros(8, W - 1, C), torch.zeros(8, H, D, E)
    start, read = 0, 0
    for count, write in ((1, 3), (2, 5), (7, 5), (3, 2)):
        part = slice(start, start + count)
        beside = _inputs(4, by_channel)
        meta = _meta([4, count, 0], [0, read, 0], [7, write, 0])
        query, key, value, decay, beta = (torch.cat([a, b[part]]) for a, b in zip(beside, inputs, strict=True))
        assert torch.equal(delta_rule(query, key, value, decay, beta, states, meta)[4:], expected[part])
        other = torch.cat([torch.randn(4, C), x[part]])
        assert torch.equal(causal_conv(other, weight, pool, meta, None, True)[4:], conv[part])
        start, read = start + count, write
    assert torch.equal(states[2], whole[1]) and torch.equal(pool[2], rows[1])
    # Several pieces of one sequence in one call, beside another one: each reads the slot that the one before wrote.
    # The first one may write the slot that it reads.
    for first, meta in (
        (0, _meta([4, 2, 1, 2], [0, 0, 3, 4], [7, 3, 4, 5])),
        (5, _meta([4, 1, 7], [0, 5, 5], [7, 5, 6])),
    ):
        part = slice(first, first + int(meta.query_starts[-1]) - 4)
        query, key, value, decay, beta = (torch.cat([a, b[part]]) for a, b in zip(beside, inputs, strict=True))
        assert torch.equal(delta_rule(query, key, value, decay, beta, states, meta)[4:], expected[part])
        other = torch.cat([torch.randn(4, C), x[part]])
        assert torch.equal(causal_conv(other, weight, pool, meta, None, True)[4:], conv[part])
    assert torch.equal(states[6], whole[1]) and torch.equal(pool[6], rows[1])
    assert not states[0].any() and not pool[0].any(), "slot 0 stays the state of nothing"


@needs_cpp
@pytest.mark.parametrize("by_channel", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(by_channel: bool) -> None:
    inputs, meta = _inputs(60, by_channel, (2, 8, 33, 50)), _meta([50, 1, 9], [1, 2, 0], [1, 3, 4])
    x, weight, pool, rows = (
        torch.randn(60, 2000),
        torch.randn(2000, W),
        torch.randn(5, 8, 33, 50),
        torch.randn(5, 3, 2000),
    )
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        states, last = pool.clone(), rows.clone()
        torch.set_num_threads(threads)
        try:
            out = DELTA_RULE.named("cpu")(*inputs, states, meta)
            results.append((out, states, CAUSAL_CONV.named("cpu")(x, weight, last, meta), last))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@needs_cpp
def test_slots_and_tokens_that_do_not_exist_are_refused() -> None:
    inputs, pool, rows = _inputs(4), torch.zeros(3, H, D, E), torch.zeros(3, W - 1, C)
    x, weight = torch.randn(4, C), torch.randn(C, W)
    for lengths, reads, writes in (([5], [0], [1]), ([4, -1], [0, 0], [1, 2]), ([4], [3], [1]), ([4], [0], [-1])):
        meta = _meta(lengths, reads, writes)
        with pytest.raises(KernelArgumentError, match=r"do not exist|outside of the pool"):
            DELTA_RULE.named("cpu")(*inputs, pool, meta)
        with pytest.raises(KernelArgumentError, match=r"do not exist|outside of the pool"):
            CAUSAL_CONV.named("cpu")(x, weight, rows, meta)
    meta = _meta([4], [0], [1])
    with pytest.raises(KernelArgumentError, match="do not fit each other"):
        DELTA_RULE.named("cpu")(*inputs, pool[:, :-1], meta)
    with pytest.raises(KernelArgumentError, match="do not fit each other"):
        CAUSAL_CONV.named("cpu")(x, weight[:-1], rows, meta)
