"""Sizes in a model's config, each checked: a config is data from anywhere. Imports no torch."""

from typing import Any

from headrace_proto.errors import ModelUnsupportedError

# Beyond any model in use; a model of this many layers is built within seconds.
_LARGEST = {
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 24,
    "sliding_window": 1 << 31,
}


def config_value(config: Any, name: str, default: Any = None) -> Any:
    """A value of the whole model. Raises ModelUnsupportedError for one that differs between layers."""
    try:
        value = getattr(config, name, default)
    except Exception as error:  # transformers refuses to name one for all layers
        raise _per_layer(config, name, [getattr(layer, name, None) for layer in config.per_layer_config]) from error
    layers = vars(config).get("per_layer_config")  # of config.json: what some layers have instead
    entries = layers.values() if isinstance(layers, dict) else ()
    own = [layer[name] for layer in entries if isinstance(layer, dict) and name in layer]
    if name == "head_dim" and (full := vars(config).get("global_head_dim")):  # the form of Gemma 4's files
        own.append(full)
    if value is not None and any(other != value for other in own):
        raise _per_layer(config, name, [value, *own])
    return value


def _per_layer(config: Any, name: str, values: list[Any]) -> ModelUnsupportedError:
    *others, last = sorted({str(value)[:80] for value in values}, key=lambda text: (len(text), text))
    return ModelUnsupportedError(
        f"This {config.model_type} model has sizes per layer, which are not served yet: {name} is "
        f"{', '.join(others)} and {last}."
    )


def config_size(config: Any, name: str) -> int:
    """A size that the config must have. Raises ModelUnsupportedError unless it is one positive number."""
    value = config_value(config, name)
    if type(value) is not int or not 0 < value <= _LARGEST[name]:
        raise ModelUnsupportedError(
            f"{name} of this {getattr(config, 'model_type', '')} model is {str(value)[:80]}: only a number from 1 to "
            f"{_LARGEST[name]:,}, the same for all layers, is supported."
        )
    return value


def optional_size(config: Any, name: str) -> int:
    """As `config_size`; 0 when the config does not have it."""
    return config_size(config, name) if config_value(config, name) else 0
