"""Rows, batches, pools and sizes of steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_proto.errors import MemoryTooSmallError
from headrace_worker.core.kv.sizing import size_kv
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.core.transfer.orders import Drop, Order
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.model.attention import StepContext, StepContextError, attend, step_context
from headrace_worker.model.load import LoadedModel
from headrace_worker.runner import Runner, warm_up
from headrace_worker.runner.batch import gather
from headrace_worker.runner.pools import KVPools, bind_layers, make_pools
from headrace_worker.runner.rows import RowState

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


def test_a_row_is_reset_when_it_is_reassigned() -> None:
    rows = RowState(make_layout((0, 6)), max_rows=3, max_len=16, device=CpuDevice())
    rows.initialise(RowInit(1, 1, list(range(5, 15)), 10, GREEDY))
    rows.update_table(TableUpdate(0, 1, 0, [7, 8, 9]))
    rows.update_table(TableUpdate(1, 1, 1, [4]))
    rows.store_tokens(torch.tensor([1]), torch.tensor([10]), torch.tensor([99]))
    assert rows.tokens[1, :11].tolist() == [*range(5, 15), 99]
    rows.initialise(RowInit(1, 2, [3], 1, GREEDY))
    assert rows.tokens[1].tolist() == [3] + [0] * 16
    assert not rows.tables[0][1].any() and not rows.tables[1][1].any()
    assert rows.uses.tolist() == [-1, 2, -1]


def test_gather_flattens_mixed_work() -> None:
    rows = RowState(make_layout((0, 6)), max_rows=4, max_len=16, device=CpuDevice())
    for group, tables in enumerate([{0: [5, 6, 7], 2: [8], 3: [9, 10]}, {0: [15, 16, 17], 2: [18], 3: [19, 20]}]):
        for row, blocks in tables.items():
            rows.update_table(TableUpdate(group, row, 0, blocks))
    work = [Work(3, 2, 4, False), Work(0, 9, 1, True), Work(2, 0, 3, True)]
    batch = gather(work, rows, 4)
    assert batch.token_rows.tolist() == [3, 3, 3, 3, 0, 2, 2, 2]
    assert batch.positions.tolist() == [2, 3, 4, 5, 9, 0, 1, 2]
    assert (batch.sample_index.tolist(), batch.sample_rows, batch.sample_positions) == ([4, 7], [0, 2], [10, 3])
    assert (batch.drawn_rows.tolist(), batch.drawn_positions.tolist()) == (batch.sample_rows, batch.sample_positions)
    first, second = batch.metas
    assert first.query_starts.tolist() == [0, 4, 5, 8] and first.seq_lens.tolist() == [6, 10, 3]
    assert (first.max_query_len, first.max_seq_len) == (4, 10)
    assert first.slots.tolist() == [38, 39, 40, 41, 29, 32, 33, 34]
    assert second.slots.tolist() == [78, 79, 80, 81, 69, 72, 73, 74]
    assert first.block_tables.tolist() == [[9, 10, 0], [5, 6, 7], [8, 0, 0]]
    assert first.query_starts.dtype == first.seq_lens.dtype == first.block_tables.dtype == torch.int32
    assert first.slots.dtype == torch.int64


def test_pools_start_at_zero_and_groups_share_them() -> None:
    layout = make_layout((0, 6))
    pools = make_pools(layout, 9, torch.float32, CPU)
    assert [tuple(pool.shape) for pool in pools] == [(2, 9, 2, 4, 8)] * 2
    assert not any(pool.any() for pool in pools)
    caches = bind_layers(layout, pools)
    assert [(caches[layer].group, caches[layer].window) for layer in range(4)] == [(0, 0), (0, 0), (1, 6), (1, 6)]
    assert caches[0].pool is caches[2].pool and caches[1].pool is caches[3].pool
    assert sum(pool.nbytes for pool in pools) == 9 * layout.block_bytes
    with pytest.raises(MemoryTooSmallError, match="cannot be allocated"):
        make_pools(layout, 1 << 50, torch.float32, CPU)


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
        with pytest.raises(StepContextError, match="3 KV heads of size 8"):
            attend(0, x, torch.zeros(1, 3, 8), x, scale=1.0)
        with pytest.raises(StepContextError, match="keys of size 8 and values of size 4"):
            attend(0, x, x, torch.zeros(1, 2, 4), scale=1.0)


def test_a_plan_without_samples_or_work_has_no_tokens(
    load_tiny: Callable[..., LoadedModel], driver: Callable[..., Any]
) -> None:
    bench = driver(load_tiny("llama"))
    init = bench.init(4, list(range(3, 20)))
    assert bench.runner.collect(bench.runner.launch(StepPlan(1, [], [init], [], []))).tokens == []
    result = bench.step({4: 8})
    assert (result.step, result.tokens, result.logprobs, result.failed) == (1, [], {}, {})
    assert len(bench.step({4: 100}).tokens) == 1


def test_steps_may_be_launched_before_earlier_ones_are_collected(
    load_tiny: Callable[..., LoadedModel], driver: Callable[..., Any]
) -> None:
    model, prompt = load_tiny("llama"), [5, 9, 30, 4]
    expected = driver(model).generate({0: prompt}, 4)[0]
    bench = driver(model)
    table = [TableUpdate(0, 0, 0, [3, 1])]
    runner: Runner = bench.runner
    handles = [runner.launch(StepPlan(0, [], [bench.init(0, prompt)], table, [Work(0, 0, 4, True)]))]
    handles += [runner.launch(StepPlan(n, [], [], [], [Work(0, 3 + n, 1, True)])) for n in range(1, 4)]
    assert [runner.collect(handle).tokens[0] for handle in handles] == expected


def test_warm_up_resets_rows_and_pools(load_tiny: Callable[..., LoadedModel], driver: Callable[..., Any]) -> None:
    model = load_tiny("mistral")
    bench = driver(model)
    phases: list[float] = []
    result = warm_up(bench.runner, lambda phase, fraction: phases.append(fraction))
    assert phases[-1] == 1.0 and all(step.seconds > 0 for step in result.steps)
    steps = result.steps
    assert (steps.decode.prefill_tokens, steps.decode.decode_sequences) == (0, 1)
    assert steps.prefill.prefill_tokens > 1 and steps.prefill.decode_sequences == 0
    assert steps.together.prefill_tokens == 0 and steps.together.decode_sequences > 1
    assert 32 <= result.max_num_batched_tokens <= 4096
    assert not any(pool.any() for pool in bench.runner.pools.tensors) and not bench.runner.rows.tokens.any()
    assert bench.generate({0: [5, 6, 7]}, 5) == driver(model).generate({0: [5, 6, 7]}, 5)


def test_warm_up_fits_into_the_smallest_cache(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("mistral")
    runner = Runner(model, KVPools.of(model, 4), max_rows=1, max_len=12)
    assert warm_up(runner).max_num_batched_tokens >= 32


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
    orders: list[Order] = [Drop(1, 1)]
    tables = [TableUpdate(0, 0, 0, [1])]
    with pytest.raises(IndexError):
        runner.prepare(StepPlan(0, [], [RowInit(9, 0, [5], 1, GREEDY)], [], [Work(0, 0, 1, True)], orders=orders))
    assert (listener.begun, listener.ended) == (1, 1)
    good = StepPlan(1, [], [RowInit(0, 0, [5], 1, GREEDY)], tables, [Work(0, 0, 1, True)], orders=orders)
    runner.collect(runner.launch(good))
    assert (listener.begun, listener.ended) == (2, 2)
