"""A forward pass of one rank: tokens or hidden states in, logits of the sampled positions or hidden states out."""

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.model.attention import current_step


class LogitsModel:
    """Calls a causal model so that its head runs on the sampled positions only, and on the last pipeline stage only.

    The model's own forward applies the rest of its family's rules (final soft cap, logit scale). When no position is
    sampled, the head does not run. Hidden states between stages are passed through the step's context.
    """

    def __init__(self, model: PreTrainedModel, parallel: ParallelContext = SINGLE) -> None:
        self._model = model
        self._inner = model.base_model
        self._is_last = parallel.is_last_stage
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, positions: Tensor, sample_index: Tensor) -> Tensor | None:
        """ids, positions [T]; sample_index [R] into T -> logits [R, V] in the head's format, or None when R is 0.

        Not on the last stage: -> hidden states [1, T, N] for the next one.
        """
        ids, positions = ids.unsqueeze(0), positions.unsqueeze(0)
        if not self._is_last or sample_index.shape[0] == 0:
            self._inner(input_ids=ids, position_ids=positions, use_cache=False)
            return None if self._is_last else self._hidden(ids)
        if self._selects:
            out = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=sample_index)
            logits: Tensor = out.logits[0]
        else:
            out = self._model(input_ids=ids, position_ids=positions, use_cache=False)
            logits = out.logits[0, sample_index]
        return logits

    def _hidden(self, ids: Tensor) -> Tensor:
        hidden = current_step().hidden_out
        if hidden is None or hidden.shape[:2] != ids.shape:
            raise ModelUnsupportedError(
                f"The layers of {type(self._model).__name__} cannot be run stage by stage: serve it with --pp 1."
            )
        return hidden
