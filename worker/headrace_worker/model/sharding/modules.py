"""Modules that communicate with other ranks, and placeholders for modules of other stages."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_kernels.rounded import Rounded
from headrace_worker.comm.parallel_context import Communicator
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.attention import current_step


class Wrapper(nn.Module):
    """Wraps a module of this rank's size. `weight` is available for model code that reads its dtype."""

    def __init__(self, inner: nn.Module, tp: Communicator) -> None:
        super().__init__()
        self.inner = inner
        self._tp = tp

    @property
    def weight(self) -> Tensor | None:
        """This rank's part of the weight; None if it is packed for its device."""
        weight = self.inner.weight
        assert weight is None or isinstance(weight, Tensor)
        return weight


class Reduced(Wrapper):
    """A module whose output is summed over all ranks: a linear with a part of the inputs."""

    def forward(self, hidden_states: Tensor | Rounded) -> Tensor:
        """hidden_states [..., N / ranks] -> [..., M]."""
        return self._tp.all_reduce(self.inner(hidden_states))


class SharedNorm(Wrapper):
    """A gated RMSNorm over groups of values, of each of which several ranks have an equal part."""

    def __init__(self, inner: nn.Module, tp: Communicator, group_size: int, eps: float) -> None:
        """inner: of this rank's part of a group, for its weight. group_size: of the whole group."""
        super().__init__(inner, tp)
        self._group_size, self._eps = group_size, eps

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """hidden_states, gate [..., M] -> [..., M]. One all-gather of a number for each token."""
        assert self.weight is not None
        values, size = hidden_states.float(), hidden_states.shape[-1]
        if gate is not None:
            values = values * functional.silu(gate.float())
        peers = self._group_size // size
        first = self._tp.rank // peers * peers
        squares = self._tp.all_gather(values.square().sum(-1, keepdim=True))[..., first : first + peers]
        variance = squares.sum(-1, keepdim=True) / self._group_size
        return self.weight * (values * torch.rsqrt(variance + self._eps)).to(hidden_states.dtype)


class ShardedExperts(Wrapper):
    """Routed experts: each rank computes a part of every expert, or some experts whole."""

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
    """An embedding of which each rank has the rows of some ids: the sum over ranks adds the others' rows."""

    def __init__(self, inner: nn.Module, tp: Communicator, span: Span) -> None:
        super().__init__(inner, tp)
        self._span = span

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] -> [1, T, N]."""
        first, stop = self._span
        outside = (input_ids < first) | (input_ids >= stop)
        rows: Tensor = self.inner((input_ids - first).masked_fill(outside, 0))
        return self._tp.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class VocabHead(Wrapper):
    """An output head of which each rank has the rows of some ids; returns the logits of all ids."""

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


class PlaceholderEmbedding(nn.Module):
    """Replaces the embedding on all stages but the first: its rows are never read."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._empty = torch.zeros((), dtype=dtype, device=device)
        self._hidden_size = hidden_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] -> zeros [1, T, N]."""
        return self._empty.expand(*input_ids.shape, self._hidden_size)


class PlaceholderLayer(nn.Module):
    """Replaces a layer of another stage, at its index: returns its input.

    The last one before this stage's own layers returns the hidden states that the previous stage sent, whatever the
    model did to the embedding; the first one after them stores the hidden states for the next stage.
    """

    def __init__(self, original: nn.Module, *, receives: bool = False, sends: bool = False) -> None:
        super().__init__()
        for name, value in vars(original).items():
            # A model's forward may read plain attributes of its layers, such as their attention type.
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._receives, self._sends = receives, sends
        self._selects = "prev_topk_indices" in inspect.signature(original.forward).parameters

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """hidden_states [1, T, N] -> [1, T, N], with no tokens selected where layers hand those on, too."""
        if self._receives:
            received = current_step().hidden_in
            assert received is not None
            hidden_states = received
        elif self._sends:
            current_step().hidden_out = hidden_states
        return (hidden_states, None) if self._selects else hidden_states


class PlaceholderNorm(nn.Module):
    """Replaces the final norm and the head on all stages but the last: returns its input."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
