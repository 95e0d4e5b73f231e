"""Steps that several ranks record together and replay: same tokens, or no recordings on any of them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.workloads import guided_workload, outcome, prompts

SECONDS = 2.0
CASES = [("llama", 2, False), ("llama", 4, False), ("gemma2", 2, False), ("qwen3_moe", 2, False), ("gpt_oss", 2, True)]


def count_replays(replays: list[list[int]]) -> int:
    """The number of replayed steps, which must be the same on every rank."""
    assert all(one == replays[0] for one in replays[1:])
    return sum(replays[0])


@pytest.mark.parametrize(("family", "tp", "ep"), CASES)
def test_tokens_of_replayed_steps(
    family: str,
    tp: int,
    ep: bool,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """Prompts in chunks beside requests that decode: decode and mixed steps of several sizes are replayed."""
    folder = save_tiny(family)
    with process_replica(folder, tp, 1, record={}, ep=ep, max_num_batched_tokens=24) as replica:
        notes = replica.offline.assembly.notes
        assert "CUDA graphs: 5 sizes of decode steps up to 16, mixed ones up to 512 tokens." in notes
        alone = prompts(1, seed=1)
        check_oracle(folder, alone, replica.run(alone, 6))
        mixed = prompts(12)
        check_oracle(folder, mixed, replica.run(mixed, 6))
    replays = replica.replays()
    assert count_replays(replays) > 20
    decode, others = replays[0][:5], replays[0][5:]
    assert sum(count > 0 for count in decode) > 2 and sum(count > 0 for count in others) > 1


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_guided_requests_prefix_hits_and_preemption(
    ahead: str, save_tiny: Callable[..., Path], process_replica: Callable[..., Any], guided_expected: list[Any]
) -> None:
    folder = save_tiny("llama")
    with process_replica(folder, 2, 1, record={}, async_scheduling=ahead) as replica:
        assert outcome(replica.offline.generate(guided_workload(16))) == guided_expected
        again = replica.offline.generate(guided_workload(16))
        assert outcome(again) == guided_expected and any(completion.cached_tokens for completion in again)
        assert replica.offline.assembly.kv.pool.used == 0
    assert count_replays(replica.replays()) > 20
    with process_replica(folder, 2, 1, record={}, async_scheduling=ahead, kv_cache_memory=45_000) as replica:
        engine = replica.offline.assembly.engine
        completions = replica.offline.generate(guided_workload(16), after_step=engine.scheduler.check)
        assert outcome(completions) == guided_expected
        assert engine.scheduler.counters.preemptions > 0
    assert count_replays(replica.replays()) > 20


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "number"),
    [(4, 1, 0, 1), (4, 1, 1, 1), (4, 1, 1, 7), (4, 1, 2, 11), (2, 2, 0, 1), (2, 2, 3, 7)],
)
def test_a_rank_that_cannot_record(
    tp: int,
    pp: int,
    rank: int,
    number: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """At the first step, in the middle, at the last one: then no rank replays, and a note gives the reason."""
    folder = save_tiny("llama")
    with process_replica(folder, tp, pp, record={rank: {"at": "record", "number": number}}) as replica:
        notes = replica.offline.assembly.notes
        assert f"CUDA graphs: off, as rank {rank} could not record a step (ArithmeticError)." in notes
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
    recorded = [len(one) for one in replica.replays()]
    assert recorded == [number - 1 if other == rank else number for other in range(4)]
    assert not any(sum(one) for one in replica.replays())


@pytest.mark.parametrize(("family", "tp", "pp"), [("llama", 1, 2), ("llama", 2, 2), ("gemma2", 1, 2)])
def test_tokens_of_replayed_stages(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """Each stage replays its own layers of the same steps; without recordings the tokens are the same."""
    folder = save_tiny(family)
    work, found = prompts(12), []
    options: list[dict[int, Any] | None] = [None, {}]
    for record in options:
        with process_replica(folder, tp, pp, record=record, max_num_batched_tokens=24) as replica:
            recorded = any(note.startswith("CUDA graphs: 5 sizes") for note in replica.offline.assembly.notes)
            assert recorded == (record is not None)
            completions = replica.run(work, 6)
            check_oracle(folder, work, completions)
            found.append([completion.token_ids for completion in completions])
    assert found[0] == found[1]
    replays = replica.replays()
    assert len(replays) == tp * pp and count_replays(replays) > 20
    decode, others = replays[0][:5], replays[0][5:]
    assert sum(count > 0 for count in decode) > 1 and sum(count > 0 for count in others) > 1


@pytest.mark.parametrize(("rank", "number"), [(0, 2), (1, 1), (1, 8)])
def test_a_failed_warm_up_run_ends_the_replica(rank: int, number: int, rank_group: Callable[..., Any]) -> None:
    """The others wait in a sum that never completes; all end, and name the rank, the error's type and the remedy."""
    group = rank_group(4, 1)
    group.start(record={rank: {"at": "warm_up", "number": number}})
    for pid in group.pids:
        said = group.fork_server.ended(pid, 30)
        assert f"rank {rank} (process {group.pids[rank]}) failed: ArithmeticError in a step" in said
        assert "--cuda-graphs off" in said and "secret" not in said
        group.fork_server.wait_for(pid, "exited", SECONDS)


@pytest.mark.parametrize(("at", "rank"), [("warm_up", 1), ("record", 1), ("record", 0)])
def test_a_rank_killed_while_it_records(at: str, rank: int, rank_group: Callable[..., Any]) -> None:
    """The others wait for it in a sum, or for the outcome of its recording."""
    group = rank_group(2, 1)
    group.start(record={rank: {"at": at, "number": 4, "hangs": True}})
    group.reach(rank, "recording fails")
    time.sleep(0.3)
    victim, other = group.pids[rank], group.pids[1 - rank]
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert f"rank {rank} (process {victim})" in group.fork_server.ended(other, 10)
    group.fork_server.wait_for(other, "exited", 6)
    assert group.fork_server.when(other, "exited") - started <= SECONDS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_the_buffers_of_recordings(
    rank: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """The others would wait for it in the first step's sums."""
    folder = save_tiny("llama")
    with process_replica(folder, 2, 1, record={rank: {"at": "allocate", "number": 1}}) as replica:
        notes = replica.offline.assembly.notes
        why = f"rank {rank} could not allocate what recorded steps use (ArithmeticError)."
        assert f"CUDA graphs: off, as {why}" in notes
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
    assert replica.replays() == [[], []]
