"""Records a window of steps on request, bounded in number and time.

    open ──▶ waiting ──first step──▶ probe ──▶ recording ──▶ writing (on its own thread) ──▶ done
                 └──────────────── deadline, or no further step ──────────────┘

The torch profiler belongs to the thread whose operators it records, so it is started and stopped between two steps, on
the thread that runs them. The time to stop it grows with what was recorded; it is measured with a first recorded step,
the probe, and the window is limited so that the pause stays short.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import structlog

from headrace_base.errors import counted
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import StepPlan
from headrace_worker.profiling.report import (
    DEFAULT_STEPS,
    MAX_SECONDS,
    MAX_STEPS,
    Operator,
    ProfileFailedError,
    ProfileFolderError,
    ProfileRefusedError,
    ProfileReport,
)

log = structlog.get_logger(__name__)

PAUSE_SECONDS = 0.25
"""Maximum delay of the steps at the end of a window of more than the default size. Writing holds the GIL for about as
long again."""

_IDLE = nullcontext()


class TraceRecorder(Protocol):
    """One recording. All but `write` are called on the thread that runs the steps."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def mark(self, name: str) -> AbstractContextManager[object]:
        """A named span around what is recorded inside."""
        ...

    def write(self, path: Path) -> list[Operator]:
        """Writes the trace; returns the operators that took most of its time. After `stop`, on any thread."""
        ...


class Window:
    """A profile that is being recorded. Call `wait` on a thread that may block."""

    def __init__(self, steps: int, seconds: float, began: float) -> None:
        self.steps = steps
        self.deadline = began + seconds
        self.recorded = 0
        self.note = ""
        self.probe: TraceRecorder | None = None  # the recording of the first step, used if no other step follows
        self.recorder: TraceRecorder | None = None
        self.first = self.last = 0.0
        self._done = threading.Event()
        self._report: ProfileReport | None = None
        self._error = ""

    def wait(self, seconds: float) -> ProfileReport:
        """The report. Raises ProfileFailedError when the profile failed, or is not done within `seconds`."""
        if not self._done.wait(seconds):
            raise ProfileFailedError("no step has ended the window yet: the trace is written after the next step")
        if self._report is None:
            raise ProfileFailedError(self._error)
        return self._report

    def finish(self, report: ProfileReport | None, error: str = "") -> None:
        self._report, self._error = report, error
        self._done.set()


