"""The calls through which ranks of all shapes reach their device: by thread, in order, on devices that record them.

A thread that computes before it has called `use` raises UnsetDeviceError: on a machine with several GPUs it would
compute on the first one, which is another rank's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.workloads import prompts
from support.worker.recording_device import RECORDING, RecordingDevice

SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_steps_are_launched_before_the_last_one_is_read(
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny("llama")
    record = dict.fromkeys(range(tp * pp), RECORDING)
    with process_replica(folder, tp, pp, record=record, max_num_batched_tokens=24) as replica:
        device: RecordingDevice = replica.device
        assert all(calls[0] == "use" for calls in device.calls.values())
        released = [call for calls in device.calls.values() for call in calls if call == "release_cached"]
        assert len(released) == 5, "the memory of recordings was measured, on every stage"
        device.calls.clear()
        alone, tokens = prompts(1, seed=1), 6
        check_oracle(folder, alone, replica.run(alone, tokens))
        (calls,) = device.calls.values()
        steps = [call for call in calls if call in ("upload_into", "download.wait")]
        if pp == 1:  # replayed, and one ahead
            assert steps == ["upload_into", *["upload_into", "download.wait"] * (tokens - 1), "download.wait"]
        else:  # the last stage samples, so this rank reads nothing back
            assert "download" not in calls
            # One copy with the token of the step before, whose slot is free; then one into the recorded step's inputs.
            after = calls[calls.index("upload_into") + 1 :]
            assert [call for call in after if "mark.synchronize" not in call] == [
                *["upload", "mark default", "upload_into"] * (tokens - 1)
            ]
            assert after.count("mark.synchronize default") <= tokens - 1
        assert not any(call.startswith("synchronize") for call in calls)
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_the_rank_that_samples_does_not_wait_for_its_tokens(
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """Its thread of steps launches them and begins their downloads; another thread does nothing but wait for these."""
    folder, tokens = save_tiny("llama"), 6
    with process_replica(folder, tp, pp, record=dict.fromkeys(range(tp * pp), RECORDING)) as replica:
        alone = prompts(1, seed=1)
        check_oracle(folder, alone, replica.run(alone, tokens))
    sampler = tp * (pp - 1)
    for rank in range(1, tp * pp):
        calls = replica.last_calls(rank)
        follower = calls["headrace-steps"]
        assert "download.wait" not in follower
        assert not any("synchronize" in call for call in follower if call != "mark.synchronize default")
        copies = [call for call in follower if call in ("upload_into", "download")]
        if rank == sampler:
            assert copies[-2 * tokens :] == ["upload_into", "download"] * tokens
            assert calls["headrace-answers"][-tokens:] == ["download.wait"] * tokens
            assert set(calls["headrace-answers"]) <= {"use", "download.wait"}
        else:
            assert copies[-tokens:] == ["upload_into"] * tokens and "headrace-answers" not in calls


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_every_thread_of_a_serving_rank_sets_its_device(tp: int, pp: int, rank_group: Callable[..., Any]) -> None:
    group = rank_group(tp, pp, max_num_batched_tokens=24)
    group.start(record=dict.fromkeys(range(tp * pp), RECORDING), busy=True)
    group.ready()
    for pid in group.pids:
        with pytest.raises(AssertionError, match="no ended"):
            group.fork_server.ended(pid, 0.5)
