"""What was evicted to host memory and disk comes back: an engine or a replica in this process, and several ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_base.errors import MemoryTooSmallError
from headrace_worker.assembly.assemble import Assembly, assemble
from headrace_worker.assembly.offload import HostSlots, host_slots
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.transfer.offload import OffloadLimits
from headrace_worker.core.transfer.slots import Pace
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.replica import Replica
from support.members import MEMBER
from support.worker.tiny_models import replica_config

BLOCK_BYTES = 2 * 3 * 2 * 4 * 16 * 4  # keys and values, layers, KV heads, positions, head size, float32
BLOCKS = 200
BYTES_OF = {"llama": BLOCK_BYTES, "deepseek_v3": 3 * 4 * 48 * 4, "mimo_v2_flash": 2 * 4 * 2 * (32 + 16) * 4}
OPTIONS = {"kv_cache_memory": BLOCKS * BLOCK_BYTES, "kv_offload_memory": 8 << 20, "max_num_batched_tokens": 64}


STATES: dict[str, Any] = {  # as many blocks and slots as two requests need, and two snapshots
    "kv_cache_memory": 8 << 20,
    "kv_offload_memory": 32 << 20,
    "state_snapshots": 2,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def prompts(count: int) -> list[list[int]]:
    draw = Random(5)
    return [[draw.randrange(3, 300) for _ in range(90)] for _ in range(count)]


def ask_twice(stream: Any, folder: Path, check_oracle: Callable[..., None]) -> None:
    """More prompts than the cache has room for, and the first ones again."""
    many, done = prompts(14), []
    for prompt in many:
        done.append(stream.submit(prompt, 4).wait())
        time.sleep(0.3)  # steps of this model are faster than copies: an idle engine stores what is evicted next
    check_oracle(folder, many, done)
    again = [stream.submit(prompt, 4).wait() for prompt in many[:4]]
    check_oracle(folder, many[:4], again)
    # The first one at least: from then on a load is known to take longer than the few layers of this model.
    assert sum(one.cached_tokens for one in again) >= 88
    counters = stream.load.counters
    assert counters.blocks_stored > 100 and counters.blocks_loaded >= 20 and counters.load_seconds > 0


def ask_after_a_restart(stream: Any, folder: Path, check_oracle: Callable[..., None]) -> None:
    """What `ask_twice` has left on disk."""
    again = [stream.submit(prompt, 4).wait() for prompt in prompts(3)]
    check_oracle(folder, prompts(3), again)
    assert sum(one.cached_tokens for one in again) >= 88
    counters = stream.load.counters
    assert counters.blocks_filled >= 20 and counters.blocks_loaded >= 20 and stream.load.load_token_ms > 0


def serve(assembly: Assembly, prompts: list[list[int]], count: int) -> list[Completion]:
    """All at once, until nothing is copied any more."""
    engine, offline = assembly.engine, OfflineEngine(assembly)
    work = [Prompt(prompt, count, RowSampling(temperature=0.0, logprobs=2), ignore_eos=True) for prompt in prompts]
    requests = [offline._request(each) for each in work]
    done = {request.attempt_id: Completion() for request in requests}
    for request in requests:
        assert engine.submit(request) is None
    while engine.has_work or engine.exchange.busy or any(request.finish is None for request in requests):
        for command in assembly.commands.take():
            command(engine)
        for output in engine.step():
            done[output.attempt_id].token_ids += output.token_ids
            done[output.attempt_id].logprobs += output.logprobs
        engine.scheduler.check(engine.exchange.held(), engine.exchange.held_slots())
    for request in requests:
        done[request.attempt_id].cached_tokens = request.cached_tokens
    return list(done.values())


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_next_turns_start_from_states_in_host_memory(
    family: str, save_tiny: Callable[..., Path], check_oracle: Callable[..., None]
) -> None:
    """The device has room for running requests alone."""
    folder = save_tiny(family)
    assembly = assemble(replica_config(folder, **STATES), transfers=True)
    try:
        assert any("snapshots of recurrent state" in note for note in assembly.notes), assembly.notes
        states, offload = assembly.kv.states, assembly.engine.exchange.offload
        assert states is not None and states.pool.total == 2 * 2 + 2
        offload.limits = OffloadLimits(least_seconds=60.0)
        many = prompts(8)
        first = [done for prompt in many for done in serve(assembly, [prompt], 9)]
        check_oracle(folder, many, first)
        assert states.pool.cached < 8 < len(offload.tiers[1].slots)
        turns = [[*prompt, *one.token_ids, 7, 8, 9] for prompt, one in zip(many, first, strict=True)]
        second = []
        for turn in turns:
            offload.load_pace = Pace(offload.clock)  # not known: else these few layers are computed
            second += serve(assembly, [turn], 4)
        check_oracle(folder, turns, second)
        assert [one.cached_tokens for one in second] == [(90 + 9 - 1) // 4 * 4] * 8
        assert offload.counters.loaded > 8 * 20
    finally:
        assert assembly.transfers is not None
        assembly.transfers.stop()


def test_blocks_of_8_bits_come_back_with_their_scales(save_tiny: Callable[..., Path]) -> None:
    options = OPTIONS | {"kv_cache_memory": 100 * BLOCK_BYTES * 20 // 64, "kv_cache_dtype": "fp8"}
    assembly = assemble(replica_config(save_tiny("llama"), **options), transfers=True)
    try:
        offload = assembly.engine.exchange.offload
        offload.limits = OffloadLimits(least_seconds=60.0)
        many = prompts(14)
        first = [done for prompt in many for done in serve(assembly, [prompt], 4)]
        offload.load_pace = Pace(offload.clock)  # not known: else these few layers are computed
        (again,) = serve(assembly, many[:1], 4)
        assert again.cached_tokens == 88 and again.token_ids == first[0].token_ids
    finally:
        assert assembly.transfers is not None
        assembly.transfers.stop()


def test_host_memory_is_divided() -> None:
    layout = CacheLayout(16, (CacheGroupSpec(0, (0,), 1, 8),), 4, (StateSpec(1, "recurrent", (64, 64)),))
    assert host_slots(1 << 20, layout, None) == HostSlots(512, 32)
    assert host_slots(1 << 20, CacheLayout(16, layout.groups, 4), None) == HostSlots(1024, 0)
    assert HostSlots(512, 32).note(layout) == (
        "Evicted KV blocks: 0.5 MiB of host memory for 8,192 tokens, and 0.5 MiB for 32 snapshots of recurrent state."
    )
    with pytest.raises(MemoryTooSmallError, match="Half of --kv-offload-memory is for recurrent states, and one has"):
        host_slots(1 << 14, layout, None)
    with pytest.raises(MemoryTooSmallError, match=r"for KV blocks, and one has .*: give a larger one"):
        host_slots(1 << 9, CacheLayout(16, layout.groups, 4), None)


@pytest.mark.faults("ranks")
@pytest.mark.parametrize("family", BYTES_OF)
def test_a_replica_that_starts_again_finds_what_is_on_disk(
    family: str, router_client: Any, save_tiny: Callable[..., Path], check_oracle: Callable[..., None], tmp_path: Path
) -> None:
    folder = save_tiny(family)
    fields: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "kv_offload_dir": str(tmp_path / "kv")}
    fields |= OPTIONS | {"kv_cache_memory": BLOCKS * BYTES_OF[family]}
    for ask in (ask_twice, ask_after_a_restart):
        made = Replica(replica_config(folder, replica_id="one", block_size=4, **fields), MEMBER.secret)
        ask(router_client.connect(made.start().address), folder, check_oracle)
        made.stop()
    assert len(list((tmp_path / "kv").glob("*.blocks"))) == 1


@pytest.mark.faults("ranks")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_with_several_ranks(
    tp: int,
    pp: int,
    rank_group: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
    tmp_path: Path,
) -> None:
    share = OPTIONS | {"kv_cache_memory": BLOCKS * BLOCK_BYTES // tp * (2 if pp == 2 else 3) // 3}
    for ask in (ask_twice, ask_after_a_restart):
        group = rank_group(tp, pp, save_tiny("llama"), replica_id="one", kv_offload_dir=str(tmp_path), **share)
        group.start()
        group.ready()
        ask(router_client.connect(group.address), save_tiny("llama"), check_oracle)
        group.kill()


@pytest.mark.faults("ranks")
@pytest.mark.parametrize(("family", "tp", "pp"), [("qwen3_next", 2, 1), ("qwen3_5_text", 1, 2), ("jamba", 2, 2)])
def test_states_with_several_ranks(
    family: str,
    tp: int,
    pp: int,
    rank_group: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """Each rank copies its part; a stage without attention, or without recurrent layers, what it has."""
    folder = save_tiny(family)
    group = rank_group(tp, pp, folder, replica_id="one", **STATES)
    group.start()
    group.ready()
    stream = router_client.connect(group.address)
    many, first = prompts(6), []
    for prompt in many:
        first.append(stream.submit(prompt, 9).wait())
        time.sleep(0.3)  # steps of this model are faster than copies: an idle engine stores what is evicted next
    check_oracle(folder, many, first)
    turns = [[*prompt, *one.token_ids, 7, 8, 9] for prompt, one in zip(many, first, strict=True)]
    second = [stream.submit(turn, 4).wait() for turn in turns]
    check_oracle(folder, turns, second)
    assert second[0].cached_tokens == (90 + 9 - 1) // 4 * 4  # then a load is known to take longer than these layers
    counters = stream.load.counters
    assert counters.blocks_stored > 100 and counters.blocks_loaded >= 20
    group.kill()
