"""The metrics of replicas: one entry of a table each, with the value that it has."""

import gc
import gzip
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace_proto.replica_pb2 import Counters, Load, ModelFacts, ReplicaIdentity
from headrace_router.core.fleet import Fleet
from headrace_router.core.replica_state import ReplicaState
from headrace_router.text.model_card import ModelCard

SAMPLES_PER_TURN = 50  # lines without a pause: about half a millisecond
CREATED = "_created"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = b"# EOF\n"
GZIP_LEVEL = 4

Encoder = Callable[[Collector], bytes]


def page(metrics: Iterable[Metric], accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """What a client with these headers gets, OpenMetrics or text, compressed or not; and the headers of the answer."""
    kinds = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    as_openmetrics = OPENMETRICS_TYPE.split(";")[0] in kinds
    content = render(metrics, as_openmetrics=as_openmetrics)
    headers = {"content-type": OPENMETRICS_TYPE if as_openmetrics else TEXT_TYPE, "vary": "Accept, Accept-Encoding"}
    if not gzip_accepted(accept_encoding):
        return content, headers
    return gzip.compress(content, GZIP_LEVEL), headers | {"content-encoding": "gzip"}


def render(metrics: Iterable[Metric], *, as_openmetrics: bool = False) -> bytes:
    """As `generate_latest` of the library: the text format, version 0.0.4, or OpenMetrics."""
    with _no_garbage_collection():
        if not as_openmetrics:
            return b"".join(_parts(metrics))
        parts = (_lines(metric.name, metric.documentation, metric.type, metric.samples, _encode) for metric in metrics)
        return b"".join(chain.from_iterable(parts)) + OPENMETRICS_END


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Samples outlive the young generations: a full collection would hold all threads for a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parts(metrics: Iterable[Metric]) -> Iterator[bytes]:
    for metric in metrics:
        created = [sample for sample in metric.samples if sample.name == metric.name + CREATED]
        others = [sample for sample in metric.samples if sample.name != metric.name + CREATED]
        yield from _lines(metric.name, metric.documentation, metric.type, others, generate_latest)
        if created:
            yield from _lines(metric.name + CREATED, metric.documentation, "gauge", created, generate_latest)


def _encode(metric: Collector) -> bytes:
    # The library's escapes replace the colon in the names of samples, and not in those of their metrics.
    encoded: bytes = openmetrics.generate_latest(metric, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return encoded.removesuffix(OPENMETRICS_END)


def _lines(name: str, text: str, kind: str, samples: list[Sample], encode: Encoder) -> Iterator[bytes]:
    """The head and the lines of a metric."""
    for start in range(0, max(1, len(samples)), SAMPLES_PER_TURN):
        part = Metric(name, text, kind)
        part.samples = samples[start : start + SAMPLES_PER_TURN]
        lines = encode(_Single(part))
        yield lines if start == 0 else lines.split(b"\n", 2)[2]
        time.sleep(0)  # a thread that needs the interpreter gets it now, not after the switch interval of 5 ms


class _Single(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


REPLICAS_PER_TURN = 20  # without a pause: about half a millisecond


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """What a scrape reads of a replica."""

    replica_id: str
    identity: ReplicaIdentity  # a message is replaced, never changed: its fields are read in the thread
    facts: ModelFacts
    load: Load
    state: tuple[float, ...]  # in the order of STATE_GAUGES


class FleetCollector:
    """Reads the states of a fleet's replicas at a scrape: gauges are as recent as the newest frame."""

    def __init__(self, fleet: Fleet[ModelCard]) -> None:
        self._fleet = fleet
        self._counters = ReplicaCounters()

    def read(self) -> list[ReplicaReading]:
        """The replicas as they are now. Called on the event loop."""
        return [
            ReplicaReading(
                replica.replica_id,
                replica.identity,
                facts,
                replica.load,
                tuple([gauge.read(replica) for gauge in STATE_GAUGES]),
            )
            for replica in self._fleet.replicas
            if (facts := replica.facts) is not None
        ]

    def metrics(self, readings: Sequence[ReplicaReading]) -> Iterable[Metric]:
        """Called in any thread, by one at a time.

        During a rolling update a replica has two builds: gauges are the newest one's, counters the sum of both.
        """
        gauges = [GaugeMetricFamily(gauge.name, gauge.text, labels=LABELS) for gauge in (*LOAD_GAUGES, *STATE_GAUGES)]
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's shape", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        counters = [CounterMetricFamily(counter.name, counter.text, labels=LABELS) for counter in COUNTERS]
        newest: dict[tuple[str, str], tuple[ReplicaReading, Totals]] = {}
        for reading in sorted(readings, key=lambda reading: reading.identity.generation):
            labels = (reading.facts.identity.model, reading.replica_id)
            newest[labels] = reading, self._counters.totals(labels, reading.identity.boot_id, reading.load.counters)
        for number, (labels, (reading, totals)) in enumerate(newest.items()):
            if number % REPLICAS_PER_TURN == 0:
                time.sleep(0)  # see `exposition`
            of_load = [gauge.read(reading.load, reading.facts) for gauge in LOAD_GAUGES]
            for gauge, value in zip(gauges, (*of_load, *reading.state), strict=True):
                gauge.add_metric(labels, value)
            facts = reading.facts
            block_size = str(facts.identity.kv_layout.block_size)
            config.add_metric((*labels, block_size, str(facts.kv_blocks)), 1)
            for counter, total in zip(counters, totals, strict=True):
                counter.add_metric(labels, total)
        return [*gauges, config, *counters]


Totals = tuple[float, ...]
MAX_BOOTS = 8  # boots of one replica at the same time


class ReplicaCounters:
    """Sums the counters of a replica over the boots that this router has observed.

    Two boots may count at the same time: during a rolling update a replica has an old and a new build.
    """

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], Totals] = {}
        self._boots: dict[tuple[str, str], dict[bytes, Totals]] = {}  # by boot id, last seen last

    def totals(self, replica: tuple[str, str], boot_id: bytes, counters: Counters) -> Totals:
        """Over all boots, in the order of `COUNTERS`."""
        now = tuple(getattr(counters, counter.field) for counter in COUNTERS)
        boots = self._boots.setdefault(replica, {})
        ended = self._ended.get(replica, (0,) * len(now))
        last = boots.pop(boot_id, now)
        if any(a < b for a, b in zip(now, last, strict=True)):
            ended = _sum(ended, last)
        boots[boot_id] = now
        if len(boots) > MAX_BOOTS:  # the one that was seen longest ago has ended
            ended = _sum(ended, boots.pop(next(iter(boots))))
        self._ended[replica] = ended
        return reduce(_sum, boots.values(), ended)


def _sum(a: Totals, b: Totals) -> Totals:
    return tuple(x + y for x, y in zip(a, b, strict=True))


LABELS = ("model_name", "replica")


@dataclass(frozen=True, slots=True)
class LoadGauge:
    """A value of what a replica reports: read in the thread that renders a scrape."""

    name: str
    text: str
    read: Callable[[Load, ModelFacts], float]


@dataclass(frozen=True, slots=True)
class StateGauge:
    """A value of what this router knows: read on the event loop, of all replicas at once, so it must be quick."""

    name: str
    text: str
    read: Callable[[ReplicaState[ModelCard]], float]


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum since the replica's start. `field` of the message headrace.v1.Counters."""

    name: str
    text: str
    field: str


LOAD_GAUGES = (
    LoadGauge("vllm:num_requests_running", "Requests in the running batch", lambda load, _: load.running),
    LoadGauge("vllm:num_requests_waiting", "Requests waiting at the replica", lambda load, _: load.waiting),
    LoadGauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1", lambda load, _: load.kv_usage),
    LoadGauge("headrace_kv_blocks", "KV blocks of the pool", lambda _, facts: facts.kv_blocks),
    LoadGauge(
        "headrace_kv_blocks_free",
        "KV blocks that a new request can get, cached ones included",
        lambda load, _: load.free_blocks,
    ),
    LoadGauge("headrace_waiting_tokens", "Prefill tokens not computed yet", lambda load, _: load.waiting_tokens),
    LoadGauge(
        "headrace_predicted_step_seconds",
        "Predicted time of the next step",
        lambda load, _: load.predicted_step_ms / 1e3,
    ),
    LoadGauge(
        "headrace_step_error_seconds",
        "Mean absolute error of the predicted step time",
        lambda load, _: load.step_model.error_ms / 1e3,
    ),
)

STATE_GAUGES = (
    StateGauge(
        "headrace_attempts_in_flight",
        "Attempts of this router at the replica",
        lambda replica: len(replica.attempts),
    ),
    StateGauge(
        "headrace_replica_ready",
        "Whether this router sends new requests there",
        lambda replica: float(replica.ready),
    ),
    StateGauge(
        "headrace_replica_cache_known",
        "Whether this router knows which KV blocks the replica holds",
        lambda replica: float(not replica.unknown_cache),
    ),
    StateGauge(
        "headrace_replica_slow",
        "Whether this router avoids it, because its steps take much longer than those of its peers",
        lambda replica: float(replica.speed.slow),
    ),
)

COUNTERS = (
    Counter("vllm:prompt_tokens", "Prompt tokens of answers, each prompt once, as in their usage", "prompt_tokens"),
    Counter("vllm:generation_tokens", "Tokens sampled", "generation_tokens"),
    Counter("vllm:prefix_cache_queries", "Tokens looked up in this replica's prefix cache", "prefix_cache_queries"),
    Counter(
        "vllm:prefix_cache_hits",
        "Tokens found there; blocks fetched from other replicas are no hits",
        "prefix_cache_hits",
    ),
    Counter("vllm:num_preemptions", "Requests preempted", "preemptions"),
    Counter("headrace_steps", "Engine steps, idle ticks included", "steps"),
    Counter("headrace_kv_fetches", "Prompts whose KV blocks were requested from another replica", "fetches"),
    Counter("headrace_kv_fetches_failed", "Fetches that failed; the prompt was computed here", "fetches_failed"),
    Counter("headrace_kv_fetched_bytes", "Bytes of KV blocks received from other replicas", "fetched_bytes"),
    Counter(
        "headrace_kv_fetch_seconds",
        "Seconds from the request to the last block, of completed fetches",
        "fetch_seconds",
    ),
    Counter("headrace_kv_blocks_stored", "KV blocks copied to host memory before their eviction", "blocks_stored"),
    Counter("headrace_kv_blocks_loaded", "KV blocks copied back from host memory", "blocks_loaded"),
    Counter("headrace_kv_load_seconds", "Seconds that requests waited for these blocks", "load_seconds"),
    Counter("headrace_kv_blocks_saved", "KV blocks written to disk", "blocks_saved"),
    Counter("headrace_kv_blocks_filled", "KV blocks read from disk", "blocks_filled"),
    Counter("headrace_kv_grants", "Prompts computed, or sent, for other replicas", "grants"),
    Counter("headrace_not_finite", "Attempts that ended since the model's output was not finite", "not_finite"),
)
