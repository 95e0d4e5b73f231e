"""Attention over the paged cache, called through transformers' attention interface.

Shape letters: T tokens of the step, H query heads, K key/value heads, D head size, B blocks, P positions per block.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headrace_kernels.ops as ops
from headrace_kernels.meta import AttentionMeta, HeadNorms, StateMeta
from headrace_proto.errors import HeadraceError

IMPLEMENTATION = "headrace"
# Arguments that attention may get and that do not change its result.
_WITHOUT_EFFECT = {"cache_position", "is_causal", "logits_to_keep", "position_embeddings", "position_ids"}


class StepContextError(HeadraceError):
    """Attention was called outside a step, or for a layer that is not in the cache."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The pool of one layer's keys and values."""

    group: int
    pool: Tensor  # [2, B, K, P, D]
    window: int  # 0 = all


@dataclass(slots=True)
class StepContext:
    """What the layers of one forward pass need besides the hidden states."""

    layers: Mapping[int, LayerCache]  # by model layer index
    metas: Sequence[AttentionMeta]  # by cache group
    deterministic: bool = False  # a row's result depends on that row alone, bit for bit
    hidden_in: Tensor | None = None  # [1, T, N] from the stage before; None on the first
    hidden_out: Tensor | None = None  # [1, T, N] for the stage after; None on the last
    attended: set[int] = field(default_factory=set)  # layers whose keys and values are stored
    written: Callable[[int, Tensor], None] | None = None  # called with each layer, and its values
    states: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)  # pools, by layer and kind
    state_meta: StateMeta | None = None

    def attend_once(self, layer: int) -> None:
        """Notes that a layer attends. Raises StepContextError the second time."""
        if layer in self.attended:
            raise StepContextError(
                f"Layer {layer} attends more than once in a step: the cache holds one key and value per layer and "
                "token, so this model is not supported."
            )
        self.attended.add(layer)


class _Current(threading.local):
    step: StepContext | None = None


_current = _Current()


@contextmanager
def step_context(step: StepContext) -> Iterator[None]:
    """Set the step that attention of this thread reads. Never nested."""
    if _current.step is not None:
        raise StepContextError("A step began inside another step of the same thread: this is a bug, please report it.")
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def current_step() -> StepContext:
    """The current step of this thread."""
    if _current.step is None:
        raise StepContextError("The model ran outside a step: load it through the runner.")
    return _current.step


def attend(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Store key, value [T, K, D] of `layer` and attend with query [T, H, D] -> [T, H, D].

    `rope`: cos and sin [T, R] with which query and key are to be rotated, after `norms` of their heads; both may be
    overwritten then. `window` is the one that the model's code passes (0 = all tokens), and must be the cache group's;
    None: the cache group's.
    """
    step = current_step()
    cache = step.layers[layer]
    if window is not None and window != cache.window:
        raise StepContextError(
            f"Layer {layer} attends to {window or 'all'} tokens, but its cache group is for {cache.window or 'all'}: "
            "this model's config is not understood, please report it."
        )
    if key.shape[1] != cache.pool.shape[2] or key.shape[2] != cache.pool.shape[4]:
        raise StepContextError(
            f"Layer {layer} has {key.shape[1]} KV heads of size {key.shape[2]}, but its cache is for "
            f"{cache.pool.shape[2]} of size {cache.pool.shape[4]}: this model's config is not understood."
        )
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise StepContextError(
            f"Layer {layer} has queries {list(query.shape)} for keys {list(key.shape)}: only attention of a sequence "
            "to itself, with a multiple of the KV heads, is supported."
        )
    if value.shape != key.shape:
        raise StepContextError(
            f"Layer {layer} has keys of size {key.shape[2]} and values of size {value.shape[2]}: layers whose keys and "
            "values differ in shape are not supported."
        )
    step.attend_once(layer)
    meta = step.metas[cache.group]
    if rope is None:
        ops.write_kv(key, value, cache.pool, meta.slots)
    else:
        query = ops.rope_write_kv(query, key, value, *rope, cache.pool, meta.slots, norms=norms)
    if step.written is not None:
        step.written(layer, value)
    return ops.paged_attention(
        query,
        cache.pool,
        meta,
        scale=scale,
        window=cache.window,
        softcap=softcap,
        sinks=sinks,
        deterministic=step.deterministic,
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises StepContextError for arguments with which a family computes something else than this function.
    """
    given = {name for name, value in kwargs.items() if value is not None and value is not False} - _WITHOUT_EFFECT
    if attention_mask is not None:
        given.add("attention_mask")
    if given or kwargs.get("is_causal") is False:
        raise StepContextError(
            f"{type(module).__name__} passes {min(given, default='is_causal=False')} to its attention, which is causal "
            "and over all keys of its window here: this model is not supported."
        )
    out = attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Register the implementation with transformers; no mask function, so the models build no masks."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
