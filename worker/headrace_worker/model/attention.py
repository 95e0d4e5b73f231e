"""Attention over the paged cache, called through transformers' attention interface.

Shape letters: T tokens of the step, H query heads, K key/value heads, D head size, B blocks, P positions per block.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headrace_kernels.ops as ops
from headrace_base.errors import HeadraceError
from headrace_kernels.meta import AttentionMeta, HeadNorms, StateMeta
from headrace_worker.model import latent

IMPLEMENTATION = "headrace"
# Arguments that attention may get and that do not change its result.
_WITHOUT_EFFECT = {"cache_position", "is_causal", "logits_to_keep", "position_embeddings", "position_ids"}


class All:
    """In the place of a mask, and of the keys that an indexer selects: nothing is left out."""

    def __getitem__(self, _: Any) -> None:
        return None


ALL = All()


class StepContextError(HeadraceError):
    """Attention was called outside a step, or for a layer that is not in the cache."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer's keys and values are."""

    group: int
    parts: tuple[Tensor, ...]  # keys [B, K, P, D] and values [B, K, P, E]; latents [B, 1, P, L + R + I] alone
    window: int  # 0 = all
    pool: Tensor | None = None  # [2, B, K, P, D], both parts; None where their sizes differ
    kv_scale: Tensor | None = None  # [2, B, K, P], of a pool of 8 bits
    stores: bool = True  # False: they are those of an earlier layer
    memory: tuple[Tensor, ...] = ()  # memory of the parts, with their scales [B, N]

    @classmethod
    def of(cls, group: int, pool: Tensor, window: int) -> Self:
        """Keys and values [2, B, K, P, D] of equal sizes."""
        return cls(group, (pool[0], pool[1]), window, pool, memory=(pool[0].flatten(1), pool[1].flatten(1)))


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
    """Store key [T, K, D] and value [T, K, E] of `layer` and attend with query [T, H, D] -> [T, H, E].

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
    sizes = [(part.shape[1], part.shape[3]) for part in cache.parts]
    if [(part.shape[1], part.shape[2]) for part in (key, value)] != sizes:
        cached = " and ".join(f"{heads} of size {size}" for heads, size in sizes)
        raise StepContextError(
            f"Layer {layer} has {key.shape[1]} KV heads with keys of size {key.shape[2]} and values of size "
            f"{value.shape[2]}, but its cache is for {cached}: this model's config is not understood."
        )
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise StepContextError(
            f"Layer {layer} has queries {list(query.shape)} for keys {list(key.shape)}: only attention of a sequence "
            "to itself, with a multiple of the KV heads, is supported."
        )
    step.attend_once(layer)
    meta, pool = step.metas[cache.group], cache.pool
    options: dict[str, Any] = {
        "scale": scale,
        "window": cache.window,
        "softcap": softcap,
        "sinks": sinks,
        "deterministic": step.deterministic,
    }
    if rope is not None:
        if pool is None or not cache.stores:
            raise StepContextError(
                f"Layer {layer} was fused, which its cache does not allow: this is a bug, report it."
            )
        query = ops.rope_write_kv(query, key, value, *rope, pool, meta.slots, cache.kv_scale, norms)
    elif cache.stores and pool is not None:
        ops.write_kv(key, value, pool, meta.slots, cache.kv_scale)
    elif cache.stores:
        for rows, part in zip((key, value), cache.parts, strict=True):
            ops.write_part(rows, part, meta.slots)
    if step.written is not None and cache.stores:
        step.written(layer, value)
    if pool is not None:
        return ops.paged_attention(query, pool, meta, kv_scale=cache.kv_scale, **options)
    keys, values = cache.parts
    return ops.uneven_attention(query, keys, values, meta, **options)


def attend_latents(
    module: Any,
    query: Tensor,
    entry: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    selected: AttentionMeta | None = None,
) -> Tensor:
    """Store what is cached of new tokens [T, L + R], and attend with query [T, H, N + R] -> [T, H, E].

    Shape letters are those of latent.py. selected: what the indexer returns, which has stored the index keys (I).
    """
    step, layer = current_step(), int(module.layer_idx)
    cache = step.layers[layer]
    meta = step.metas[cache.group]
    size, index = entry.shape[1], getattr(module.config, "index_head_dim", None) or 0
    if cache.window != window or cache.parts[0].shape[3] != size + index or len(cache.parts) != 1:
        raise StepContextError(
            f"Layer {layer} has latents of size {size} and index keys of size {index}, but its cache has the shape "
            f"{list(cache.parts[0].shape)}: this model's config is not understood."
        )
    step.attend_once(layer)
    latents = cache.parts[0][..., :size]
    ops.write_part(entry[:, None], latents, meta.slots)
    if step.written is not None:
        step.written(layer, entry)
    if selected is not None:
        meta, latents = selected, cache.parts[0].view(-1, 1, 1, size + index)[..., :size]
    mixed = ops.uneven_attention(
        latent.absorbed(module, query), latents, latents[..., : module.kv_lora_rank], meta, scale=scale, window=window,
        sinks=sinks, deterministic=step.deterministic,
    )  # fmt: skip
    return latent.expanded(module, mixed)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: AttentionMeta | All | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises StepContextError for arguments with which a family computes something else than this function.
    """
    given = {name for name, value in kwargs.items() if value is not None and value is not False} - _WITHOUT_EFFECT
    if attention_mask is not None and attention_mask is not ALL:
        given.add("attention_mask")
    latents, selected = latent.is_latent(module), None if isinstance(indices, All) else indices
    if selected is not None and not latents:
        given.add("indices")
    if given or kwargs.get("is_causal") is False:
        raise StepContextError(
            f"{type(module).__name__} passes {min(given, default='is_causal=False')} to its attention, which is causal "
            "and over all keys of its window here: this model is not supported."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if latents and not softcap:
        queries = query[0].transpose(0, 1)
        return attend_latents(module, queries, key[0, 0], scale, sliding_window or 0, s_aux, selected)[None], None
    out = attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scale,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Register the implementation with transformers; no mask function, so the models build no masks."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
