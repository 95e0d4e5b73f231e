"""Pipeline stages: which layers a stage has, and what stands for the rest."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.model.sharding.cuts import Span
from headrace_worker.model.sharding.modules import ForeignEmbedding, ForeignLayer, ForeignNorm
from headrace_worker.parallel.context import ParallelContext


def stage_layers(layers: int, stages: int) -> list[Span]:
    """Layers of each stage: equally many, the first stages one more (the last one has the head besides).

    Raises ModelUnsupportedError when there are more stages than layers.
    """
    if stages > layers:
        raise ModelUnsupportedError(
            f"pp {stages} is more than the {layers} layers of this model: use --pp {layers} or less."
        )
    share, more = divmod(layers, stages)
    starts = [stage * share + min(stage, more) for stage in range(stages + 1)]
    return list(pairwise(starts))


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers."""
    count = int(model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and name.rpartition(".")[2] in ("layers", "h"):
            return name, module
    raise ModelUnsupportedError(
        f"The layers of {type(model).__name__} are not in one list: serve it with --tp 1 --pp 1."
    )


def remove_foreign(model: PreTrainedModel, parallel: ParallelContext, device: torch.device) -> None:
    """Take what belongs to other stages out of a model on meta."""
    if parallel.pp_size == 1:
        return
    config: Any = model.config
    plan = getattr(config, "base_model_pp_plan", None)
    if not plan or getattr(config, "num_kv_shared_layers", None):
        raise ModelUnsupportedError(f"{config.model_type} cannot be split into pipeline stages: serve it with --pp 1.")
    _, layers = decoder_layers(model)
    first, stop = stage_layers(len(layers), parallel.pp_size)[parallel.pp_rank]
    for index, layer in enumerate(layers):
        if not first <= index < stop:
            layers[index] = ForeignLayer(layer, inlet=index == first - 1, outlet=index == stop)
    if not parallel.is_first_stage:
        weight = model.get_input_embeddings().weight
        _replace(model, model.get_input_embeddings(), ForeignEmbedding(weight.shape[1], weight.dtype, device))
    if not parallel.is_last_stage:
        names = list(plan)
        for name in names[names.index("layers") + 1 :]:
            model.base_model.set_submodule(name, ForeignNorm())
        _replace(model, model.get_output_embeddings(), ForeignNorm())


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    model.set_submodule(name, new)
