"""How fast a replica's steps are, from its frames: compared with its own prediction, its peers and its past."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from headrace_proto.replica_pb2 import Load, StepModel

WINDOW_SECONDS = 1.0  # seconds of busy steps that one measurement covers
WINDOW_STEPS = 2
PROBE_STEPS = 4  # steps that measure a slow replica, which gets few requests
SLOW_WINDOWS = 2  # in a row: one may contain a pause
SLOW = 3.0  # times as long as its peers take for the same step
RECOVERED = 2.0
PROBE_SHARE = 25  # a slow replica without work gets one of so many requests, once a second at most
PROBE_SECONDS = 1.0
LONGEST_PROBE_PAUSE = 8.0  # then it gets one in any case
BASELINE_SECONDS = 300.0  # in which a lasting difference between machines becomes the replica's normal speed


@dataclass(slots=True)
class _Frame:
    step: int
    at: float
    running: int
    idle_steps: int
    predicted: float  # seconds of the newest step


class StepMilliseconds(NamedTuple):
    """Milliseconds of a step without prompts, of a StepModel: plain numbers, which many comparisons read."""

    base: float
    per_decode_sequence: float
    per_kv_token: float

    @classmethod
    def of(cls, model: StepModel) -> "StepMilliseconds":
        return cls(model.base_ms, model.per_decode_sequence_ms, model.per_kv_token_ms)

    def step(self, decodes: float, kv_tokens: float) -> float:
        """Milliseconds of a step of so many sequences, with so many tokens in the cache."""
        return self.base + self.per_decode_sequence * decodes + self.per_kv_token * kv_tokens


class StepSpeed:
    """One replica's speed. `slow` is set after SLOW_WINDOWS slow windows, and cleared after one that is not slow."""

    def __init__(self) -> None:
        self.slow = False
        self.slowness = 1.0  # measured in the last window: 1 = like its peers
        self.measured_at = -BASELINE_SECONDS  # when the last window ended
        self._probed_at = 0.0
        self._passed_over = 0  # requests since then
        self._last: _Frame | None = None
        self._seconds = self._predicted = self._decodes = 0.0
        self._steps = 0
        self._slow_windows = 0
        self._baseline: float | None = None

    def restart(self) -> None:
        """Discards the unfinished window."""
        self._last = None
        self._seconds = self._predicted = self._decodes = 0.0
        self._steps = 0

    def add(self, step: int, load: Load, now: float) -> None:
        """A frame of the replica, whose step counter moved."""
        last = self._last
        self._last = _Frame(step, now, load.running, load.counters.idle_steps, load.predicted_step_ms / 1e3)
        if last is None or not (last.running and load.running and self._last.predicted):
            return  # idle ticks are no measure
        if last.idle_steps != self._last.idle_steps:
            return  # it was idle between the two frames
        steps = step - last.step
        self._seconds += now - last.at
        self._predicted += steps * self._last.predicted
        self._decodes += steps * load.running
        self._steps += steps

    @property
    def complete(self) -> bool:
        """Whether a window can be evaluated."""
        if self.slow:
            return self._steps >= PROBE_STEPS
        return self._seconds >= WINDOW_SECONDS and self._steps >= WINDOW_STEPS

    def evaluate(self, own: StepMilliseconds, peers: Sequence[StepMilliseconds], kv_tokens: float, now: float) -> None:
        """Ends a complete window. peers: those of the other ready replicas; without any it is not slow."""
        decodes = self._decodes / self._steps
        others = [step_ms for peer in peers if (step_ms := peer.step(decodes, kv_tokens)) > 0]
        mine = own.step(decodes, kv_tokens)
        if others and mine > 0 and self._predicted > 0:
            self._judge(self._seconds / self._predicted * mine / median(others), now)
        last = self._last
        self.restart()
        self._last = last

    def probe_due(self, now: float) -> bool:
        """Called for each request that may be placed on a slow replica: whether this one tries it again."""
        self._passed_over += 1
        pause = now - self._probed_at
        if now - self.measured_at < PROBE_SECONDS or pause < PROBE_SECONDS:
            return False  # its streams measure it, or the last probe is recent
        if self._passed_over < PROBE_SHARE and pause < LONGEST_PROBE_PAUSE:
            return False
        self._probed_at, self._passed_over = now, 0
        self.restart()
        return True

    def _judge(self, slowness: float, now: float) -> None:
        normal = max(1.0, self._baseline or slowness)
        if slowness < (RECOVERED if self.slow else SLOW) * normal:
            self._slow_windows, self.slow = 0, False
        else:
            self._slow_windows += 1
            if not self.slow and self._slow_windows >= SLOW_WINDOWS:
                self.slow, self._probed_at, self._passed_over = True, now, 0
        if not self.slow:
            known = self._baseline if self._baseline is not None else slowness
            share = min(1.0, max(0.0, now - self.measured_at) / BASELINE_SECONDS)
            self._baseline = min(slowness, known + (slowness - known) * share)
        self.slowness, self.measured_at = slowness, now
