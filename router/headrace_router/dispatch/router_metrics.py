"""This router's own metrics, under the usual names of the field: one statement each."""

import asyncio
import threading
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace_router.core.errors import ApiError
from headrace_router.core.fleet import Fleet
from headrace_router.dispatch.exposition import render
from headrace_router.dispatch.fleet_collector import FleetCollector, Reading
from headrace_router.dispatch.replica_metrics import LABELS
from headrace_router.dispatch.token_histogram import TokenHistogram
from headrace_router.text.model_card import ModelCard

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
PLACEMENT_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 5, 10)


class RouterMetrics:
    """A registry of this router: what it measures here, and the replicas' newest loads at a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rendering = threading.Lock()
        self._fleet: Fleet[ModelCard] | None = None
        self._replicas: FleetCollector | None = None
        self._per_model: list[Counter] = []
        self.first_token = self._latency(
            "vllm:time_to_first_token_seconds", "From acceptance to the first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one choice", LABELS, TOKEN_BUCKETS
        )
        self._registry.register(self.inter_token)
        self.per_token = self._latency(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, per choice",
            TOKEN_BUCKETS,
        )
        self.end_to_end = self._latency(
            "vllm:e2e_request_latency_seconds", "From acceptance to the last token", REQUEST_BUCKETS
        )
        self.queued = self._latency(
            "vllm:request_queue_time_seconds", "Waiting at the replica before the first step", FIRST_TOKEN_BUCKETS
        )
        self.prediction_error = self._latency(
            "headrace_first_token_prediction_error",
            "Of the time from placement to the first token: |predicted - actual| / actual",
            ERROR_BUCKETS,
        )
        self.placement_seconds = Histogram(
            "headrace_placement_seconds",
            "Of this router's time: choosing the replica of an attempt",
            ("model_name",),
            buckets=PLACEMENT_BUCKETS,
            registry=self._registry,
        )
        self.placements = self._counter(
            "headrace_placements", "Attempts placed, by where the prompt's KV blocks come from", "model_name", "reason"
        )
        self.expected_cached = self._counter_per_model(
            "headrace_expected_cached_tokens", "Prompt tokens that were expected in the cache of the chosen replica"
        )
        self.found_cached = self._counter_per_model(
            "headrace_found_cached_tokens", "Prompt tokens of the same requests that were in its cache"
        )
        self.prompt_tokens = self._counter_per_model(
            "headrace_prompt_tokens", "Prompt tokens of answers of this router, each prompt once"
        )
        self.cached_prompt_tokens = self._counter_per_model(
            "headrace_cached_prompt_tokens", "Of these, tokens that were in a KV cache, as in the usage of the answers"
        )
        self.success = self._counter("vllm:request_success", "Choices finished, by reason", *LABELS, "finished_reason")
        self.retries = self._counter("headrace_retries", "Choices placed again, by cause", "model_name", "cause")
        self.migrations = self._counter_per_model(
            "headrace_migrations", "Streams that moved to another replica after theirs was lost"
        )
        self.rebalancings = self._counter_per_model(
            "headrace_rebalancings",
            "Streams that this router moved from a replica short of memory or time to one with free capacity",
        )
        self.errors = self._counter(
            "headrace_request_errors", "Requests refused or failed, health probes aside", "status", "code"
        )
        self.cancelled = self._counter("headrace_requests_cancelled", "Requests whose client disconnected")
        self.in_flight = self._gauge("headrace_requests_in_flight", "Requests being answered")
        self.waiting = self._gauge("headrace_requests_queued", "Requests waiting for admission")

    def add_fleet(self, fleet: Fleet[ModelCard]) -> None:
        """Adds the replicas of a fleet to each scrape."""
        self._fleet = fleet
        self._replicas = FleetCollector(fleet)

    async def text(self) -> bytes:
        """The exposition format, version 0.0.4. Rendered in a thread: a thousand replicas have 100,000 lines."""
        for model in self._fleet.models() if self._fleet is not None else ():
            for counter in self._per_model:
                counter.labels(model.name)
        readings = self._replicas.read() if self._replicas is not None else []
        return await asyncio.to_thread(self._render, readings)

    def _render(self, readings: list[Reading]) -> bytes:
        with self._rendering:  # a scrape whose client disconnected may still be rendered
            metrics = self._registry.collect()
            return render(metrics if self._replicas is None else chain(metrics, self._replicas.metrics(readings)))

    def failed(self, error: ApiError) -> None:
        """Counts a request that was refused or has failed."""
        self.errors.labels(str(error.status), error.code or "").inc()

    def _latency(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _counter_per_model(self, name: str, text: str) -> Counter:
        """Zero for each model before the first event: a rate needs the zero."""
        counter = self._counter(name, text, "model_name")
        self._per_model.append(counter)
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)
