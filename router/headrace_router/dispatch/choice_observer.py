"""Measures the latencies of one choice for the router's metrics."""

import time

from headrace_router.core.attempt import Attempt
from headrace_router.core.placement import Placed
from headrace_router.dispatch.choice import Choice
from headrace_router.dispatch.measured_placement import placement_reason
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.dispatch.token_histogram import TokenSeries
from headrace_router.text.model_card import ModelCard


class ChoiceObserver:
    """Over all attempts of the choice. `began` is on the clock of time.monotonic."""

    def __init__(self, metrics: RouterMetrics, model: str, began: float) -> None:
        self._metrics = metrics
        self._model = model
        self._labels = (model, "")
        self._inter_token: TokenSeries | None = None
        self._began = began
        self._first = 0.0
        self._last = 0.0
        self._count = 0
        self._placed = 0.0
        self._predicted: float | None = None  # seconds from then to the first token
        self._expected: int | None = None  # tokens of the prompt in the cache there

    def placed(self, placed: Placed[ModelCard]) -> None:
        """From now on it runs on this replica; the pause of a move is counted under its label."""
        prediction = placed.prediction
        self._placed = time.monotonic()
        self._predicted = prediction.first_token if prediction is not None else None
        self._expected = placed.expected_tokens if prediction is not None and placed.source is None else None
        self._labels = (self._model, placed.replica.replica_id)
        self._metrics.placements.labels(self._model, placement_reason(placed)).inc()
        self._inter_token = self._metrics.inter_token.labels(*self._labels)

    def add_tokens(self, count: int, cached: int) -> None:
        """New tokens arrived now; several in one frame share the time since the last frame.

        cached: tokens of the prompt that the replica found in its cache.
        """
        if not count:
            return
        now = time.monotonic()
        if self._count and self._inter_token is not None:
            self._inter_token.observe((now - self._last) / count)
        elif not self._count:
            self._first = now
            self._metrics.first_token.labels(*self._labels).observe(now - self._began)
            actual = now - self._placed
            if self._predicted is not None and actual > 0:
                error = abs(self._predicted - actual) / actual
                self._metrics.prediction_error.labels(*self._labels).observe(error)
            if self._expected is not None:
                self._metrics.expected_cached.labels(self._model).inc(self._expected)
                self._metrics.found_cached.labels(self._model).inc(cached)
        self._last = now
        self._count += count

    def finished(self, choice: Choice, attempt: Attempt) -> None:
        """The choice is complete."""
        metrics, labels = self._metrics, self._labels
        metrics.end_to_end.labels(*labels).observe(time.monotonic() - self._began)
        if self._count > 1:
            metrics.per_token.labels(*labels).observe((self._last - self._first) / (self._count - 1))
        if attempt.queue_seconds is not None:
            metrics.queued.labels(*labels).observe(attempt.queue_seconds)
        metrics.success.labels(*labels, choice.finish_reason or "").inc()
