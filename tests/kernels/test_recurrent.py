"""Layers with recurrent state: slots, and the recurrences of transformers."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

import headrace_kernels.ops as ops
from headrace_kernels.meta import StateMeta

K, H, D, E, C, W = 8, 16, 16, 24, 64, 4  # sizes of whole vectors: torch computes the rest of a row by other code


def _meta(lengths: list[int], reads: list[int], writes: list[int]) -> StateMeta:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return StateMeta(*(torch.as_tensor(values).to(torch.int32) for values in (starts, reads, writes)))


def _inputs(tokens: int, by_channel: bool = False) -> tuple[torch.Tensor, ...]:
    """Query, key, value, decay and beta."""
    shapes = [(tokens, K, D), (tokens, K, D), (tokens, H, E), (tokens, H, D) if by_channel else (tokens, H)]
    query, key, value, decay = (torch.randn(shape) for shape in shapes)
    return query, key, value, -decay.abs() / 4, torch.rand(tokens, H)


def test_the_delta_rule_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    query, key, value, decay, beta = _inputs(21)
    pool = torch.zeros(2, H, D, E)
    found = ops.delta_rule(query, key, value, decay, beta, pool, _meta([21], [0], [1]))
    heads = [x.repeat_interleave(H // K, 1)[None] for x in (query, key)]
    expected, state = torch_recurrent_gated_delta_rule(
        *heads, value[None], g=decay[None], beta=beta[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool[1], state[0], atol=1e-5, rtol=1e-5)


def test_the_convolution_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(9, C), torch.randn(C, W), torch.randn(C)
    for silu in (False, True):
        pool = torch.zeros(2, W - 1, C)
        found = ops.causal_conv(x, weight, pool, _meta([9], [0], [1]), bias, silu)
        expected = causal_conv1d_fn(x.t()[None], weight, bias, activation="silu" if silu else None)
        torch.testing.assert_close(found, expected[0].t(), atol=1e-5, rtol=1e-5)
        assert torch.equal(pool[1], x[-3:])


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_state_continues_whatever_the_pieces_and_the_batch_are(by_channel: bool) -> None:
    """Bit by bit: in pieces, from a slot into another one, beside other sequences and empty ones."""
    torch.manual_seed(2)
    inputs = _inputs(13, by_channel)
    x, weight = torch.randn(13, C), torch.randn(C, W)
    whole, rows = torch.zeros(2, H, D, E), torch.zeros(2, W - 1, C)
    query, key, value, decay, beta = inputs
    expected = ops.delta_rule(query, key, value, decay, beta, whole, _meta([13], [0], [1]))
    conv = ops.causal_conv(x, weight, rows, _meta([13], [0], [1]), None, True)
    pool, states = torch.zeros(8, W - 1, C), torch.zeros(8, H, D, E)
    start, read = 0, 0
    for count, write in ((1, 3), (2, 5), (7, 5), (3, 2)):
        part = slice(start, start + count)
        beside = _inputs(4, by_channel)
        meta = _meta([4, count, 0], [0, read, 0], [7, write, 0])
        query, key, value, decay, beta = (torch.cat([a, b[part]]) for a, b in zip(beside, inputs, strict=True))
        assert torch.equal(ops.delta_rule(query, key, value, decay, beta, states, meta)[4:], expected[part])
        other = torch.cat([torch.randn(4, C), x[part]])
        assert torch.equal(ops.causal_conv(other, weight, pool, meta, None, True)[4:], conv[part])
        start, read = start + count, write
    assert torch.equal(states[2], whole[1]) and torch.equal(pool[2], rows[1])
    # Several pieces of one sequence in one call, beside another one: each reads the slot that the one before wrote.
    beside = _inputs(4, by_channel)
    meta = _meta([4, 2, 1, 10], [0, 0, 3, 4], [7, 3, 4, 6])
    query, key, value, decay, beta = (torch.cat([a, b]) for a, b in zip(beside, inputs, strict=True))
    assert torch.equal(ops.delta_rule(query, key, value, decay, beta, states, meta)[4:], expected)
    assert torch.equal(ops.causal_conv(torch.cat([torch.randn(4, C), x]), weight, pool, meta, None, True)[4:], conv)
    assert torch.equal(states[6], whole[1]) and torch.equal(pool[6], rows[1])
    assert not states[0].any() and not pool[0].any(), "slot 0 stays the state of nothing"
