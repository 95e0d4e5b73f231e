"""The loop of every rank but rank 0: receive a command, launch it, receive the next.

The rank that samples waits for its tokens on another thread, so that the next step is launched meanwhile.
"""

import contextlib
import threading

import structlog

from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.plan import StepPlan
from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.ranks.answer_sender import AnswerSender
from headrace_worker.ranks.channel import Channel
from headrace_worker.ranks.failure import failure_sentence
from headrace_worker.ranks.messages import Clear, Draw, RecordSteps, Step, StopRank
from headrace_worker.ranks.recording import RecordingFailedError
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.ranks.team import Team

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
        """Of the thread that runs the steps, or of the one that reads their tokens: this rank ends."""
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
