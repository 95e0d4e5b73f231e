"""Steps that the ranks of a stage record together, so that either all of them replay or none does.

    every rank, for each size:   rehearse ── sums meet ──▶ record ── nothing runs ──▶ "did it work?" of all ranks

Which step is replayed follows from the plan alone, so the sums in the recordings meet as those outside do.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from headrace_proto.errors import HeadraceError
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.rounds import Rounds
from headrace_worker.parallel.watch import Watch
from headrace_worker.runner.graphs import Recorder

PATIENCE_SECONDS = 60.0


class RecordingFailedError(HeadraceError):
    """A rank could not record a step: all ranks run theirs kernel by kernel. They are still in step."""


class TogetherRecorder:
    """This rank's recorder among those of the others. All ranks give it the same steps in the same order."""

    def __init__(self, recorder: Recorder, rounds: Rounds, watch: Watch, patience: float = PATIENCE_SECONDS) -> None:
        """`patience`: seconds that a rank which failed waits for the others to have tried as well."""
        self._recorder = recorder
        self._rounds = rounds
        self._watch = watch
        self._patience = patience

    def rehearse(self, step: Callable[[], None]) -> None:
        """Raises RankLostError, also when this rank's rehearsal raises.

        It is a step like any other: whoever leaves it in the middle leaves peers waiting in a sum that nobody can call
        off, and the ranks are out of step. The replica ends, as it would if a step failed while it serves.
        """
        try:
            self._recorder.rehearse(step)
        except RankLostError:
            raise
        except Exception as error:
            self._watch.fail(
                f"{type(error).__name__} in a step that was to be recorded (--cuda-graphs off does without)"
            )
            raise RankLostError(str(self._watch.failure)) from error

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What replays the step, once it is recorded on every rank.

        Raises RecordingFailedError on all ranks when it is not on one of them, and RankLostError.
        """
        replay, failed = None, ""
        try:
            replay = self._recorder.record(step)
        except Exception as error:
            # A sum that cannot be recorded looks like a broken connection; it is one if the watch knows who is lost.
            self._watch.check()
            failed = (
                type(error.__cause__ or error).__name__ if isinstance(error, RankLostError) else type(error).__name__
            )
        with self._patient() if failed else contextlib.nullcontext():
            answers = self._rounds.say(failed)
        for rank, answer in enumerate(answers):
            if answer:
                raise RecordingFailedError(f"rank {rank} could not record a step ({answer})")
        assert replay is not None
        return replay

    @contextlib.contextmanager
    def _patient(self) -> Iterator[None]:
        """End the replica when the others do not come: NCCL may want to hear of this rank before it records a sum."""
        sentence = f"it could not record a step, and the others did not get through theirs in {self._patience:.0f} s"
        timer = threading.Timer(self._patience, lambda: self._watch.fail(sentence))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
