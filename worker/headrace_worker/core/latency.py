"""Predicts how long a step takes, fitted while serving.

step_seconds ~ base + a * prefill_tokens + b * decode_sequences + c * kv_tokens

Least squares over the recent steps, with no coefficient below zero: sums over the steps, in which old ones decay
exponentially, and after each step some sweeps of coordinate descent from the previous coefficients (Franc, Hlavac and
Navara, Sequential Coordinate-Wise Algorithm for the Non-negative Least Squares Problem, 2005). Each sweep lowers the
error over the remembered steps, so that the fit cannot diverge. A coefficient without recent observations, such as that
of prompts on a replica that only decodes, keeps its value. Features are scaled so that one constant fits all.

The steps that were timed at start keep the weight of a few steps: while all recent ones are alike, these decide which
share of their time is the step's own and which that of each sequence in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_SCALES = (1.0, 1e-3, 1e-2, 1e-5)
_DECAY = 0.995
_DAMPING = 0.001  # weight of a coefficient's previous value: about a thousandth of a step of average size
_SWEEPS = 2
_FIRST_SWEEPS = 200
_LONGEST = 4.0  # times its prediction, that a step counts for: one that was paused says nothing of the next ones
_LONG_STEPS = 3  # one after another: further ones count whole, since the replica has become slower
_TIMED_WEIGHT = 4.0  # weight of a step timed at start, in recent steps; all recent steps have the weight of 200
# While steps are too similar, the cost of prompts is attributed to tokens, that of others to the step.
_ORDER = (1, 0, 2, 3)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The fitted coefficients in seconds, and the mean absolute error of recent predictions."""

    base: float = 0.0
    per_prefill_token: float = 0.0
    per_decode_sequence: float = 0.0
    per_kv_token: float = 0.0
    error: float = 0.0

    def predict(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int) -> float:
        """Seconds that such a step takes."""
        return (
            self.base
            + self.per_prefill_token * prefill_tokens
            + self.per_decode_sequence * decode_sequences
            + self.per_kv_token * kv_tokens
        )


class StepLatency:
    """Fits `StepCost` to observed steps."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self._weights = [0.0] * size
        self._products = [[0.0] * size for _ in range(size)]  # features times features, summed over steps
        self._responses = [0.0] * size  # features times seconds, summed over steps
        self._error = 0.0
        self._long = 0  # steps one after another that took longer than that
        self.cost = StepCost()
        self._timed_products = [[0.0] * size for _ in range(size)]
        self._timed_responses = [0.0] * size

    def start(self, steps: Iterable[tuple[int, int, int, float]]) -> None:
        """Fits to steps that were timed before the first request: their arguments as those of `observe`."""
        for *counts, seconds in steps:
            features = _features(*counts)
            for place, mine in enumerate(features):
                self._timed_responses[place] += _TIMED_WEIGHT * mine * seconds
                for other, value in enumerate(features):
                    self._timed_products[place][other] += _TIMED_WEIGHT * mine * value
        self._descend(_FIRST_SWEEPS)

    def observe(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float) -> None:
        """Updates the fit with one step."""
        predicted = self.cost.predict(prefill_tokens, decode_sequences, kv_tokens)
        longest = _LONGEST * predicted
        self._long = self._long + 1 if 0 < longest < seconds else 0
        if 0 < self._long <= _LONG_STEPS:
            seconds = longest
        miss = seconds - predicted
        self._error += 0.05 * (abs(miss) - self._error)
        features = _features(prefill_tokens, decode_sequences, kv_tokens)
        self._products = [
            [_DECAY * known + mine * other for known, other in zip(row, features, strict=True)]
            for row, mine in zip(self._products, features, strict=True)
        ]
        self._responses = [
            _DECAY * known + mine * seconds for known, mine in zip(self._responses, features, strict=True)
        ]
        self._descend(_SWEEPS)

    def _descend(self, sweeps: int) -> None:
        """Minimizes the error over each coefficient in turn, with the others fixed."""
        weights, before = self._weights, list(self._weights)
        products = [
            [recent + timed for recent, timed in zip(*rows, strict=True)]
            for rows in zip(self._products, self._timed_products, strict=True)
        ]
        responses = [sum(both) for both in zip(self._responses, self._timed_responses, strict=True)]
        for _ in range(sweeps):
            for place in _ORDER:
                row = products[place]
                own = row[place]
                others = sum([p * w for p, w in zip(row, weights, strict=True)]) - own * weights[place]
                best = (responses[place] - others + _DAMPING * before[place]) / (own + _DAMPING)
                weights[place] = max(0.0, best)
        base, prefill, decode, kv = (w * scale for w, scale in zip(weights, _SCALES, strict=True))
        self.cost = StepCost(base, prefill, decode, kv, self._error)


def _features(prefill_tokens: int, decode_sequences: int, kv_tokens: int) -> tuple[float, ...]:
    return (
        _SCALES[0],
        _SCALES[1] * prefill_tokens,
        _SCALES[2] * decode_sequences,
        _SCALES[3] * kv_tokens,
    )
