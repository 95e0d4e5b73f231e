"""This router's own metrics, under the usual names of the field: one statement each."""

import asyncio
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace_proto.control_pb2 import ModelPlacement
from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.cache_miss import MissReason
from headrace_router.core.errors import ApiError, error_rows
from headrace_router.core.fleet import Fleet
from headrace_router.core.placement import FleetPlacement, Placed
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.dispatch.choice import LENGTH, STOP, TOOL_CALLS, Choice, is_first
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
        self.cache_missed = self._counter_per_model(
            "headrace_cache_missed_tokens",
            "Prompt tokens of chats that no cache had and could have had, by why",
            reason=tuple(MissReason),
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


class MeasuredPlacement(FleetPlacement[ModelCard]):
    """Placement whose decisions are timed, and counted by where the prompt's KV blocks come from."""

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


class ChoiceMetrics:
    """The listener that measures one choice, over all its attempts. `began` is on the clock of time.monotonic."""

    def __init__(self, metrics: RouterMetrics, choice: Choice, began: float) -> None:
        self._metrics = metrics
        self._choice = choice
        self._model = choice.request.model
        self._labels = (self._model, "")
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

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        """New tokens arrived now; several in one frame share the time since the last frame."""
        count, cached = len(token_ids), attempt.cached_tokens
        if not self._choice.output_token_ids and is_first(self._choice.request):  # each prompt is counted once
            self._metrics.prompt_tokens.labels(self._model).inc(len(self._choice.request.prompt_token_ids))
            self._metrics.cached_prompt_tokens.labels(self._model).inc(cached)
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
                off = abs(self._predicted - actual) / actual
                self._metrics.prediction_error.labels(*self._labels).observe(off)
            if self._expected is not None:
                self._metrics.expected_cached.labels(self._model).inc(self._expected)
                self._metrics.found_cached.labels(self._model).inc(cached)
        self._last = now
        self._count += count

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        """The attempt was moved, lost or refused."""
        if outcome is Outcome.MOVED:
            self._metrics.rebalancings.labels(self._model).inc()
        elif begun and outcome is Outcome.LOST:
            self._metrics.migrations.labels(self._model).inc()
        else:
            self._metrics.retries.labels(self._model, outcome.value).inc()

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        """The choice is complete, or failed."""
        if failure is not None or attempt is None:
            return
        metrics, labels = self._metrics, self._labels
        metrics.end_to_end.labels(*labels).observe(time.monotonic() - self._began)
        if self._count > 1:
            metrics.per_token.labels(*labels).observe((self._last - self._first) / (self._count - 1))
        if attempt.queue_seconds is not None:
            metrics.queued.labels(*labels).observe(attempt.queue_seconds)
        metrics.success.labels(*labels, self._choice.finish_reason or "").inc()


CACHE_REASONS = ("cached", "fetched")


def placement_report(fleet: Fleet[ModelCard], metrics: RouterMetrics, policy: str) -> list[ModelPlacement]:
    """One entry per model. Replicas are named whose KV blocks a policy would use and does not know."""
    prompts, cached = _by_model(metrics.prompt_tokens), _by_model(metrics.cached_prompt_tokens)
    placed, followed = _by_model(metrics.placements), _by_model(metrics.placements, CACHE_REASONS)
    return [
        ModelPlacement(
            model=model.name,
            policy=policy,
            prompt_tokens=prompts[model.name],
            cached_tokens=cached[model.name],
            placements=placed[model.name],
            cache_placements=followed[model.name],
            unknown_caches={
                replica.replica_id: replica.unknown_cache
                for replica in fleet.of_model(model.name)
                if replica.ready and replica.unknown_cache and replica.blocks is not None
            },
        )
        for model in fleet.models()
    ]


def _by_model(counter: Counter, reasons: tuple[str, ...] | None = None) -> defaultdict[str, int]:
    """Sums of a counter by `model_name`, of all or of some reasons."""
    sums: defaultdict[str, int] = defaultdict(int)
    for sample in (sample for metric in counter.collect() for sample in metric.samples):
        if sample.name.endswith("_total") and (reasons is None or sample.labels["reason"] in reasons):
            sums[sample.labels["model_name"]] += int(sample.value)
    return sums
