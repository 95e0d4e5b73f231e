"""Pipeline stages: replaces the modules of other stages by placeholders."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.model.sharding.modules import PlaceholderEmbedding, PlaceholderLayer, PlaceholderNorm
from headrace_worker.model.sharding.places import stage_layers

# What follows the layers, of families that have no pipeline plan in transformers.
_FINAL_NORMS = {
    "granitemoehybrid": "norm",
    "jamba": "final_layernorm",
    "lfm2": "embedding_norm",
    "lfm2_moe": "embedding_norm",
    "nemotron_h": "norm_f",
}


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers."""
    count = int(model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and name.rpartition(".")[2] in ("layers", "h"):
            return name, module
    raise ModelUnsupportedError(
        f"The layers of {type(model).__name__} are not in one list: serve it with --tp 1 --pp 1."
    )


def replace_other_stages(model: PreTrainedModel, parallel: ParallelContext, device: torch.device) -> None:
    """Replace the modules of other stages in a model on meta."""
    if parallel.pp_size == 1:
        return
    config: Any = model.config
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    if not plan and config.model_type in _FINAL_NORMS:
        plan = ["layers", _FINAL_NORMS[config.model_type]]
    # Layers that share keys and values, or get a part of the embeddings each, need what the first stage has; hc_mult:
    # between layers are several hidden states of each token.
    whole = ("num_kv_shared_layers", "hidden_size_per_layer_input", "hc_mult")
    if not plan or any(getattr(config, name, None) for name in whole):
        raise ModelUnsupportedError(f"{config.model_type} cannot be split into pipeline stages: serve it with --pp 1.")
    _, layers = decoder_layers(model)
    stages = stage_layers(len(layers), parallel.pp_size)
    kinds = getattr(config, "indexer_types", None) or [None] * len(layers)
    if early := next((first for first, _ in stages if kinds[first] == "shared"), None):
        raise ModelUnsupportedError(
            f"Layer {early} of this {config.model_type} model attends to the tokens that an earlier layer selects, "
            f"which another stage would have: --pp {parallel.pp_size} does not fit, use another number."
        )
    first, stop = stages[parallel.pp_rank]
    for index, layer in enumerate(layers):
        if not first <= index < stop:
            layers[index] = PlaceholderLayer(layer, receives=index == first - 1, sends=index == stop)
    if not parallel.is_first_stage:
        weight = model.get_input_embeddings().weight
        _replace(model, model.get_input_embeddings(), PlaceholderEmbedding(weight.shape[1], weight.dtype, device))
    if not parallel.is_last_stage:
        for name in plan[plan.index("layers") + 1 :]:
            model.base_model.set_submodule(name, PlaceholderNorm())
        _replace(model, model.get_output_embeddings(), PlaceholderNorm())


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    model.set_submodule(name, new)
