"""The thread of the rank that samples which waits for the tokens of each step and sends them to rank 0.

follower:      launch step n ── submit ── launch step n + 1 ── submit ── ...
this thread:                      └─ wait for the copy of step n ── send ── wait for that of step n + 1 ── ...
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.ranks.channel import Channel
from headrace_worker.ranks.messages import Answer
from headrace_worker.ranks.stage import DRAWING_FAILED, StageResult

STOP_SECONDS = 4.0


class AnswerSender:
    """Sends answers in the order in which their steps were launched. Rank 0 bounds how many are waiting."""

    def __init__(
        self,
        channel: Channel,
        device: RankDevice,
        check: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`channel`: used by this thread only. `check` raises once a rank is lost: tokens are not valid then.

        `on_failure`: called on the thread with what ends it early.
        """
        self._channel = channel
        self._device = device
        self._check = check
        self._on_failure = on_failure
        self._launched: SimpleQueue[tuple[StepPlan, StageResult] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-answers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan, done: StageResult) -> None:
        """A launched step with work, whose copy to the host has begun. Does not wait."""
        self._launched.put((plan, done))

    def stop(self) -> None:
        """Ends the thread after the answers that were submitted. Does not wait."""
        self._launched.put(None)

    def join(self) -> None:
        """Waits until a stopped thread has ended, for `STOP_SECONDS` at most."""
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._device.use()
            # The last sends are not awaited: an answer that rank 0 does not receive any more is not needed.
            while (launched := self._launched.get()) is not None:
                answer = _answer(*launched)
                self._check()
                self._channel.send_answer(answer)
        except BaseException as error:
            self._on_failure(error)


def _answer(plan: StepPlan, done: StageResult) -> Answer:
    if done.samples is not None:
        return Answer(done.samples.to_result(plan.step))
    draws = sum(work.sample for work in plan.work)
    error = DRAWING_FAILED if done.error is not None else ""
    return Answer(StepResult(plan.step, [0] * draws, {}, {}), error)
