"""A forward pass for the rows that draw: flat tokens in, one row of logits per drawing token out."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel


class LogitsModel:
    """Calls a causal model so that its head runs on the drawing tokens only.

    The model's own forward does the rest of its family's rules (final soft cap, logit scale). When no token draws,
    the head is not run at all.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._inner = model.base_model
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, positions: Tensor, sample_index: Tensor) -> Tensor | None:
        """ids, positions [T]; sample_index [R] into T -> logits [R, V] float32, or None when R is 0."""
        ids, positions = ids.unsqueeze(0), positions.unsqueeze(0)
        if sample_index.shape[0] == 0:
            self._inner(input_ids=ids, position_ids=positions, use_cache=False)
            return None
        if self._selects:
            out = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=sample_index)
            logits: Tensor = out.logits[0]
        else:
            out = self._model(input_ids=ids, position_ids=positions, use_cache=False)
            logits = out.logits[0, sample_index]
        return logits.to(torch.float32)
