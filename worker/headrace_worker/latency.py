"""How long a step takes, learned while serving.

step_seconds ~ base + a * prefill_tokens + b * decode_sequences + c * kv_tokens

Recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory, ch. 9): four numbers, no history.
Features are scaled so that one forgetting factor suits them all; coefficients below zero are read as zero.
"""

from dataclasses import dataclass

_SCALES = (1.0, 1e-3, 1e-2, 1e-5)
_FORGETTING = 0.995
_PRIOR = 100.0


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
        self._covariance = [[_PRIOR if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._error = 0.0
        self.cost = StepCost()

    def observe(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float) -> None:
        """Takes in one step."""
        features = [
            scale * value
            for scale, value in zip(_SCALES, (1.0, prefill_tokens, decode_sequences, kv_tokens), strict=True)
        ]
        error = seconds - sum(w * x for w, x in zip(self._weights, features, strict=True))
        spread = [sum(p * x for p, x in zip(row, features, strict=True)) for row in self._covariance]
        scale = _FORGETTING + sum(x * s for x, s in zip(features, spread, strict=True))
        gain = [s / scale for s in spread]
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        # Forgetting inflates directions that are never excited; the prior bounds them.
        self._covariance = [
            [min((p - g * s) / _FORGETTING, _PRIOR) for p, s in zip(row, spread, strict=True)]
            for row, g in zip(self._covariance, gain, strict=True)
        ]
        self._error += 0.05 * (abs(error) - self._error)
        base, prefill, decode, kv = (max(0.0, w * scale) for w, scale in zip(self._weights, _SCALES, strict=True))
        self.cost = StepCost(base, prefill, decode, kv, self._error)
