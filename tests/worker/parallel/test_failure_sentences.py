"""A failed step is reported with the same sentence by rank 0 and by followers: the reason, and nothing secret."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_proto.errors import MemoryTooSmallError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.ranks.follower import Follower
from headrace_worker.ranks.messages import Clear
from headrace_worker.ranks.runner import MultiRankRunner
from support.worker.recording_device import RecordingDevice


class LostError(RuntimeError):
    """What a kernel raises when it has broken the device."""


ERRORS = [
    (LostError("CUDA error: illegal access\nmore"), "cpu is in error (LostError: CUDA error: illegal access)"),
    (RunnerBrokenError("cuda:1 is in error (AcceleratorError: …)"), "cuda:1 is in error (AcceleratorError: …)"),
    (MemoryTooSmallError("give a smaller --max-num-seqs"), "give a smaller --max-num-seqs"),
    (ValueError("a secret prompt"), "ValueError in a step"),
]  # fmt: skip


class EmptyChannel:
    """Its commands have no effect."""

    def send_command(self, command: Clear) -> None:
        pass

    def receive_command(self) -> Clear:
        return Clear(1, 1)


def rank_of(error: Exception) -> tuple[Any, Any, FailureDetector]:
    """Stage and team of a rank whose step raises."""

    def fail(*_: int) -> None:
        raise error

    device = RecordingDevice()
    device.use()
    device.lost = LostError
    detector = FailureDetector(1)
    topology = SimpleNamespace(pp=1, samples=False, sampler=0, rank=1)
    runner = SimpleNamespace(layout=None, num_blocks=1, max_rows=1, max_len=1, device=device, clear=fail)
    return SimpleNamespace(runner=runner), SimpleNamespace(topology=topology, detector=detector, host=None), detector


def fail_as_follower(error: Exception) -> str:
    stage, team, detector = rank_of(error)
    follower = Follower(stage, team)
    follower._channel = EmptyChannel()  # type: ignore[assignment]
    follower.start()
    follower.join(10)
    assert str(follower.failure) == str(detector.failure)
    return str(detector.failure)


def fail_as_reader_of_tokens(error: Exception) -> str:
    """On the thread of the answers, which waits for tokens."""
    stage, team, detector = rank_of(error)
    follower = Follower(stage, team)

    def fail() -> None:
        stage.runner.device.use()
        follower._step_failed(error)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(10)
    return str(detector.failure)


def fail_as_rank_0(error: Exception) -> str:
    stage, team, detector = rank_of(error)
    runner = MultiRankRunner(stage.runner, stage, team)
    runner._channel = EmptyChannel()  # type: ignore[assignment]
    with pytest.raises(RunnerBrokenError) as raised:
        runner.clear(1)
    assert str(raised.value) == str(detector.failure)
    return str(detector.failure)


@pytest.mark.parametrize(("error", "sentence"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
@pytest.mark.parametrize("fail", [fail_as_follower, fail_as_reader_of_tokens, fail_as_rank_0])
def test_the_reason_is_kept(fail: Callable[[Exception], str], error: Exception, sentence: str) -> None:
    assert fail(error).endswith(f"failed: {sentence}")
