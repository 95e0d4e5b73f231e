"""Attention over the tokens that an indexer selects: DeepSeek Sparse Attention (DSA), over latents.

Each layer caches, behind a token's latent and rotary key, an index key. The indexer scores all tokens of a sequence by
products of index keys with a query of its own, and attention is over the best. Up to as many tokens as it selects that
is attention over all. A layer without an indexer uses the selection of the layer before.

`redirect` replaces the forward of each indexer, and runs the attention's own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.meta import AttentionMeta
from headrace_worker.model.attention import ALL, All, StepContextError, current_step
from headrace_worker.model.latent import is_latent

# Where the rotary part of an index key is, and the name of the rotary embedding in the family's file.
_BEGINNING, _END = "beginning", "end"
_ROTARY = {
    "axk2": (_BEGINNING, "apply_rotary_pos_emb"),
    "deepseek_v32": (_BEGINNING, "apply_rotary_pos_emb"),
    "glm_moe_dsa": (_BEGINNING, "apply_rotary_pos_emb_interleave"),
    "hy_v4": (_END, "apply_rotary_pos_emb"),
}
_Rotation = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


def redirect(model: nn.Module) -> None:
    """Makes the indexers of a model read and write the cache of a step. Raises ModelUnsupportedError."""
    for module in model.modules():
        if not is_latent(module) or not hasattr(module, "indexer"):
            continue
        module.forward = partial(_attend, module.forward)
        indexer: Any = module.indexer
        if indexer is not None:
            indexer.forward = partial(_select, indexer, _rotation(indexer))


def _attend(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The attention's own forward, which takes a part of the mask: there is none in a step."""
    return forward(*args, **kwargs | {"attention_mask": ALL})


def _rotation(indexer: Any) -> _Rotation:
    """Rotates the rotary parts of queries [1, T, H, D] and keys [1, T, 1, D] by cos and sin, as the family does."""
    if (found := _ROTARY.get(indexer.config.model_type)) is None:
        raise ModelUnsupportedError(
            f"{indexer.config.model_type} selects keys by an indexer that is not known: this model is not supported."
        )
    place, name = found
    embed, size = inspect.unwrap(type(indexer).forward).__globals__[name], indexer.qk_rope_head_dim
    rotary = slice(0, size) if place == _BEGINNING else slice(indexer.head_dim - size, indexer.head_dim)

    def rotate(query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query[..., rotary], key[..., rotary] = embed(query[..., rotary], key[..., rotary], *angles, unsqueeze_dim=2)
        return query, key

    return rotate


def _select(
    indexer: Any,
    rotate: _Rotation,
    hidden: Tensor,
    low_rank: Tensor,
    angles: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> AttentionMeta | All:
    """Stores the index keys of new tokens, of hidden states [1, T, N], and selects the keys of each.

    low_rank: what queries are made of [1, T, Q]. angles: cos and sin [1, T, R]. What is selected: each token as a
    sequence of one query, over blocks of one position.
    """
    step, tokens = current_step(), hidden.shape[1]
    cache = step.layers[indexer.layer_idx]
    meta, keys = step.metas[cache.group], cache.parts[0][..., -indexer.head_dim :]
    if cache.window:
        raise StepContextError(f"Layer {indexer.layer_idx} has both an indexer and a window: it is not supported.")
    query = indexer.wq_b(low_rank).view(1, tokens, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(hidden).to(indexer.k_norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    query, key = rotate(query, key, angles)
    ops.write_part(key[0], keys, meta.slots)
    if meta.max_seq_len <= indexer.index_topk:
        return ALL
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))[0].float()
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    table, lens = ops.select_keys(query[0], weights * scale, keys, meta, indexer.index_topk)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=lens.device)
    return AttentionMeta(starts, lens, table, meta.slots, 1, indexer.index_topk)
