"""Measures the latencies of one choice for the router's metrics."""

import time

from prometheus_client import Histogram

from headrace_router.core.attempt import Attempt
from headrace_router.dispatch.choice import Choice
from headrace_router.dispatch.router_metrics import RouterMetrics


class ChoiceObserver:
    """Over all attempts of the choice. `began` is on the clock of time.monotonic."""

    def __init__(self, metrics: RouterMetrics, model: str, began: float) -> None:
        self._metrics = metrics
        self._model = model
        self._labels = (model, "")
        self._inter_token: Histogram | None = None
        self._began = began
        self._first = 0.0
        self._last = 0.0
        self._count = 0

    def set_replica(self, replica: str) -> None:
        """From now on it runs on this replica; the pause of a move is counted under its label."""
        self._labels = (self._model, replica)
        self._inter_token = self._metrics.inter_token.labels(*self._labels)

    def add_tokens(self, count: int) -> None:
        """New tokens arrived now; several in one frame share the time since the last frame."""
        if not count:
            return
        now = time.monotonic()
        if self._count and self._inter_token is not None:
            self._inter_token.observe((now - self._last) / count)
        elif not self._count:
            self._first = now
            self._metrics.first_token.labels(*self._labels).observe(now - self._began)
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