class StepProfiler:
    """One rank's windows, one at a time. `open` from any thread; `step` around every step, on the thread that runs it.

    An error of the profiler never affects the step.
    """

    def __init__(
        self,
        folder: Path,
        label: str,
        make: Callable[[], TraceRecorder],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`label`: prefix of the file names."""
        self._folder = folder
        self._label = label
        self._make = make
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._open: Window | None = None  # until its trace is written
        self._window: Window | None = None  # the one that steps are recorded in

    def warm_up(self) -> None:
        """Initialises the profiler, which takes a second or more once per process, before the replica serves."""
        try:
            recorder = self._make()
            recorder.start()
            recorder.stop()
        except Exception as error:
            log.warning("profiler_unusable", error=f"{type(error).__name__}: {error}")

    def open(self, steps: int, seconds: float) -> Window:
        """Records the next steps. Raises ProfileRefusedError when a window is open, or a bound is out of range."""
        if not 1 <= steps <= MAX_STEPS:
            raise ProfileRefusedError(f"a profile holds 1 to {MAX_STEPS} steps, not {steps}")
        if not 0 < seconds <= MAX_SECONDS:
            raise ProfileRefusedError(f"a profile takes at most {MAX_SECONDS:g} seconds, not {seconds:g}")
        with self._lock:
            if self._open is not None:
                raise ProfileRefusedError("a profile of this replica is being recorded: try again when it is written")
            self._open = self._window = Window(steps, seconds, self._clock())
            return self._open

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Context of a step. One without work ends the window: the next request may be far off."""
        window = self._window
        return _IDLE if window is None else self._record_step(window, plan)

    @contextmanager
    def _record_step(self, window: Window, plan: StepPlan) -> Iterator[None]:
        mark: AbstractContextManager[object] | None = None
        try:
            mark = self._begin(window, plan)
        except Exception as error:
            self._fail(window, error)
        try:
            yield
        finally:
            try:
                self._end(window, plan, mark)
            except Exception as error:
                self._fail(window, error)

    def _begin(self, window: Window, plan: StepPlan) -> AbstractContextManager[object] | None:
        if not plan.work or self._clock() >= window.deadline:
            self._close(window)
            return None
        if window.recorder is None:
            window.recorder = self._make()
            window.first = self._clock()
            window.recorder.start()
        mark = window.recorder.mark(_title(plan))
        mark.__enter__()
        return mark

    def _end(self, window: Window, plan: StepPlan, mark: AbstractContextManager[object] | None) -> None:
        if mark is None:
            return
        mark.__exit__(None, None, None)
        window.last = self._clock()
        if window.probe is None:
            self._end_probe(window)
        else:
            window.recorded += 1
        if window.recorded >= window.steps or self._clock() >= window.deadline:
            self._close(window)

    def _end_probe(self, window: Window) -> None:
        """The first step is over: limits the window by the time that stopping took."""
        recorder, window.recorder = window.recorder, None
        assert recorder is not None
        recorder.stop()
        window.probe = recorder
        limit = max(DEFAULT_STEPS, int(PAUSE_SECONDS / max(self._clock() - window.last, 1e-6)))
        if limit < window.steps:
            window.note = f"{limit} of {window.steps} steps: collecting more would delay the engine"
            window.steps = limit

    def _close(self, window: Window) -> None:
        """Ends the window between two steps; the trace is written on another thread."""
        self._window = None
        recorder, window.recorder = window.recorder, None
        if recorder is not None:
            recorder.stop()
        elif window.probe is not None:
            recorder, window.recorded, window.note = window.probe, 1, "one step: no other began in time"
        else:
            self._finish(window, None, "no step ran in that time: send requests while a profile is recorded")
            return
        window.probe = None
        threading.Thread(target=self._write, args=(window, recorder), name="headrace-profile", daemon=True).start()

    def _write(self, window: Window, recorder: TraceRecorder) -> None:
        now = self._now()
        path = self._folder / f"{self._label}-{now:%Y%m%dT%H%M%S}-{now.microsecond // 1000:03}.trace.json.gz"
        try:
            operators = recorder.write(path)
        except Exception as error:
            log.error("profile_not_written", error=type(error).__name__)
            self._finish(window, None, f"the trace could not be written to {path}: {error}")
            return
        seconds = window.last - window.first
        log.info("profile_written", path=str(path), steps=window.recorded)
        self._finish(window, ProfileReport(str(path), window.recorded, seconds, operators, window.note))

    def _fail(self, window: Window, error: Exception) -> None:
        self._window = None
        recorder, window.recorder = window.recorder, None
        if recorder is not None:
            with suppress(Exception):
                recorder.stop()
        log.error("profiler_failed", error=f"{type(error).__name__}: {error}")
        self._finish(
            window, None, f"the profiler failed ({type(error).__name__}: {error}); the steps were not affected"
        )

    def _finish(self, window: Window, report: ProfileReport | None, error: str = "") -> None:
        with self._lock:
            self._open = None
        window.finish(report, error)


def make_profiler(config: ReplicaConfig, rank: int) -> StepProfiler | None:
    """This rank's profiler if the replica has a folder for profiles. Raises ProfileFolderError."""
    if config.profile_dir is None:
        return None
    from headrace_worker.profiling.recorder import TorchTraceRecorder

    folder = Path(config.profile_dir)
    _check(folder)
    return StepProfiler(folder, f"{config.replica_id}-g{config.generation}-r{rank}", TorchTraceRecorder)


def _check(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ProfileFolderError(
            f"profiles cannot be written to {folder} ({os.strerror(error.errno or 0)}): give --profile a folder that "
            "the ranks can write"
        ) from error


def _title(plan: StepPlan) -> str:
    tokens = sum(work.count for work in plan.work)
    return f"step {plan.step}: {counted(len(plan.work), 'request')}, {counted(tokens, 'token')}"
