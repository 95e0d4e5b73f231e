"""This router's own metrics, under the usual names of the field: one statement each."""

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace_router.core.attempt import Outcome
from headrace_router.core.errors import ApiError, error_rows
from headrace_router.core.fleet import Fleet
from headrace_router.dispatch.choice import LENGTH, STOP, TOOL_CALLS
from headrace_router.dispatch.replica_metrics import LABELS, FleetCollector, ReplicaReading, page
from headrace_router.text.model_card import ModelCard


class TokenSeries:
    """The values of one set of labels. One thread observes; another thread may read."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class TokenHistogram(Collector):
    """As prometheus_client's Histogram, which would take a twentieth of a token's time. `labels` returns a series."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """bounds: of the buckets, ascending, in the unit of the observations."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], TokenSeries] = {}

    def labels(self, *values: str) -> TokenSeries:
        series = self._series.get(values)
        if series is None:
            series = self._series.setdefault(values, TokenSeries(self._bounds))  # another thread may have made it
        return series

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in list(self._series.items()):
            counts = [float(count) for count in accumulate(list(series.counts))]
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.total)
        yield family


FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
PLACEMENT_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
PLACEMENT_REASONS = ("cached", "fetched", "prefill", "computed", "other")
FINISH_REASONS = (STOP, LENGTH, TOOL_CALLS)
RETRY_CAUSES = tuple(outcome.value for outcome in (Outcome.REFUSED, Outcome.LOST, Outcome.NOT_FINITE))
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 5, 10)


Labelled = tuple[Counter | Histogram | TokenHistogram, Sequence[str]]  # and all values of the last label, if it has one


class RouterMetrics:
    """A registry of this router: what it measures here, and the replicas' newest loads at a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rendering = threading.Lock()
        self._fleet: Fleet[ModelCard] | None = None
        self._replicas: FleetCollector | None = None
        # Series that are zero from the first scrape on, since a rate needs the zero.
        self._per_model: list[Labelled] = []
        self._per_replica: list[Labelled] = []
        self._zeroed: set[tuple[str, str]] = set()  # model and replica
        self.first_token = self._latency(
            "vllm:time_to_first_token_seconds", "From acceptance to the first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one choice", LABELS, TOKEN_BUCKETS
        )
        self._registry.register(self.inter_token)
        self._per_replica.append((self.inter_token, ()))
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
        self._per_model.append((self.placement_seconds, ()))
        self.placements = self._counter_per_model(
            "headrace_placements",
            "Attempts placed, by where the prompt's KV blocks come from",
            reason=PLACEMENT_REASONS,
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
        self._per_replica.append((self.success, FINISH_REASONS))
        self.retries = self._counter_per_model("headrace_retries", "Choices placed again, by cause", cause=RETRY_CAUSES)
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
        for status, code in error_rows():
            self.errors.labels(str(status), code)
        self.cancelled = self._counter("headrace_requests_cancelled", "Requests whose client disconnected")
        self.in_flight = self._gauge("headrace_requests_in_flight", "Requests being answered")
        self.waiting = self._gauge("headrace_requests_queued", "Requests waiting for admission")

    def add_fleet(self, fleet: Fleet[ModelCard]) -> None:
        """Adds the replicas of a fleet to each scrape."""
        self._fleet = fleet
        self._replicas = FleetCollector(fleet)

    async def page(self, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
        """The answer to a scrape, and its headers. Made in a thread: a thousand replicas have 110,000 lines."""
        models = [model.name for model in self._fleet.models()] if self._fleet is not None else []
        readings = self._replicas.read() if self._replicas is not None else []

        def render() -> tuple[bytes, dict[str, str]]:
            with self._rendering:  # a scrape whose client disconnected may still be rendered
                self._add_zeros(models, readings)
                metrics = self._registry.collect()
                own = metrics if self._replicas is None else chain(metrics, self._replicas.metrics(readings))
                return page(own, accept, accept_encoding)

        return await asyncio.to_thread(render)

    def _add_zeros(self, models: Sequence[str], readings: Sequence[ReplicaReading]) -> None:
        for model in models:
            _label(self._per_model, model)
        found = {(reading.facts.identity.model, reading.replica_id) for reading in readings}
        for labels in found - self._zeroed:
            _label(self._per_replica, *labels)
            time.sleep(0)  # see `exposition`
        self._zeroed |= found

    def failed(self, error: ApiError) -> None:
        """Counts a request that was refused or has failed."""
        self.errors.labels(str(error.status), error.code or "").inc()

    def _latency(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        self._per_replica.append((histogram, ()))
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _counter_per_model(self, name: str, text: str, **label: Sequence[str]) -> Counter:
        """label: one beside the model's, and its values."""
        counter = self._counter(name, text, "model_name", *label)
        self._per_model.append((counter, next(iter(label.values()), ())))
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)


def _label(metrics: Sequence[Labelled], *labels: str) -> None:
    """Makes the series with these labels, which are zero until something is counted."""
    for metric, values in metrics:
        for last in ((value,) for value in values) if values else ((),):
            metric.labels(*labels, *last)
