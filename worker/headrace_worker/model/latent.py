"""Multi-head latent attention: the cache has one latent and one rotary key per token, which all heads share.

Keys and values are products of the latent. The matrix that makes keys is applied to the query instead, and the matrix
that makes values to the result of attention ("absorbed"), so that latents are read as they are. A module's own forward
runs; `redirect` replaces the method that would make keys and values.

Shape letters: T tokens, H heads of this rank, L size of a latent, R of a rotary key, N and E of the parts of a head's
key and value that are made of a latent.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace_base.errors import ModelUnsupportedError

_PARTS = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def is_latent(module: nn.Module) -> bool:
    """Whether a module of attention caches latents."""
    return all(hasattr(module, name) for name in _PARTS)


def redirect(model: nn.Module, layers: int) -> None:
    """Makes all modules with latents pass them to attention as they are.

    Raises ModelUnsupportedError unless there are as many as layers that cache latents.
    """
    found = [module for module in model.modules() if is_latent(module)]
    if len(found) != layers:
        raise ModelUnsupportedError(
            f"{type(model).__name__} has latent attention in {len(found)} places, but {layers} layers that cache "
            "latents: this model is not supported."
        )
    for module in found:
        module.expand_kv = MethodType(_keep, module)  # type: ignore[assignment]


def _keep(_: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """latent [1, 1, T, L], rotary key [1, 1, T, R] -> what is cached [1, 1, T, L + R], twice."""
    entry = torch.cat((latent, rotary), -1)
    return entry, entry


def absorbed(module: Any, query: Tensor) -> Tensor:
    """query [T, H, N + R] -> [T, H, L + R], to be multiplied by what is cached."""
    nope = module.qk_nope_head_dim
    made = torch.einsum("thn,hnl->thl", query[..., :nope], _weight(module)[:, :nope])
    return torch.cat((made, query[..., nope:]), -1)


def expanded(module: Any, mixed: Tensor) -> Tensor:
    """mixed: each head's weighted sum of latents [T, H, L] -> its weighted sum of values [T, H, E]."""
    return torch.einsum("thl,hel->the", mixed, _weight(module)[:, module.qk_nope_head_dim :])


def _weight(module: Any) -> Tensor:
    """[H, N + E, L]"""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
