"""Rows, batches, pools and sizes of steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_base.errors import MemoryTooSmallError
from headrace_worker.core.kv.sizing import size_kv
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.core.transfer.orders import End, Order
from headrace_worker.model.attention import StepContext, StepContextError, attend, step_context
from headrace_worker.model.load import LoadedModel
from headrace_worker.runner import Runner, warm_up
from headrace_worker.runner.pools import KVPools, bind_layers, make_pools

CPU = torch.device("cpu")
GREEDY = RowSampling(temperature=0.0)


class CountingListener:
    """Counts the calls at the begin and at the end of steps with orders."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def begin_step(self, orders: Any, *, computes: bool) -> Callable[[int, Any], None]:
        self.begun += 1
        return lambda layer, values: None

    def end_step(self) -> None:
        self.ended += 1


def make_layout(windows: tuple[int, ...] = (0,), layers: int = 2, block_size: int = 4) -> CacheLayout:
    groups = tuple(
        CacheGroupSpec(i, tuple(range(i * layers, (i + 1) * layers)), 2, 8, window) for i, window in enumerate(windows)
    )
    return CacheLayout(block_size, groups, 4)


def test_layers_of_different_shapes_share_slots_without_an_overlap() -> None:
    small = CacheGroupSpec(0, (0, 1, 2), 2, 8, 5, share=2)
    large = CacheGroupSpec(1, (3, 4), 2, 16)
    uneven = CacheGroupSpec(1, (3, 4), 1, 24, value_dim=8)
    latents = CacheGroupSpec(0, (0, 1, 2), 1, 24, value_dim=0)
    for groups, entries in (((small, large), 32 + 32), ((small, uneven), 32 + 32), ((latents,), 24)):
        layout = CacheLayout(4, groups, 4)
        slots = 3 if groups == (latents,) else 2
        assert layout.slots == slots and layout.block_bytes == slots * 4 * entries * 4
        pools = make_pools(layout, 3, torch.float32, CPU)
        assert sum(pool.numel() for pool in pools) * 4 == 3 * layout.block_bytes
        caches = bind_layers(layout, pools, {7: groups[0].layers[0]})
        assert not caches[7].stores and caches[7].parts == caches[0].parts
        for group in groups:
            for layer in group.layers:
                for part in caches[layer].parts:
                    part[group.index] = layer + 1.0  # each group writes to a block of its own
        for group in groups:
            for layer in group.layers:
                assert all((part[group.index] == layer + 1.0).all() for part in caches[layer].parts)
                assert (caches[layer].pool is None) == (group.value_dim is not None)


def test_attention_outside_a_step_or_of_another_shape_is_an_error() -> None:
    layout = make_layout()
    caches = bind_layers(layout, make_pools(layout, 3, torch.float32, CPU))
    x = torch.zeros(1, 2, 8)
    with pytest.raises(StepContextError, match="outside a step"):
        attend(0, x, x, x, scale=1.0)
    with step_context(StepContext(caches, [], attended={0})), pytest.raises(StepContextError, match="more than once"):
        attend(0, x, x, x, scale=1.0)
    with step_context(StepContext(caches, [])):
        with pytest.raises(StepContextError, match="inside another step"), step_context(StepContext(caches, [])):
            pass
        with pytest.raises(StepContextError, match="attends to 5 tokens"):
            attend(0, x, x, x, scale=1.0, window=5)
        with pytest.raises(StepContextError, match="3 KV heads with keys of size 8"):
            attend(0, x, torch.zeros(1, 3, 8), x, scale=1.0)
        with pytest.raises(StepContextError, match="keys of size 8 and values of size 4"):
            attend(0, x, x, torch.zeros(1, 2, 4), scale=1.0)


def test_warm_up_resets_rows_and_pools(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("mistral")
    runner = Runner(model, KVPools.of(model, 400), max_rows=40, max_len=128)
    phases: list[float] = []
    result = warm_up(runner, lambda phase, fraction: phases.append(fraction))
    assert phases[-1] == 1.0 and all(step.seconds > 0 for step in result.steps)
    steps = result.steps
    assert (steps.decode.prefill_tokens, steps.decode.decode_sequences) == (0, 1)
    assert steps.prefill.prefill_tokens > 1 and steps.prefill.decode_sequences == 0
    assert steps.together.prefill_tokens == 0 and steps.together.decode_sequences > 1
    assert 32 <= result.max_num_batched_tokens <= 4096
    assert not any(pool.any() for pool in runner.pools.tensors) and not runner.rows.tokens.any()


def test_kv_size_is_a_share_of_the_free_memory_but_no_more_than_useful() -> None:
    layout = make_layout(layers=4)
    options: dict[str, Any] = {"device_type": "cpu", "max_num_seqs": 8, "max_model_len": 64}
    useful = size_kv(layout, free=1 << 40, **options)
    assert useful.num_blocks == 8 * 16 + 1 and "8 requests of 64 tokens" in useful.note
    share = size_kv(layout, free=layout.block_bytes * 100, **options)
    assert share.num_blocks == 30 and "30%" in share.note
    configured = size_kv(layout, free=1 << 40, kv_cache_memory=layout.block_bytes * 40 + 1, **options)
    assert configured.num_blocks == 40 and configured.num_bytes == 40 * layout.block_bytes
    reserved = size_kv(layout, free=layout.block_bytes * 120, reserved=layout.block_bytes * 20, **options)
    assert reserved.num_blocks == 30


def test_too_little_memory_names_both_numbers_and_a_remedy() -> None:
    layout = CacheLayout(16, (CacheGroupSpec(0, tuple(range(30)), 3, 64),), 4)
    options: dict[str, Any] = {"device_type": "cpu", "max_num_seqs": 8, "max_model_len": 8192}
    with pytest.raises(MemoryTooSmallError, match=r"8192 tokens needs .* 0\.35 GiB, .* 0\.30 GiB .*--max-model-len 6"):
        size_kv(layout, free=1 << 30, **options)
    with pytest.raises(MemoryTooSmallError, match=r"is 2\.00 GiB, but 1\.00 GiB"):
        size_kv(layout, free=1 << 30, kv_cache_memory=2 << 30, **options)


def test_a_step_that_cannot_be_prepared_ends_its_listeners_step(load_tiny: Callable[[str], LoadedModel]) -> None:
    listener = CountingListener()
    model = load_tiny("llama")
    pools = KVPools.of(model, 8)
    runner = Runner(model, pools, max_rows=2, max_len=16, kv_listener=listener)
    orders: list[Order] = [End(1, 1)]
    tables = [TableUpdate(0, 0, 0, [1])]
    with pytest.raises(IndexError):
        runner.prepare(StepPlan(0, [], [RowInit(9, 0, [5], 1, GREEDY)], [], [Work(0, 0, 1, True)], orders=orders))
    assert (listener.begun, listener.ended) == (1, 1)
    good = StepPlan(1, [], [RowInit(0, 0, [5], 1, GREEDY)], tables, [Work(0, 0, 1, True)], orders=orders)
    runner.collect(runner.launch(good))
    assert (listener.begun, listener.ended) == (2, 2)
