"""The modules that talk to the other ranks, and those that stand for layers of other stages."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_worker.model.attention import current_step
from headrace_worker.model.sharding.cuts import Span
from headrace_worker.parallel.context import Communicator


class Wrapper(nn.Module):
    """Around a module of this rank's size. Model code that asks for the dtype of its weight finds it."""

    def __init__(self, inner: nn.Module, tp: Communicator) -> None:
        super().__init__()
        self.inner = inner
        self._tp = tp

    @property
    def weight(self) -> Tensor | None:
        """This rank's part of the weight; None where it is laid out for its device."""
        weight = self.inner.weight
        assert weight is None or isinstance(weight, Tensor)
        return weight


class Reduced(Wrapper):
    """A module whose output is the sum of what all ranks compute: a linear with a part of the inputs."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., N / ranks] -> [..., M]."""
        return self._tp.all_reduce(self.inner(hidden_states))


class ShardedExperts(Wrapper):
    """Routed experts, of which each rank computes a part: of every expert, or some experts whole."""

    def __init__(self, inner: nn.Module, tp: Communicator, span: Span | None) -> None:
        """`span`: the experts that this rank has, None for a part of each."""
        super().__init__(inner, tp)
        self._span = span

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, N], experts and their weights [T, A] -> [T, N]."""
        if self._span is not None:
            first, stop = self._span
            local = (top_k_index >= first) & (top_k_index < stop)
            # The id after the last one means "not here" to transformers' experts interface.
            top_k_index = torch.where(local, top_k_index - first, stop - first)
            top_k_weights = top_k_weights.masked_fill(~local, 0.0)
        return self._tp.all_reduce(self.inner(hidden_states, top_k_index, top_k_weights))


class VocabEmbedding(Wrapper):
    """An embedding of which each rank has the rows of some ids: the others' rows come out of the sum."""

    def __init__(self, inner: nn.Module, tp: Communicator, span: Span) -> None:
        super().__init__(inner, tp)
        self._span = span

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] -> [1, T, N]."""
        first, stop = self._span
        foreign = (input_ids < first) | (input_ids >= stop)
        rows: Tensor = self.inner((input_ids - first).masked_fill(foreign, 0))
        return self._tp.all_reduce(rows.masked_fill(foreign.unsqueeze(-1), 0.0))


class VocabHead(Wrapper):
    """An output head of which each rank has the rows of some ids; gives the logits of all."""

    def __init__(self, inner: nn.Module, tp: Communicator, vocab_size: int) -> None:
        super().__init__(inner, tp)
        self._vocab_size = vocab_size
        self._share = -(-vocab_size // tp.size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., N] -> [..., V]."""
        logits: Tensor = self.inner(hidden_states)
        if logits.shape[-1] < self._share:
            logits = functional.pad(logits, (0, self._share - logits.shape[-1]))
        return self._tp.all_gather(logits)[..., : self._vocab_size]


class ForeignEmbedding(nn.Module):
    """In place of an embedding on a stage that is not the first: its rows are never read."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._empty = torch.zeros((), dtype=dtype, device=device)
        self._hidden_size = hidden_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] -> zeros [1, T, N]."""
        return self._empty.expand(*input_ids.shape, self._hidden_size)


class ForeignLayer(nn.Module):
    """In place of a layer of another stage, at its index: hands on what it gets.

    The last one before this stage's own layers hands on what the stage before has sent, whatever the model did to
    the embedding; the first one after them keeps what the stage after is to get.
    """

    def __init__(self, original: nn.Module, *, inlet: bool = False, outlet: bool = False) -> None:
        super().__init__()
        for name, value in vars(original).items():
            # A model's forward may read plain attributes of its layers, such as their attention type.
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._inlet, self._outlet = inlet, outlet

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        if self._inlet:
            received = current_step().hidden_in
            assert received is not None
            return received
        if self._outlet:
            current_step().hidden_out = hidden_states
        return hidden_states


class ForeignNorm(nn.Module):
    """In place of the final norm on a stage that is not the last."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
