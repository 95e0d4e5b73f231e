"""Which layers and KV heads of a model a rank holds, from the model's config alone. Imports no torch."""

from itertools import pairwise
from typing import Any, NamedTuple

from headrace_base.errors import ModelUnsupportedError, counted
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.config_sizes import config_size, layer_sizes, optional_size
from headrace_worker.model.sharding.cuts import kv_heads

_TWICE = ("mimo_v2_flash",)  # families whose layers with a window have twice as many KV heads


class KvShape(NamedTuple):
    """What each layer of attention caches of a token, in the whole model.

    Of multi-head latent attention one latent and one rotary key, which all heads share, and with an indexer an index
    key: a key that contains the value.
    """

    heads: int  # heads of keys and values
    key: int  # numbers of a key
    value: int  # numbers of a value; 0 = it is the beginning of the key
    queries: int  # query heads

    def span(self, parallel: ParallelContext) -> Span:
        """The heads that a rank has. Latents are on every rank."""
        return kv_heads(self.queries, self.heads, parallel.tp.rank, parallel.tp.size) if self.value else (0, 1)


def kv_shapes(config: Any) -> list[KvShape]:
    """By layer, whether it has attention or not. Raises ModelUnsupportedError."""
    layers = config_size(config, "num_hidden_layers")
    queries = config_size(config, "num_attention_heads")
    if rank := optional_size(config, "kv_lora_rank"):
        index = optional_size(config, "index_head_dim")
        return [KvShape(1, rank + config_size(config, "qk_rope_head_dim") + index, 0, queries)] * layers
    heads = [number or queries for number in layer_sizes(config, "num_key_value_heads", layers)]
    kinds = getattr(config, "layer_types", None)
    if config.model_type in _TWICE and isinstance(kinds, list | tuple):
        heads = [2 * n if kind == "sliding_attention" else n for n, kind in zip(heads, kinds, strict=True)]
    sizes = layer_sizes(config, "head_dim", layers)
    keys = [size or config_size(config, "hidden_size") // queries for size in sizes]
    values = [value or key for value, key in zip(layer_sizes(config, "v_head_dim", layers), keys, strict=True)]
    return [KvShape(*shape, queries) for shape in zip(heads, keys, values, strict=True)]


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
