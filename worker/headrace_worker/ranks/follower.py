"""The loop of every rank but rank 0: receive a command, launch it, receive the next.

The rank that samples waits for its tokens on another thread, so that the next step is launched meanwhile.
"""

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

import structlog

from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.device.rank_device import GraphRecorder, RankDevice
from headrace_worker.ranks.channel import Channel
from headrace_worker.ranks.failure import failure_sentence
from headrace_worker.ranks.messages import Answer, Clear, Draw, RecordSteps, Step, StopRank
from headrace_worker.ranks.recording import RecordingFailedError
from headrace_worker.ranks.stage import DRAWING_FAILED, StageResult, StageRunner
from headrace_worker.ranks.team import Team

STOP_SECONDS = 4.0


class AnswerSender:
    """The thread that waits for the tokens of each step and sends them to rank 0, in the order of the launches.

    follower:      launch step n ── submit ── launch step n + 1 ── submit ── ...
    this thread:                      └─ wait for the copy of step n ── send ── wait for that of step n + 1 ── ...

    Rank 0 bounds how many answers are waiting.
    """

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


log = structlog.get_logger(__name__)


class Follower:
    """Runs rank 0's commands on the thread that calls `run`, until `StopRank` or until a rank is lost."""

    def __init__(self, stage: StageRunner, team: Team, recorder: GraphRecorder | None = None) -> None:
        """`recorder`: for `RecordSteps` commands; rank 0 has one exactly where the others do."""
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._stage = stage
        self._team = team
        self._recorder = recorder
        self._channel = Channel(team.host, team.topology.pp - 1)
        self._undrawn: StepPlan | None = None  # a guided plan whose masks have not arrived
        # A channel of its own: its thread sends while the follower's receives.
        answers = Channel(team.host, team.topology.pp - 1)
        self._answers = AnswerSender(answers, stage.runner.device, team.detector.check, self._step_failed)
        team.detector.on_loss(self.abandon)

    def join(self, seconds: float) -> None:
        """Wait until this rank has ended, for `seconds` at most."""
        self.ended.wait(seconds)

    def abandon(self, error: RankLostError) -> None:
        """Another rank is lost: end, even if the thread still waits for it."""
        if self.ended.is_set():
            return
        self.failure = self.failure or error
        self.ended.set()

    def run(self) -> None:
        """Runs commands until the end of this rank."""
        try:
            if self._team.topology.samples:
                self._answers.start()
            while self._run_command():
                pass
            self._answers.stop()
            self._answers.join()
        except BaseException as error:
            self._step_failed(error)
        finally:
            self._answers.stop()
            self.ended.set()

    def _step_failed(self, error: BaseException) -> None:
        """Ends this rank. Called by the thread that runs the steps, or by the thread that reads their tokens."""
        if not isinstance(error, RankLostError):
            log.error("step_failed", rank=self._team.topology.rank, error=type(error).__name__)
            # This rank's own failure has the same form as that of another one.
            self._team.detector.fail(failure_sentence(self._stage.runner.device, error))
        self.failure = self.failure or error
        self.ended.set()

    def _run_command(self) -> bool:
        command = self._channel.receive_command()
        match command:
            case Step():
                self._run_step(command)
            case Draw():
                self._draw(command)
            case Clear(blocks, rows):
                self._stage.runner.clear(blocks, rows)
            case RecordSteps():
                assert self._recorder is not None
                with contextlib.suppress(RecordingFailedError):  # raised on rank 0 as well, which reports it
                    self._stage.record(self._recorder)
            case StopRank():
                return False
        return True

    def _run_step(self, step: Step) -> None:
        done = self._stage.run(step)
        if not (self._team.topology.samples and step.plan.work):
            return
        if step.plan.guided:
            self._undrawn = step.plan
        else:
            self._answers.submit(step.plan, done)

    def _draw(self, draw: Draw) -> None:
        plan, self._undrawn = self._undrawn, None
        assert plan is not None and plan.step == draw.step
        self._answers.submit(plan, self._stage.draw(draw.unpacked()))
