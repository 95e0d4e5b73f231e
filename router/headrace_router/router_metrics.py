"""What the router measures, under the names of the field (DESIGN section 7)."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_router.attempt import Attempt
from headrace_router.choice import Choice
from headrace_router.fleet import Fleet
from headrace_router.replica_counters import ReplicaCounters

LABELS = ("model_name", "replica")
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class RouterMetrics:
    """A registry of our own: histograms measured here, and the replicas' loads as they stand at a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._fleet: Fleet | None = None
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
            "Streams that this router moved from a replica short of memory or time to one with room",
            ("model_name",),
            registry=registry,
        )
        self.errors = Counter(
            "headrace_request_errors", "Requests refused or failed", ("status", "code"), registry=registry
        )
        self.cancelled = Counter("headrace_requests_cancelled", "Requests whose client went away", registry=registry)
        self.in_flight = Gauge("headrace_requests_in_flight", "Requests being answered", registry=registry)
        self.waiting = Gauge("headrace_requests_queued", "Requests waiting for admission", registry=registry)

    def watch(self, fleet: Fleet) -> None:
        """Adds the replicas of a fleet to what a scrape shows."""
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
    """Times one choice, wherever it runs. `began` is on the clock of time.monotonic."""

    def __init__(self, metrics: RouterMetrics, model: str, began: float) -> None:
        self._metrics = metrics
        self._model = model
        self._labels = (model, "")
        self._inter_token: Histogram | None = None
        self._began = began
        self._first = 0.0
        self._last = 0.0
        self._count = 0

    def at(self, replica: str) -> None:
        """From now on it runs on this replica, which gets the blame for the pause if it moved there."""
        self._labels = (self._model, replica)
        self._inter_token = self._metrics.inter_token.labels(*self._labels)

    def tokens(self, count: int) -> None:
        """New tokens arrived just now; several in one frame share the time since the last frame."""
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
        if attempt.first is not None:
            metrics.queued.labels(*labels).observe(attempt.first.queue_seconds)
        metrics.success.labels(*labels, choice.finish_reason or "").inc()


class _FleetCollector(Collector):
    """Reads the links when scraped: gauges are as fresh as the newest frame."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counters = ReplicaCounters()

    def collect(self) -> Iterable[Metric]:
        gauges = {
            name: GaugeMetricFamily(name, text, labels=LABELS)
            for name, text in (
                ("vllm:num_requests_running", "Requests in the running batch"),
                ("vllm:num_requests_waiting", "Requests waiting at the replica"),
                ("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1"),
                ("headrace_kv_blocks", "KV blocks of the pool"),
                ("headrace_kv_blocks_free", "KV blocks that a new request can get, cached ones included"),
                ("headrace_waiting_tokens", "Prefill tokens not computed yet"),
                ("headrace_predicted_step_seconds", "Predicted time of the next step"),
                ("headrace_step_error_seconds", "Mean absolute error of the predicted step time"),
                ("headrace_attempts_in_flight", "Attempts of this router at the replica"),
                ("headrace_replica_ready", "Whether this router sends new work there"),
            )
        }
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's shape", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        counters = {
            name: CounterMetricFamily(name, text, labels=LABELS)
            for name, text in (
                ("vllm:prompt_tokens", "Prompt tokens processed"),
                ("vllm:generation_tokens", "Tokens generated"),
                ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
                ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
                ("vllm:num_preemptions", "Requests preempted"),
                ("headrace_steps", "Engine steps, idle ticks included"),
                ("headrace_kv_fetches", "Prompts whose KV blocks were asked of another replica"),
                ("headrace_kv_fetches_failed", "Of those, given up and computed here"),
                ("headrace_kv_fetched_bytes", "Bytes of KV blocks received from other replicas"),
                ("headrace_kv_fetch_seconds", "Seconds from asking to the last block, of fetches that were done"),
                ("headrace_kv_grants", "Prompts computed, or sent, for other replicas"),
            )
        }
        present: set[tuple[str, str]] = set()
        for link in self._fleet.links:
            facts = link.facts
            if facts is None:
                continue
            labels = (facts.identity.model, link.replica_id)
            if labels in present:  # an older generation on its way out
                continue
            present.add(labels)
            load = link.load
            values = (
                load.running,
                load.waiting,
                load.kv_usage,
                facts.kv_blocks,
                load.free_blocks,
                load.waiting_tokens,
                load.predicted_step_ms / 1e3,
                load.step_model.error_ms / 1e3,
                len(link.attempts),
                float(link.ready),
            )
            for family, value in zip(gauges.values(), values, strict=True):
                family.add_metric(labels, value)
            block_size = str(facts.identity.kv_layout.block_size)
            config.add_metric((*labels, block_size, str(facts.kv_blocks)), 1)
            totals = self._counters.totals(labels, link.identity.boot_id, load.counters)
            for counter, total in zip(counters.values(), totals, strict=True):
                counter.add_metric(labels, total)
        return [*gauges.values(), config, *counters.values()]
