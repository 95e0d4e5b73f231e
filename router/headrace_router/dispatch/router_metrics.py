"""The router's metrics, under the field's usual names (DESIGN section 7)."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.attempt import Attempt
from headrace_router.core.fleet import Fleet
from headrace_router.core.replica_state import ReplicaState
from headrace_router.dispatch.choice import Choice
from headrace_router.dispatch.replica_counters import ReplicaCounters, Totals
from headrace_router.dispatch.replica_metrics import COUNTERS, GAUGES
from headrace_router.text.model_card import ModelCard

LABELS = ("model_name", "replica")
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class RouterMetrics:
    """A registry of this router: histograms measured here, and the replicas' newest loads at a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._fleet: Fleet[ModelCard] | None = None
        registry = self._registry
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From acceptance to the first token",
            LABELS,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens of one choice",
            LABELS,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, per choice",
            LABELS,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From acceptance to the last token",
            LABELS,
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.queued = Histogram(
            "vllm:request_queue_time_seconds",
            "Waiting at the replica before the first step",
            LABELS,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.success = Counter(
            "vllm:request_success",
            "Choices finished, by reason",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self.retries = Counter(
            "headrace_retries", "Choices placed again, by cause", ("model_name", "cause"), registry=registry
        )
        self.migrations = Counter(
            "headrace_migrations",
            "Streams that moved to another replica after theirs was lost",
            ("model_name",),
            registry=registry,
        )
        self.rebalancings = Counter(
            "headrace_rebalancings",
            "Streams that this router moved from a replica short of memory or time to one with free capacity",
            ("model_name",),
            registry=registry,
        )
        self.errors = Counter(
            "headrace_request_errors",
            "Requests refused or failed, health probes aside",
            ("status", "code"),
            registry=registry,
        )
        self.cancelled = Counter("headrace_requests_cancelled", "Requests whose client disconnected", registry=registry)
        self.in_flight = Gauge("headrace_requests_in_flight", "Requests being answered", registry=registry)
        self.waiting = Gauge("headrace_requests_queued", "Requests waiting for admission", registry=registry)

    def add_fleet(self, fleet: Fleet[ModelCard]) -> None:
        """Adds the replicas of a fleet to each scrape."""
        self._fleet = fleet
        self._registry.register(_FleetCollector(fleet))

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        for model in self._fleet.models() if self._fleet is not None else ():
            for counter in (self.migrations, self.rebalancings):  # a rate needs the zero before the first one
                counter.labels(model.name)
        return generate_latest(self._registry)

    def retried(self, model: str, cause: str) -> None:
        self.retries.labels(model, cause).inc()

    def rebalanced(self, model: str) -> None:
        self.rebalancings.labels(model).inc()

    def migrated(self, model: str) -> None:
        self.migrations.labels(model).inc()

    def failed(self, status: int, code: str | None) -> None:
        self.errors.labels(str(status), code or "").inc()

    def choice_observer(self, model: str, began: float) -> "ChoiceObserver":
        return ChoiceObserver(self, model, began)


class ChoiceObserver:
    """Measures the latencies of one choice over its attempts. `began` is on the clock of time.monotonic."""

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


class _FleetCollector(Collector):
    """Reads the replicas' states at a scrape: gauges are as recent as the newest frame."""

    def __init__(self, fleet: Fleet[ModelCard]) -> None:
        self._fleet = fleet
        self._counters = ReplicaCounters()

    def collect(self) -> Iterable[Metric]:
        gauges = [(gauge, GaugeMetricFamily(gauge.name, gauge.text, labels=LABELS)) for gauge in GAUGES]
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's shape", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        counters = [CounterMetricFamily(counter.name, counter.text, labels=LABELS) for counter in COUNTERS]
        # During a rolling update a replica has two builds: gauges are the newest one's, counters the sum of both.
        newest: dict[tuple[str, str], tuple[ReplicaState[ModelCard], ModelFacts, Totals]] = {}
        for replica in sorted(self._fleet.replicas, key=lambda replica: replica.identity.generation):
            if (facts := replica.facts) is not None:
                labels = (facts.identity.model, replica.replica_id)
                totals = self._counters.totals(labels, replica.identity.boot_id, replica.load.counters)
                newest[labels] = replica, facts, totals
        for labels, (replica, facts, totals) in newest.items():
            for gauge, family in gauges:
                family.add_metric(labels, gauge.read(replica, facts))
            block_size = str(facts.identity.kv_layout.block_size)
            config.add_metric((*labels, block_size, str(facts.kv_blocks)), 1)
            for counter, total in zip(counters, totals, strict=True):
                counter.add_metric(labels, total)
        return [*(family for _, family in gauges), config, *counters]
