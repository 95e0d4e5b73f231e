"""Predicts how long a step takes, fitted while serving.

step_seconds ~ base + a * prefill_tokens + b * decode_sequences + c * kv_tokens

Least squares over the recent steps, with no coefficient below zero: sums over the steps, in which old ones decay
exponentially, and after each step some sweeps of coordinate descent from the previous coefficients (Franc, Hlavac and
Navara, Sequential Coordinate-Wise Algorithm for the Non-negative Least Squares Problem, 2005). Each sweep lowers the
error over the remembered steps, so that the fit cannot diverge. A coefficient without recent observations, such as that
of prompts on a replica that only decodes, keeps its value. Features are scaled so that one constant fits all.
"""

from dataclasses import dataclass

_SCALES = (1.0, 1e-3, 1e-2, 1e-5)
_DECAY = 0.995
_DAMPING = 0.001  # weight of a coefficient's previous value: about a thousandth of a step of average size
_SWEEPS = 2
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
        self._products = [[0.0] * size for _ in range(size)]  # of features with features, summed over steps
        self._responses = [0.0] * size  # of features with seconds
        self._error = 0.0
        self.cost = StepCost()

    def observe(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float) -> None:
        """Updates the fit with one step."""
        miss = seconds - self.cost.predict(prefill_tokens, decode_sequences, kv_tokens)
        self._error += 0.05 * (abs(miss) - self._error)
        features = (
            _SCALES[0],
            _SCALES[1] * prefill_tokens,
            _SCALES[2] * decode_sequences,
            _SCALES[3] * kv_tokens,
        )
        self._products = [
            [_DECAY * known + mine * other for known, other in zip(row, features, strict=True)]
            for row, mine in zip(self._products, features, strict=True)
        ]
        self._responses = [
            _DECAY * known + mine * seconds for known, mine in zip(self._responses, features, strict=True)
        ]
        self._descend()
        base, prefill, decode, kv = (w * scale for w, scale in zip(self._weights, _SCALES, strict=True))
        self.cost = StepCost(base, prefill, decode, kv, self._error)

    def _descend(self) -> None:
        """Minimizes the error over each coefficient in turn, with the others fixed."""
        weights, before = self._weights, list(self._weights)
        for _ in range(_SWEEPS):
            for place in _ORDER:
                row = self._products[place]
                own = row[place]
                others = sum([p * w for p, w in zip(row, weights, strict=True)]) - own * weights[place]
                best = (self._responses[place] - others + _DAMPING * before[place]) / (own + _DAMPING)
                weights[place] = max(0.0, best)
