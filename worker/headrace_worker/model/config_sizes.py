"""Sizes in a model's config, each checked: a config is data from anywhere. Imports no torch."""

from typing import Any

from headrace_base.errors import ModelUnsupportedError

# Beyond any model in use; a model of this many layers is built within seconds.
_LARGEST = {
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "hidden_size": 1 << 24,
    "kv_lora_rank": 1 << 14,
    "index_head_dim": 1 << 12,
    "qk_rope_head_dim": 1 << 14,
    "sliding_window": 1 << 31,
}


# Where config.json of Gemma 4 has what layers of full attention have instead.
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def layer_values(config: Any, name: str, default: Any = None) -> list[Any]:
    """The value of each layer of a transformers config; of the fields of config.json those that it names.

    One value where all layers have the same.
    """
    if getattr(config, "is_heterogeneous", False):  # transformers refuses to name one for all layers
        return [getattr(layer, name, default) for layer in config.per_layer_config]
    value, layers = getattr(config, name, default), vars(config).get("per_layer_config")
    entries = layers.values() if isinstance(layers, dict) else ()
    own = [layer[name] for layer in entries if isinstance(layer, dict) and name in layer]
    if full := vars(config).get(_OF_FULL.get(name, "")):
        own.append(full)
    return [value, *own] if value is not None or not own else own


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """A value of the whole model. Raises ModelUnsupportedError for one that differs between layers."""
    values = layer_values(config, name, default)
    if any(other != values[0] for other in values):
        *others, last = sorted({str(value)[:80] for value in values}, key=lambda text: (len(text), text))
        raise ModelUnsupportedError(
            f"This {config.model_type} model has a {name} per layer, which is not served: it is {', '.join(others)} "
            f"and {last}."
        )
    return values[0]


def config_size(config: Any, name: str) -> int:
    """A size that the config must have. Raises ModelUnsupportedError unless it is one positive number."""
    return _checked(config, name, config_value(config, name))


def optional_size(config: Any, name: str) -> int:
    """As `config_size`; 0 when the config does not have it."""
    return config_size(config, name) if config_value(config, name) else 0


def layer_sizes(config: Any, name: str, count: int) -> list[int]:
    """A size of each of `count` layers, 0 where there is none. Raises ModelUnsupportedError."""
    values = [_checked(config, name, value) if value else 0 for value in layer_values(config, name)]
    return values * count if len(values) == 1 else values


def _checked(config: Any, name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= _LARGEST[name]:
        raise ModelUnsupportedError(
            f"{name} of this {getattr(config, 'model_type', '')} model is {str(value)[:80]}: only numbers from 1 to "
            f"{_LARGEST[name]:,} are supported."
        )
    return value
