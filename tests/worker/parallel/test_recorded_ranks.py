"""Steps that several ranks record together and replay: same tokens, or no recordings on any of them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import CallingRecorder, FaultyRecorder
from test_guided_ranks import expected, outcome, workload
from test_process_requests import on_one_rank, same, split_replica, wishes
from test_shard_oracle import prompts

from headrace_worker.model.device import use_device
from headrace_worker.offline import Completion
from headrace_worker.parallel import stage
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.recording import RecordingFailedError, TogetherRecorder
from headrace_worker.parallel.watch import Watch
from headrace_worker.runner.runner import Runner

__all__ = ["expected", "on_one_rank", "split_replica"]

SECONDS = 2.0
CASES = [("llama", 2, False), ("llama", 4, False), ("gemma2", 2, False), ("qwen3_moe", 2, False), ("gpt_oss", 2, True)]


def agree(replays: list[list[int]]) -> int:
    """Every rank replayed the same steps; how many in all."""
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
    """Prompts in chunks among requests that decode: decode and mixed steps of several sizes are replayed."""
    folder = save_tiny(family)
    with process_replica(folder, tp, 1, record={}, ep=ep, max_num_batched_tokens=24) as replica:
        notes = replica.offline.assembly.notes
        assert "CUDA graphs: 5 sizes of decode steps up to 16, mixed ones up to 512 tokens." in notes
        alone = prompts(1, seed=1)
        check_oracle(folder, alone, replica.run(alone, 6))
        mixed = prompts(12)
        check_oracle(folder, mixed, replica.run(mixed, 6))
    replays = replica.replays()
    assert agree(replays) > 20
    decode, others = replays[0][:5], replays[0][5:]
    assert sum(count > 0 for count in decode) > 2 and sum(count > 0 for count in others) > 1


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_guided_requests_prefix_hits_and_preemption(
    ahead: str, save_tiny: Callable[..., Path], process_replica: Callable[..., Any], expected: list[Any]
) -> None:
    folder = save_tiny("llama")
    with process_replica(folder, 2, 1, record={}, async_scheduling=ahead) as replica:
        assert outcome(replica.offline.generate(workload(16))) == expected
        again = replica.offline.generate(workload(16))
        assert outcome(again) == expected and any(completion.cached_tokens for completion in again)
        assert replica.offline.assembly.kv.pool.used == 0
    assert agree(replica.replays()) > 20
    with process_replica(folder, 2, 1, record={}, async_scheduling=ahead, kv_cache_memory=45_000) as replica:
        engine = replica.offline.assembly.engine
        assert outcome(replica.offline.generate(workload(16), after_step=engine.scheduler.check)) == expected
        assert engine.scheduler.counters.preemptions > 0
    assert agree(replica.replays()) > 20


def test_sampling_options_and_cancels_in_the_middle(
    split_replica: Callable[..., Any], on_one_rank: Callable[..., list[Completion]]
) -> None:
    work = wishes()
    expected = on_one_rank(work)
    with split_replica(2, 1, record={}) as replica:
        engine, steps = replica.offline.assembly.engine, 0
        same(replica.offline.generate(work, after_step=engine.scheduler.check), expected)

        def disturb() -> None:
            nonlocal steps
            steps += 1
            if steps in (3, 4, 9):
                engine.cancel(next(iter(engine._requests)))
            engine.scheduler.check()

        completions = replica.offline.generate(work, after_step=disturb)
        same(completions[3:], expected[3:])
        for completion, whole in zip(completions[:3], expected[:3], strict=True):
            assert completion.finish is None
            assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert replica.offline.assembly.kv.pool.used == 0
    assert agree(replica.replays()) > 20


@pytest.mark.parametrize(("rank", "number"), [(0, 1), (1, 1), (1, 7), (2, 11)])
def test_a_rank_that_cannot_record(
    rank: int,
    number: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """At the first step, in the middle, at the last one: then nobody replays, and a note says why."""
    folder = save_tiny("llama")
    with process_replica(folder, 4, 1, record={rank: {"at": "record", "number": number}}) as replica:
        notes = replica.offline.assembly.notes
        assert f"CUDA graphs: off, as rank {rank} could not record a step (ArithmeticError)." in notes
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
    recorded = [len(one) for one in replica.replays()]
    assert recorded == [number - 1 if other == rank else number for other in range(4)]
    assert not any(sum(one) for one in replica.replays())


def test_ranks_in_stages_say_that_they_do_not_record(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any], check_oracle: Callable[..., None]
) -> None:
    folder = save_tiny("llama")
    with process_replica(folder, 1, 2, record={}) as replica:
        notes = replica.offline.assembly.notes
        assert "CUDA graphs: off, as steps are recorded only where one stage has all layers (--pp 1)." in notes
        mixed = prompts(3)
        check_oracle(folder, mixed, replica.run(mixed, 4))
    assert replica.replays() == [[], []]


@pytest.mark.parametrize(("rank", "number"), [(0, 2), (1, 1), (1, 8)])
def test_a_rehearsal_that_fails_ends_the_replica(rank: int, number: int, rank_group: Callable[..., Any]) -> None:
    """The others wait in a sum that will not come; all end, and name the rank, the error's type and the way out."""
    group = rank_group(4, 1)
    group.start(record={rank: {"at": "rehearse", "number": number}})
    for pid in group.pids:
        said = group.nursery.ended(pid, 30)
        assert f"rank {rank} (process {group.pids[rank]}) failed: ArithmeticError in a step" in said
        assert "--cuda-graphs off" in said and "secret" not in said
        group.nursery.heard(pid, "gone", SECONDS)


