"""Answers of the rank that samples: sent from a thread of their own, in order; what fails there ends the rank."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.core.plan import StepPlan, Work
from headrace_worker.ranks.follower import AnswerSender
from headrace_worker.ranks.messages import Answer
from headrace_worker.ranks.stage import DRAWING_FAILED, StageResult
from headrace_worker.sampler import SampleOutput
from support.worker.recording_device import RecordingDevice


class FakeChannel:
    """Keeps the answers and the threads that sent them."""

    def __init__(self) -> None:
        self.sent: list[Answer] = []
        self.threads: set[str] = set()

    def send_answer(self, answer: Answer) -> None:
        self.sent.append(answer)
        self.threads.add(threading.current_thread().name)


class SlowDevice(RecordingDevice):
    """Its downloads end once they may."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()

    def note(self, call: str, stream: str = "") -> None:
        if call == "download.wait":
            assert self.done.wait(30)
        super().note(call, stream)


@pytest.fixture
def device() -> SlowDevice:
    made = SlowDevice()
    made.use()
    return made


def launched(device: RecordingDevice, step: int) -> tuple[StepPlan, StageResult]:
    """A step of one row, whose token is its number."""
    plan = StepPlan(step, [], [], [], [Work(0, step, 1, True)])
    return plan, StageResult(SampleOutput(device, torch.tensor([step]), torch.ones(1, dtype=torch.bool), None))


def start(
    device: RecordingDevice,
    channel: FakeChannel,
    on_failure: Callable[[BaseException], None],
    check: Callable[[], None] = lambda: None,
) -> AnswerSender:
    sender = AnswerSender(channel, device, check, on_failure)  # type: ignore[arg-type]
    sender.start()
    return sender


def test_a_step_is_submitted_before_the_last_one_is_read(device: SlowDevice) -> None:
    channel, failures = FakeChannel(), list[BaseException]()
    sender = start(device, channel, failures.append)
    for step in (1, 2):
        sender.submit(*launched(device, step))
    plan = launched(device, 3)[0]
    sender.submit(plan, StageResult())  # nothing sampled on this rank, as of a chunk
    sender.submit(plan, StageResult(error=ValueError("a secret detail")))
    assert channel.sent == []
    device.done.set()
    sender.stop()
    sender.join()
    assert [answer.result.step for answer in channel.sent] == [1, 2, 3, 3]
    assert [answer.result.tokens for answer in channel.sent] == [[1], [2], [0], [0]]
    assert [answer.error for answer in channel.sent] == ["", "", "", DRAWING_FAILED]
    assert channel.threads == {"headrace-answers"} and failures == []
    assert device.calls["headrace-answers"] == ["use", "download.wait", "download.wait"]
    assert "download.wait" not in device.calls[threading.current_thread().name]
    assert all(thread.name != "headrace-answers" for thread in threading.enumerate())


def test_a_failure_is_reported_once_and_ends_the_thread(device: SlowDevice) -> None:
    channel, failures = FakeChannel(), list[BaseException]()
    sender = start(device, channel, failures.append)
    plan, done = launched(device, 1)
    assert done.samples is not None
    broken: Any = done.samples
    broken.logprobs = object()  # its reading raises
    device.done.set()
    sender.submit(plan, done)
    sender.submit(*launched(device, 2))
    sender.join()
    assert [type(error) for error in failures] == [AttributeError] and channel.sent == []


def test_tokens_that_are_read_after_a_loss_are_not_sent(device: SlowDevice) -> None:
    """On a GPU their wait ends as if they were computed, once the group of a lost rank is aborted."""
    channel, failures = FakeChannel(), list[BaseException]()
    detector = FailureDetector(1)
    sender = start(device, channel, failures.append, detector.check)
    sender.submit(*launched(device, 1))
    detector.fail("a step hangs")
    device.done.set()
    sender.join()
    assert [type(error) for error in failures] == [RankLostError] and channel.sent == []
