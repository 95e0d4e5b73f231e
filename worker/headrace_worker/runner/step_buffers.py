"""The tensors through which recorded steps are connected with what is not recorded.

stage before ── receive ─▶ hidden_in ─▶ recorded layers ─▶ out ── sampler, or sent to the stage after
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headrace_worker.model.load import LoadedModel


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Of all recorded sizes: a smaller step uses the beginning of them, so that only the newest replay is valid."""

    hidden_in: Tensor | None  # [1, T, N]; None on the first stage
    out: Tensor  # on the last stage logits [S, V] float32, on others hidden states [1, T, N]
    ends_in_logits: bool

    @classmethod
    def of(cls, model: LoadedModel, tokens: int, sequences: int) -> Self:
        """Zeros: for a model's part, and the most tokens and sequences of a recorded step."""
        parallel, device = model.parallel, model.device.torch_device
        hidden_in = None if parallel.is_first_stage else hidden_states(model, tokens).zero_()
        if parallel.is_last_stage:
            return cls(hidden_in, torch.zeros((sequences, model.vocab_size), device=device), True)
        return cls(hidden_in, hidden_states(model, tokens).zero_(), False)

    def part(self, tokens: int, sequences: int) -> Self:
        """Those of a step of this size: views."""
        hidden_in = self.hidden_in[:, :tokens] if self.hidden_in is not None else None
        out = self.out[:sequences] if self.ends_in_logits else self.out[:, :tokens]
        return type(self)(hidden_in, out, self.ends_in_logits)


def hidden_states(model: LoadedModel, tokens: int) -> Tensor:
    """Unfilled [1, T, N], as stages exchange them."""
    shape = (1, tokens, int(model.config.hidden_size))
    return torch.empty(shape, dtype=model.dtype, device=model.device.torch_device)
