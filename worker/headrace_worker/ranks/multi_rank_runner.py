"""All ranks of a replica as one runner: rank 0 sends the others each command that it runs itself."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from headrace_base.errors import HeadraceError
from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.guide import Mask
from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.device.rank_device import GraphRecorder, RankDevice
from headrace_worker.ranks.channel import Channel
from headrace_worker.ranks.failure import failure_sentence
from headrace_worker.ranks.messages import Answer, Clear, Draw, Drawn, RecordSteps, Step, StopRank
from headrace_worker.ranks.recording import RecordingFailedError
from headrace_worker.ranks.stage import StageResult, StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.rank_runner import Runner

Result = TypeVar("Result")


class DrawingFailedError(HeadraceError):
    """Tokens of a step could not be sampled; the ranks are still synchronized."""


@dataclass(slots=True)
class StepTicket:
    """A launched step: this rank's part, whether it samples tokens, and whether it has work at all."""

    step: int
    part: StageResult
    draws: bool
    works: bool


class MultiRankRunner:
    """A `StepRunner` on rank 0. A step that fails on any rank ends the replica: the ranks may be out of sync."""

    def __init__(self, runner: Runner, stage: StageRunner, team: Team) -> None:
        self.layout: CacheLayout = runner.layout
        self.num_blocks = runner.num_blocks
        self.max_rows = runner.max_rows
        self.max_len = runner.max_len
        self.device: RankDevice = runner.device
        self._stage = stage
        self._team = team
        self._channel = Channel(team.host, team.topology.pp - 1)
        self._drawn: list[Drawn] = []

    def launch(self, plan: StepPlan) -> StepTicket:
        drawn, self._drawn = self._drawn, []
        step = Step(plan, drawn)
        draws = any(work.sample for work in plan.work)
        return StepTicket(plan.step, self._guarded(lambda: self._run(step)), draws, bool(plan.work))

    def draw(self, handle: StepTicket, masks: Mapping[int, Mask]) -> None:
        """With one stage this rank samples, and the others wait for its tokens; with several the last stage samples."""
        topology = self._team.topology
        if topology.samples:
            handle.part = self._guarded(lambda: self._stage.draw(masks))
        else:
            self._guarded(lambda: self._channel.send_command(Draw.of(handle.step, masks), topology.sampler))

    def collect(self, handle: StepTicket) -> StepResult:
        empty = StepResult(handle.step, [], {}, {})
        if self._team.topology.pp == 1:
            if handle.part.error is not None:
                raise handle.part.error
            samples = handle.part.samples
            return self._guarded(lambda: samples.to_result(handle.step)) if samples is not None else empty
        if not handle.works:
            return empty
        answer = self._guarded_answer()
        if answer.result.step != handle.step:
            raise self._broken(f"the last stage answered step {answer.result.step} when {handle.step} was expected")
        if handle.draws:
            self._drawn.append(Drawn(handle.step, answer.result.tokens))
        if answer.error:
            raise DrawingFailedError(answer.error)
        return answer.result

    def clear(self, blocks: int, rows: int = 1) -> None:
        """Reset the first blocks and rows, on all ranks."""
        self._guarded(lambda: self._clear(blocks, rows))

    def record(
        self, recorder: GraphRecorder, done: Callable[[float], None] = lambda fraction: None
    ) -> tuple[list[int], list[int]]:
        """Record steps on all ranks; returns the sizes.

        Raises RecordingFailedError when a rank cannot: then all run as before. Raises RunnerBrokenError.
        """
        return self._guarded(lambda: self._record(recorder, done))

    def stop(self) -> None:
        """Stop the other ranks in an orderly way; nothing is launched after this."""
        with contextlib.suppress(RankLostError):  # a lost rank needs no StopRank
            self._team.detector.check()
            self._team.detector.guard(self._send_stop)

    def _send_stop(self) -> None:
        self._channel.send_command(StopRank())
        self._channel.flush()

    def _run(self, step: Step) -> StageResult:
        self._channel.send_command(step)
        return self._stage.run(step)

    def _clear(self, blocks: int, rows: int) -> None:
        self._channel.send_command(Clear(blocks, rows))
        self._stage.runner.clear(blocks, rows)

    def _record(self, recorder: GraphRecorder, done: Callable[[float], None]) -> tuple[list[int], list[int]]:
        self._channel.send_command(RecordSteps())
        return self._stage.record(recorder, done)

    def _guarded(self, call: Callable[[], Result]) -> Result:
        try:
            self._team.detector.check()
            result = call()
            self._team.detector.check()  # a wait that the abort of a group has ended brings no valid result
            return result
        except RankLostError as error:
            raise RunnerBrokenError(str(error)) from error
        except RecordingFailedError:  # on all ranks
            raise
        except Exception as error:
            raise self._broken(failure_sentence(self.device, error)) from error

    def _guarded_answer(self) -> Answer:
        return self._guarded(lambda: self._channel.receive_answer(self._team.topology.sampler))

    def _broken(self, sentence: str) -> RunnerBrokenError:
        self._team.detector.fail(sentence)
        return RunnerBrokenError(str(self._team.detector.failure))
