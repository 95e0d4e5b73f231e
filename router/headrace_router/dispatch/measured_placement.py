"""Placement whose decisions are timed, and counted by where the prompt's KV blocks come from."""

from time import perf_counter
from typing import Any

from headrace_router.core.placement import FleetPlacement, Placed
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.text.model_card import ModelCard


class MeasuredPlacement(FleetPlacement[ModelCard]):
    """A FleetPlacement of this router's metrics."""

    def __init__(self, metrics: RouterMetrics, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._metrics = metrics

    def place(self, request: ChoiceRequest, *given: Any, **options: Any) -> Placed[ModelCard] | None:
        began = perf_counter()
        placed = super().place(request, *given, **options)
        if placed is not None:
            self._metrics.placement_seconds.labels(request.model).observe(perf_counter() - began)
        return placed


def placement_reason(placed: Placed[ModelCard]) -> str:
    """Where the KV blocks of the prompt come from: prefill, fetched, cached or computed; other = no policy chose."""
    if placed.source is not None:
        return "fetched" if placed.source.cached_only else "prefill"
    if placed.decision is None:
        return "other"
    return "cached" if placed.expected_tokens else "computed"
