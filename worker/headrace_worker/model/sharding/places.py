"""Which layers and KV heads of a model a rank holds, from the model's config alone. Imports no torch."""

from itertools import pairwise
from typing import Any

from headrace_proto.errors import ModelUnsupportedError
from headrace_proto.quantities import counted
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.config_sizes import config_size, optional_size
from headrace_worker.model.sharding.cuts import kv_heads


def local_kv_heads(config: Any, parallel: ParallelContext) -> int:
    """KV heads of each layer on a rank."""
    start, stop = kv_span(config, parallel)
    return stop - start


def kv_span(config: Any, parallel: ParallelContext) -> Span:
    """The model's KV heads that a rank has."""
    return kv_heads(config_size(config, "num_attention_heads"), kv_count(config), parallel.tp.rank, parallel.tp.size)


def kv_count(config: Any) -> int:
    """KV heads of each layer of the whole model."""
    return optional_size(config, "num_key_value_heads") or config_size(config, "num_attention_heads")


def stage_layers(layers: int, stages: int) -> list[Span]:
    """Layers of each stage: equally many, the first stages one more (the last one also has the head).

    Raises ModelUnsupportedError when there are more stages than layers.
    """
    if stages > layers:
        raise ModelUnsupportedError(
            f"pp {stages} is more than the {counted(layers, 'layer')} of this model: use --pp {layers} or less."
        )
    share, more = divmod(layers, stages)
    starts = [stage * share + min(stage, more) for stage in range(stages + 1)]
    return list(pairwise(starts))
