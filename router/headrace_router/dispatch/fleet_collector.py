"""The metrics of replicas at a scrape: gauges are as recent as the newest frame."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace_proto.replica_pb2 import Load, ModelFacts, ReplicaIdentity
from headrace_router.core.fleet import Fleet
from headrace_router.dispatch.replica_counters import ReplicaCounters, Totals
from headrace_router.dispatch.replica_metrics import COUNTERS, LABELS, LOAD_GAUGES, STATE_GAUGES
from headrace_router.text.model_card import ModelCard

REPLICAS_PER_TURN = 20  # without a pause: about half a millisecond


@dataclass(frozen=True, slots=True)
class Reading:
    """What a scrape reads of a replica."""

    replica_id: str
    identity: ReplicaIdentity  # a message is replaced, never changed: its fields are read in the thread
    facts: ModelFacts
    load: Load
    state: tuple[float, ...]  # in the order of STATE_GAUGES


class FleetCollector:
    """Reads the states of a fleet's replicas, by the tables of `replica_metrics`."""

    def __init__(self, fleet: Fleet[ModelCard]) -> None:
        self._fleet = fleet
        self._counters = ReplicaCounters()

    def read(self) -> list[Reading]:
        """The replicas as they are now. Called on the event loop."""
        return [
            Reading(
                replica.replica_id,
                replica.identity,
                facts,
                replica.load,
                tuple([gauge.read(replica) for gauge in STATE_GAUGES]),
            )
            for replica in self._fleet.replicas
            if (facts := replica.facts) is not None
        ]

    def metrics(self, readings: Sequence[Reading]) -> Iterable[Metric]:
        """Called in any thread, by one at a time.

        During a rolling update a replica has two builds: gauges are the newest one's, counters the sum of both.
        """
        gauges = [GaugeMetricFamily(gauge.name, gauge.text, labels=LABELS) for gauge in (*LOAD_GAUGES, *STATE_GAUGES)]
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's shape", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        counters = [CounterMetricFamily(counter.name, counter.text, labels=LABELS) for counter in COUNTERS]
        newest: dict[tuple[str, str], tuple[Reading, Totals]] = {}
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
