"""Non-persistent buffers (rotary frequencies, embedding scales): in no checkpoint, so computed from the config.

transformers models compute them in `_init_weights`. Each buffer is computed twice over different initial values: one
that differs between the runs was not written, and the model is refused instead of served with undefined values.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_base.errors import ModelLoadError, ModelUnsupportedError

_MOST_ELEMENTS = 1 << 28  # 1 GiB in float32


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Fill every non-persistent buffer of a model whose parameters are still on meta."""
    elements = sum(
        buffer.numel()
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    )
    if elements > _MOST_ELEMENTS:
        raise ModelUnsupportedError(
            f"The config asks for buffers of {elements:,} numbers, more than any supported model: check its sizes, "
            "max_position_embeddings first."
        )
    for prefix, module, initializer in _modules_with_initializer(model):
        names = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]
        if not names:
            continue
        # Some models fill buffers of their layers.
        for parts in ((module,), (module, initializer)):
            unknown = _compute(prefix, module, names, initializer, parts)
            if not unknown:
                break
        else:
            raise ModelLoadError(f"Buffer {prefix}.{unknown[0]} is not computed from the config: unsupported model.")
        for name in names:
            module._buffers[name] = _present(module._buffers[name]).to(device)
    for module in model.modules():
        # Attributes outside the buffer tables that must equal the buffers.
        inv_freq = module._buffers.get("inv_freq")
        if inv_freq is not None and isinstance(getattr(module, "original_inv_freq", None), torch.Tensor):
            module.original_inv_freq = inv_freq.clone()


def _compute(
    prefix: str, module: nn.Module, names: list[str], initializer: PreTrainedModel, parts: tuple[nn.Module, ...]
) -> list[str]:
    """Computes buffers of a module by initializing these parts of a model; returns those that are not computed so."""
    runs = []
    for initial in (0, 1):
        for name in names:
            module._buffers[name] = torch.full_like(_present(module._buffers[name]), initial, device="cpu")
        try:
            for part in parts:
                initializer._init_weights(part)
        except Exception as error:
            raise ModelUnsupportedError(
                f"The buffers of {prefix or type(initializer).__name__} cannot be computed from the config "
                f"({type(error).__name__}): this model is not supported."
            ) from error
        runs.append({name: module._buffers[name] for name in names})
    first, second = runs
    return [name for name in names if not torch.equal(_present(first[name]), _present(second[name]))]


def _present(buffer: torch.Tensor | None) -> torch.Tensor:
    assert buffer is not None
    return buffer


def scale_rotary(model: nn.Module, factors: torch.Tensor) -> None:
    """Divide rotary inverse frequencies by `factors` [head_dim / 2]: the form of llama3 scaling in GGUF files."""
    for module in model.modules():
        inv_freq = module._buffers.get("inv_freq")
        if inv_freq is not None:
            module._buffers["inv_freq"] = inv_freq / factors.to(inv_freq)


def _modules_with_initializer(model: PreTrainedModel) -> list[tuple[str, nn.Module, PreTrainedModel]]:
    """Every module with the innermost PreTrainedModel around it, whose `_init_weights` initialises it."""
    owners: dict[str, PreTrainedModel] = {}
    found = []
    for name, module in model.named_modules():
        parent = owners.get(name.rpartition(".")[0], model)
        owners[name] = module if isinstance(module, PreTrainedModel) else parent
        found.append((name, module, owners[name]))
    return found
