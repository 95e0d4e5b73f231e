"""What every rank but rank 0 does: take a command, do it, take the next."""

import contextlib
import threading

import structlog

from headrace_worker.parallel.channel import Channel
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.messages import Answer, Clear, Draw, Record, Step, Stop
from headrace_worker.parallel.recording import RecordingFailedError
from headrace_worker.parallel.stage import DRAWING_FAILED, StageResult, StageRunner
from headrace_worker.parallel.team import Team
from headrace_worker.plan import StepPlan, StepResult
from headrace_worker.runner.graphs import Recorder

log = structlog.get_logger(__name__)


class Follower:
    """Carries out rank 0's commands on a thread of its own, until told to stop or a rank is lost."""

    def __init__(self, stage: StageRunner, team: Team, recorder: Recorder | None = None) -> None:
        """`recorder`: for when rank 0 has steps recorded, which has one just where the others do."""
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._stage = stage
        self._team = team
        self._recorder = recorder
        self._channel = Channel(team.host, team.topology.pp - 1)
        self._undrawn: StepPlan | None = None  # a guided plan whose masks are to come
        self._thread = threading.Thread(target=self._run, name="headrace-follower", daemon=True)

    def start(self) -> None:
        self._team.watch.call(self.abandon)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until rank 0 has said that it is over, or for so long."""
        self.ended.wait(seconds)

    def abandon(self, error: RankLostError) -> None:
        """Another rank is lost: end, even where the thread still waits for it."""
        if self.ended.is_set():
            return
        self.failure = self.failure or error
        self.ended.set()

    def _run(self) -> None:
        try:
            while self._obey():
                pass
        except BaseException as error:
            if not isinstance(error, RankLostError):
                log.error("step_failed", rank=self._team.topology.rank, error=type(error).__name__)
                self._team.watch.fail(f"{type(error).__name__} in a step")  # and this rank's own failure is named alike
            self.failure = self.failure or error
        finally:
            self.ended.set()

    def _obey(self) -> bool:
        command = self._channel.next_command()
        match command:
            case Step():
                self._run_step(command)
            case Draw():
                self._draw(command)
            case Clear(blocks, rows):
                self._stage.runner.clear(blocks, rows)
            case Record(max_tokens):
                assert self._recorder is not None
                with contextlib.suppress(RecordingFailedError):  # of which rank 0 knows as well, and says so
                    self._stage.record(self._recorder, max_tokens)
            case Stop():
                return False
        return True

    def _run_step(self, step: Step) -> None:
        done = self._stage.run(step)
        if not (self._team.topology.samples and step.plan.work):
            return
        if step.plan.guided:
            self._undrawn = step.plan
        else:
            self._answer(step.plan, done)

    def _draw(self, draw: Draw) -> None:
        plan, self._undrawn = self._undrawn, None
        assert plan is not None and plan.step == draw.step
        self._answer(plan, self._stage.draw(draw.unpacked()))

    def _answer(self, plan: StepPlan, done: StageResult) -> None:
        if done.samples is not None:
            self._channel.answer(Answer(done.samples.to_result(plan.step)))
        else:
            draws = sum(work.sample for work in plan.work)
            error = DRAWING_FAILED if done.error is not None else ""
            self._channel.answer(Answer(StepResult(plan.step, [0] * draws, {}, {}), error))
