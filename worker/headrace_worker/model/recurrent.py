"""Layers with recurrent state: their functions over sequences become Headrace's, which read and write slots.

All such layers of transformers call a few functions by name. Each module gets a copy of its class's forward in which
these names are ours; transformers' classes stay as they are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import headrace_kernels.ops as ops
from headrace_kernels.meta import StateMeta
from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.core.layout import StateSpec
from headrace_worker.model.attention import StepContextError, current_step
from headrace_worker.model.sharding.places import stage_layers

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


def layer_state(layer: int, kind: str) -> tuple[Tensor, StateMeta]:
    """The slots of a layer's state, and which of them the sequences of the step read and write."""
    step = current_step()
    if step.state_meta is None:
        raise StepContextError("A layer with recurrent state ran in a step without state: please report it.")
    return step.states[layer, kind], step.state_meta


# By the names under which transformers' layers call them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


def redirect(model: PreTrainedModel, parallel: ParallelContext = SINGLE) -> tuple[StateSpec, ...]:
    """Redirects all layers with recurrent state; returns what they keep. model: a rank's part, sharded.

    Raises ModelUnsupportedError unless each such layer of the rank's stage is found, by `layer_types` of the config.
    """
    config: Any = model.config
    kinds: list[str] = config.layer_types
    specs: list[StateSpec] = []
    found: set[int] = set()
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        names = _FUNCTIONS.keys() & set(code.co_names) if code is not None else set()
        layer = getattr(module, "layer_idx", None)
        if names and isinstance(layer, int):
            _redirect(module, forward, names, layer)
            specs += _specs(module, layer)
            found.add(layer)
    own = range(*stage_layers(len(kinds), parallel.pp_size)[parallel.pp_rank])
    wanted = {layer for layer in own if kinds[layer] == "linear_attention"}
    if found != wanted:
        raise ModelUnsupportedError(
            f"{type(model).__name__} keeps recurrent state of a kind that is not served (layer "
            f"{min(found ^ wanted)}: {kinds[min(found ^ wanted)]!r})."
        )
    return tuple(specs)


def _redirect(module: nn.Module, forward: Any, names: set[str], layer: int) -> None:
    ours = {name: partial(_FUNCTIONS[name], layer) for name in names}
    copy = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)


def _specs(module: Any, layer: int) -> list[StateSpec]:
    channels, _, width = module.conv1d.weight.shape
    return [
        StateSpec(layer, "conv", (width - 1, channels)),
        StateSpec(layer, "recurrent", (module.num_v_heads, module.head_k_dim, module.head_v_dim)),
    ]
