"""Layers with recurrent state: their functions over sequences become Headrace's, which read and write slots.

All such layers of transformers call a few functions by name. Each module gets a copy of its class's forward in which
these names are ours; transformers' classes stay as they are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from math import prod
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import headrace_kernels.ops as ops
from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.meta import StateMeta
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.core.layout import StatePart, StateSpec
from headrace_worker.model.attention import StepContextError, current_step
from headrace_worker.model.refusals import ATTENTION_TYPES, STATE_TYPES
from headrace_worker.model.sharding.places import stage_layers
from headrace_worker.model.sharding.recurrent import is_recurrent, recurrent_rule

_ACTIVATIONS = (None, "silu", "swish")


def _conv(
    layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """x [1, C, T], weight [C, W] -> [1, C, T]."""
    if activation not in _ACTIVATIONS:
        raise StepContextError(f"Layer {layer} has a convolution with {activation}: this model is not supported.")
    pool, meta = layer_state(layer, "conv")
    out = ops.causal_conv(x[0].t().contiguous(), weight, pool, meta, bias, activation is not None)
    return out.t()[None]


def _delta_rule(
    layer: int, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """query, key [1, T, K, D], value [1, T, H, E], beta [1, T, H], g [1, T, H] or [1, T, H, D] -> [1, T, H, E]."""
    pool, meta = layer_state(layer, "recurrent")
    out = ops.delta_rule(query[0], key[0], value[0], g[0], beta[0], pool, meta)
    return out[None].to(query.dtype), None


def _ssd(
    layer: int,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """x [1, T, H, E], dt [1, T, H], decay, D, dt_bias [H], key and query [1, T, G, N] -> [1, T, H, E] float32."""
    _check_scan(layer, dt_softplus and z is None)
    pool, meta = layer_state(layer, "recurrent")
    return ops.ssd(x[0], dt[0], decay, key[0], query[0], pool, meta, D, dt_bias, dt_limit)[None]


def _selective_scan(
    layer: int,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    **_: Any,
) -> Tensor:
    """x, dt, z [1, C, T], decay [C, N], key and query [1, N, T], D, delta_bias [C] -> [1, C, T] float32."""
    _check_scan(layer, delta_softplus)
    pool, meta = layer_state(layer, "recurrent")
    rows = (part[0].t() for part in (x, dt, key, query, z))
    x, dt, key, query, z = rows
    return ops.selective_scan(x, dt, decay, key, query, pool, meta, D, z, delta_bias).t()[None]


def _check_scan(layer: int, known: bool) -> None:
    if not known:
        raise StepContextError(f"Layer {layer} has a scan of a form that is not computed: this model is not supported.")


def layer_state(layer: int, kind: str) -> tuple[Tensor, StateMeta]:
    """The slots of a layer's state, and which of them the sequences of the step read and write."""
    step = current_step()
    if step.state_meta is None:
        raise StepContextError("A layer with recurrent state ran in a step without state: please report it.")
    return step.states[layer, kind], step.state_meta


_CONVOLUTION = "causal_conv1d_fn"
# By the names under which transformers' layers call them: what replaces them, and the shape of the state of a module.
_SEQUENCE: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[int, ...]]]] = {
    "torch_chunk_gated_delta_rule": (
        _delta_rule,
        lambda layer: (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim),
    ),
    "chunk_kimi_delta_attention": (_delta_rule, lambda layer: (layer.num_heads, layer.head_dim, layer.head_dim)),
    "mamba2_chunk_scan": (_ssd, lambda layer: (layer.num_heads, layer.head_dim, layer.ssm_state_size)),
    "mamba_selective_scan": (_selective_scan, lambda layer: (layer.intermediate_size, layer.ssm_state_size)),
}


def redirect(model: PreTrainedModel, parallel: ParallelContext = SINGLE) -> tuple[StateSpec, ...]:
    """Redirects all layers with recurrent state; returns what they keep. model: a rank's part, sharded.

    Raises ModelUnsupportedError unless the layers of the rank's stage that keep a state, and those that attend, by
    `layer_types` of the config, are found.
    """
    config: Any = model.config
    kinds: list[str] = config.layer_types
    specs: list[StateSpec] = []
    attending: set[int] = set()
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            specs += redirect_module(module, layer)
            if hasattr(module, "is_causal"):
                attending.add(layer)
    own = range(*stage_layers(len(kinds), parallel.pp_size)[parallel.pp_rank])
    for found, types in (({spec.layer for spec in specs}, STATE_TYPES), (attending, ATTENTION_TYPES)):
        wanted = {layer for layer in own if kinds[layer] in types}
        if found != wanted:
            layer = min(found ^ wanted)
            raise ModelUnsupportedError(
                f"{type(model).__name__} keeps recurrent state of a kind that is not served (layer {layer}: "
                f"{kinds[layer]!r})."
            )
    return tuple(specs)


def state_parts(model: PreTrainedModel) -> tuple[StatePart, ...]:
    """How the states of its layers are divided, which are alike. model: the whole one, on meta."""
    found = {_parts(module, str(model.config.model_type)) for module in model.modules() if is_recurrent(module)}
    if len(found) != 1:
        raise ModelUnsupportedError(
            f"{type(model).__name__} keeps recurrent state of {len(found)} kinds: this model is not supported."
        )
    return found.pop()


def _parts(module: nn.Module, family: str) -> tuple[StatePart, ...]:
    try:
        rule = recurrent_rule(module, family)
    except ModelUnsupportedError:  # it is not split
        rule = None
    (convolution,) = (child for child in module.children() if isinstance(child, nn.Conv1d))
    channels, _, width = convolution.weight.shape
    sections: tuple[tuple[int, int], ...] = ((1, channels),)
    if rule is not None:
        sections = rule.parts["conv1d"] if "conv1d" in rule.parts else rule.parts["conv"]
    parts = [StatePart("conv", width - 1, sections)]
    for _, shape in _sequences(module).values():
        units, *rest = shape(module)
        parts.append(StatePart("recurrent", 1, ((units, prod(rest)) if rule is not None else (1, units * prod(rest)),)))
    return tuple(parts)


def _sequences(module: nn.Module) -> dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[int, ...]]]]:
    """The functions over sequences (`_SEQUENCE`) that a module's forward calls."""
    forward = inspect.unwrap(type(module).forward)
    names = set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()
    return {name: entry for name, entry in _SEQUENCE.items() if name in names}


def redirect_module(module: nn.Module, layer: int) -> list[StateSpec]:
    """Redirects a module that calls the functions above; returns its states, none for any other module."""
    forward = inspect.unwrap(type(module).forward)
    names = set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    if _CONVOLUTION not in names or len(convolutions) != 1:
        return []
    channels, _, width = convolutions[0].weight.shape
    specs = [StateSpec(layer, "conv", (width - 1, channels))]
    ours: dict[str, Callable[..., Any]] = {_CONVOLUTION: partial(_conv, layer)}
    for name, (function, shape) in _sequences(module).items():
        ours[name] = partial(function, layer)
        specs.append(StateSpec(layer, "recurrent", shape(module)))
    copy = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)
    return specs
