"""Steps that the ranks of a stage record together, so that either all of them replay or none does.

    every rank:                  allocate what all sizes use ──▶ all-gather of the outcomes
    every rank, for each size:   warm up ── collectives run ──▶ record ── nothing runs ──▶ all-gather of the outcomes

Which step is replayed follows from the plan alone, so the collectives in recordings match as those outside do.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from headrace_base.errors import HeadraceError
from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.rendezvous import StoreAllGather
from headrace_worker.device.loss import loss_sentence
from headrace_worker.device.rank_device import GraphRecorder, RankDevice

T = TypeVar("T")

RECORD_TIMEOUT_SECONDS = 60.0


class RecordingFailedError(HeadraceError):
    """A rank could not record a step: all ranks run theirs kernel by kernel. They are still synchronized."""


class CollectiveRecorder:
    """This rank's recorder, synchronized with the others: all ranks record the same steps in the same order."""

    def __init__(
        self,
        recorder: GraphRecorder,
        all_gather: StoreAllGather,
        detector: FailureDetector,
        device: RankDevice,
        timeout: float = RECORD_TIMEOUT_SECONDS,
    ) -> None:
        """`timeout`: seconds that a rank which failed waits for the attempts of the others."""
        self._recorder = recorder
        self._all_gather = all_gather
        self._detector = detector
        self._device = device
        self._timeout = timeout

    def warm_up(self, step: Callable[[], object]) -> None:
        """Raises RankLostError, also when this rank's own run raises.

        It is a step like any other: a rank that leaves it in the middle leaves its peers waiting in a collective that
        cannot be cancelled, and the ranks are no longer synchronized. The replica ends, as it would if a step failed
        while it serves.
        """
        try:
            self._recorder.warm_up(step)
        except RankLostError:
            raise
        except Exception as error:
            self._end_if_lost(error)
            self._detector.fail(
                f"{type(error).__name__} in a step that was to be recorded (--cuda-graphs off avoids this)"
            )
            raise RankLostError(str(self._detector.failure)) from error

    def allocate(self, make: Callable[[], T]) -> T:
        """What `make` allocates, once every rank has allocated its own. Raises as `record`."""
        return self._on_all_ranks(lambda: self._recorder.allocate(make), "allocate what recorded steps use")

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Returns what replays the step, and its outputs, once it is recorded on every rank.

        Raises RecordingFailedError on all ranks when one of them could not record it, and RankLostError.
        """
        return self._on_all_ranks(lambda: self._recorder.record(step), "record a step")

    def seconds(self, replay: Callable[[], None]) -> float:
        """Seconds of a replay on the slowest rank. Raises as `record`."""
        own = self._on_all_ranks(lambda: self._recorder.seconds(replay), "replay a step")
        return max(map(float, self._all_gather.gather(repr(own))))

    def _on_all_ranks(self, attempt: Callable[[], T], what: str) -> T:
        """what: for sentences, "could not …"."""
        made: list[T] = []
        failed = ""
        try:
            made.append(attempt())
        except Exception as error:
            # A collective that cannot be recorded looks like a broken connection; it is one if a rank is lost.
            self._detector.check()
            self._end_if_lost(error.__cause__ or error)
            failed = (
                type(error.__cause__ or error).__name__ if isinstance(error, RankLostError) else type(error).__name__
            )
        with self._fail_after_timeout(what) if failed else contextlib.nullcontext():
            answers = self._all_gather.gather(failed)
        for rank, answer in enumerate(answers):
            if answer:
                raise RecordingFailedError(f"rank {rank} could not {what} ({answer})")
        return made[0]

    def _end_if_lost(self, error: BaseException) -> None:
        """Raises RankLostError, and ends the other ranks, if the error has ended this rank's device."""
        if loss := loss_sentence(self._device, error):
            self._detector.fail(loss)
            raise RankLostError(str(self._detector.failure)) from error

    @contextlib.contextmanager
    def _fail_after_timeout(self, what: str) -> Iterator[None]:
        """End the replica when the others do not finish: NCCL may wait for this rank before it records a collective."""
        sentence = f"it could not {what}, and the others did not finish theirs in {self._timeout:.0f} s"
        timer = threading.Timer(self._timeout, lambda: self._detector.fail(sentence))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
