"""The metrics of replicas at a scrape: gauges are as recent as the newest frame."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.fleet import Fleet
from headrace_router.core.replica_state import ReplicaState
from headrace_router.dispatch.replica_counters import ReplicaCounters, Totals
from headrace_router.dispatch.replica_metrics import COUNTERS, GAUGES, LABELS
from headrace_router.text.model_card import ModelCard


class FleetCollector(Collector):
    """Reads the states of a fleet's replicas, by the tables of `replica_metrics`."""

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