@pytest.mark.parametrize(("at", "rank"), [("rehearse", 1), ("record", 1), ("record", 0)])
def test_a_rank_killed_while_it_records(at: str, rank: int, rank_group: Callable[..., Any]) -> None:
    """The others wait for it in a sum, or for what it says of its recording."""
    group = rank_group(2, 1)
    group.start(record={rank: {"at": at, "number": 4, "hangs": True}})
    group.reach(rank, "recording goes wrong")
    time.sleep(0.3)
    victim, other = group.pids[rank], group.pids[1 - rank]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert f"rank {rank} (process {victim})" in group.nursery.ended(other, 10)
    group.nursery.heard(other, "gone", 6)
    assert group.nursery.when(other, "gone") - began <= SECONDS


def test_every_thread_that_computes_says_on_which_gpu(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread starts with the first GPU of its process, which is another rank's."""
    said, computed = set(), set()
    forward = Runner.forward
    monkeypatch.setattr(stage, "use_device", lambda device: said.add(threading.get_ident()))
    monkeypatch.setattr(Runner, "forward", lambda *args: computed.add(threading.get_ident()) or forward(*args))
    with process_replica(save_tiny("llama"), 2, 1, async_scheduling="on") as replica:
        said.clear()  # of the start, which is on this thread
        computed.clear()
        replica.run(prompts(3), 4)
    assert computed and computed <= said and threading.get_ident() not in computed


def test_the_current_gpu_is_set_for_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda:1"):
        use_device(torch.device(name))
    assert current == [torch.device("cuda:1")]


class Answers:
    """Stands for the rounds of a rank whose peers say `others`, or never come."""

    def __init__(self, watch: Watch, others: list[str] | None) -> None:
        self._watch, self._others = watch, others

    def say(self, answer: str) -> list[str]:
        if self._others is not None:
            return [answer, *self._others]
        lost = threading.Event()
        self._watch.call(lambda failure: lost.set())
        assert lost.wait(10), "it waits for good"
        self._watch.check()
        raise AssertionError


def together(recorder: CallingRecorder, others: list[str] | None, watch: Watch) -> TogetherRecorder:
    return TogetherRecorder(recorder, Answers(watch, others), watch, patience=0.2)  # type: ignore[arg-type]


def test_a_rank_that_fails_alone_does_not_wait_for_good() -> None:
    """NCCL may want to hear of every rank before it records a sum: the others may be held up by the one that failed."""
    watch = Watch(0)
    with pytest.raises(RankLostError, match="could not record a step, and the others did not"):
        together(FaultyRecorder("record", 1), None, watch).record(lambda: None)


def test_a_sum_that_cannot_be_recorded_is_no_lost_rank() -> None:
    """Groups say of every error that a connection broke; it is true only if the watch knows of a loss."""

    class Unrecordable(CallingRecorder):
        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            raise RankLostError("the connection between the ranks broke: RuntimeError") from RuntimeError("capturing")

    watch = Watch(0)
    with pytest.raises(RecordingFailedError, match=r"rank 0 could not record a step \(RuntimeError\)"):
        together(Unrecordable(), [""], watch).record(lambda: None)
    assert watch.failure is None
    watch.fail("it was struck by lightning")
    with pytest.raises(RankLostError, match="lightning"):
        together(Unrecordable(), [""], watch).record(lambda: None)


def test_a_step_is_replayed_only_if_every_rank_recorded_it() -> None:
    watch, called = Watch(0), []
    replay = together(CallingRecorder(), ["", ""], watch).record(lambda: called.append(1))
    assert called == []
    replay()
    assert called == [1]
    with pytest.raises(RecordingFailedError, match=r"rank 2 could not record a step \(MemoryError\)"):
        together(CallingRecorder(), ["", "MemoryError"], watch).record(lambda: None)
