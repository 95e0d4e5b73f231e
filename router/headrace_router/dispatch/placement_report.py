"""How requests were placed, for the controller and `headrace status`."""

from collections import defaultdict

from prometheus_client import Counter

from headrace_proto.control_pb2 import ModelPlacement
from headrace_router.core.fleet import Fleet
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.text.model_card import ModelCard

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
