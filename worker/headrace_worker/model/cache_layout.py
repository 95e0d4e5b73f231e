"""The cache layout of a model: which layers share a span and KV shape, split into groups of equally many layers."""

from math import gcd
from typing import Any

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.layout import CacheGroupSpec, CacheLayout


def cache_layout(config: Any, block_size: int, element_bytes: int) -> CacheLayout:
    """Derive the layout from a transformers text config (all layers on this rank).

    Raises ModelUnsupportedError for layers whose state is not a softmax-attention KV cache.
    """
    layers = int(config.num_hidden_layers)
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    windows = layer_windows(config)
    by_window: dict[int, list[int]] = {}
    for layer in range(layers):
        by_window.setdefault(windows[layer], []).append(layer)
    size = gcd(*(len(members) for members in by_window.values()))
    groups: list[CacheGroupSpec] = []
    for window, members in sorted(by_window.items()):
        for first in range(0, len(members), size):
            groups.append(
                CacheGroupSpec(
                    index=len(groups),
                    layers=tuple(members[first : first + size]),
                    num_kv_heads=heads,
                    head_dim=head_dim,
                    window=window,
                )
            )
    return CacheLayout(block_size=block_size, groups=tuple(groups), element_bytes=element_bytes)


def layer_windows(config: Any) -> list[int]:
    """Per layer the number of tokens a query sees, itself included; 0 = all."""
    layers = int(config.num_hidden_layers)
    sliding = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = sliding and getattr(config, "use_sliding_window", True)
        return [sliding if uses else 0] * layers
    windows = []
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and sliding:
            windows.append(sliding)
        elif kind == "full_attention":
            windows.append(0)
        else:
            raise ModelUnsupportedError(
                f"Layer {layer} of this {config.model_type} model is {kind!r}: only layers of full or sliding softmax "
                "attention are served."
            )
    return windows
