"""Checkpoints whose tensors are stored in other pieces than the model has: routed experts, one by one.

transformers defines for each family which stored names make which tensor, and how. Two operations are supported, which
cover the mixtures of experts: the tensors of a numbered list are stacked, and those of several lists concatenated. The
result is read by part as any other tensor: only the requested experts and rows.
"""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from headrace_proto.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.sharding.cuts import Cut, Cuts, spans_of
from headrace_worker.model.weights import Weights, join


@dataclass(slots=True)
class _Stack:
    """A tensor made of stored ones: `parts[i][e]` is list i's tensor of expert e, stacked along a new dimension 0.

    The stacks of several lists are concatenated along `dim` of the result.
    """

    dim: int
    parts: list[dict[int, str]] = field(default_factory=list)


class ConvertedWeights:
    """A checkpoint under the model's names."""

    def __init__(self, stored: Weights, names: dict[str, str], stacks: dict[str, _Stack]) -> None:
        """`names`: for each tensor that is stored in one piece, the model's name -> the stored name."""
        self._stored, self._names, self._stacks = stored, names, stacks

    @property
    def read_bytes(self) -> int:
        return self._stored.read_bytes

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._stacks

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._names:
            return self._stored.shape(self._names[name])
        stack = self._stacks[name]
        whole = [len(stack.parts[0]), *self._stored.shape(stack.parts[0][0])]
        whole[stack.dim] = sum(self._stored.shape(part[0])[stack.dim - 1] for part in stack.parts)
        return tuple(whole)

    def read(self, name: str, cuts: Cuts = ()) -> Tensor:
        if name in self._names:
            return self._stored.read(self._names[name], cuts)
        stack = self._stacks[name]
        ranges = [spans_of(cuts, dim, size) for dim, size in enumerate(self.shape(name))]
        return join(ranges, lambda spans: self._read_block(stack, spans))

    def packed_share(self, name: str) -> float:
        return self._stored.packed_share(self._names[name]) if name in self._names else 1.0

    def _read_block(self, stack: _Stack, spans: tuple[tuple[int, int], ...]) -> Tensor:
        """One span of each dimension."""
        pieces = []
        offset = 0
        for part in stack.parts:
            length = self._stored.shape(part[0])[stack.dim - 1]
            first, stop = (min(max(edge - offset, 0), length) for edge in spans[stack.dim])
            offset += length
            if first == stop:
                continue
            inner = list(spans[1:])
            inner[stack.dim - 1] = (first, stop)
            cuts = tuple(Cut(dim, (span,)) for dim, span in enumerate(inner))
            experts = [self._stored.read(part[index], cuts) for index in range(*spans[0])]
            pieces.append(torch.stack(experts))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, stack.dim)


def converted(
    stored: Weights,
    model: PreTrainedModel,
    wanted: Container[str],
    own_name: Callable[[str], str | None] | None = None,
) -> Weights:
    """The checkpoint under the names of a model, `wanted`; `stored` itself when its names are the same.

    own_name: of a stored tensor in a checkpoint with other models beside this one; None for a tensor of these.

    Raises ModelUnsupportedError for a conversion of another kind, ModelLoadError when experts are missing.
    """
    family = model.config.model_type
    rules: list[Any] = []
    for owner in dict.fromkeys((type(model).__name__, type(model.base_model).__name__, family)):
        rules += get_checkpoint_conversion_mapping(owner) or []
    names: dict[str, str] = {}
    stacks: dict[str, _Stack] = {}
    unread = False
    for entry in stored:
        name = entry if own_name is None else own_name(entry)
        if name is None:
            unread = True
            continue
        if name in wanted:
            names[name] = entry
            continue
        for rule in rules:
            if getattr(rule, "operations", None):
                continue
            for pattern, target in zip(rule.source_patterns, rule.target_patterns, strict=False):
                name = re.sub(pattern, target, name)
        for rule in rules:
            if getattr(rule, "operations", None) and _collect(rule, name, entry, stacks, family):
                break
        else:
            names[name] = entry
    for name, stack in stacks.items():
        whole = set(range(len(stack.parts[0])))
        shapes = {stored.shape(entry) for part in stack.parts for entry in part.values()}
        if any(set(part) != whole for part in stack.parts) or len(shapes) != 1:
            raise ModelLoadError(f"The checkpoint lacks experts of {name!r}: it is incomplete, download it again.")
    if not stacks and not unread and all(name == entry for name, entry in names.items()):
        return stored
    return ConvertedWeights(stored, names, stacks)


def _collect(rule: Any, name: str, entry: str, stacks: dict[str, _Stack], family: str) -> bool:
    """Add a stored tensor to the stack of a rule; False when the rule does not apply."""
    for position, pattern in enumerate(rule.source_patterns):
        found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        if not found:
            continue
        kinds = [type(operation).__name__ for operation in rule.operations]
        stacked = bool(found.groups()) and rule.operations[0].dim == 0
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) or not stacked:
            raise ModelUnsupportedError(
                f"The checkpoint stores {entry!r} in a form of {family} that is not read ({', '.join(kinds)}): "
                "load it with transformers and save it again."
            )
        target = name[: found.start()] + rule.target_patterns[0] + name[found.end() :]
        dim = rule.operations[1].dim if len(kinds) == 2 else 1
        stack = stacks.setdefault(target, _Stack(dim, [{} for _ in rule.source_patterns]))
        stack.parts[position][int(found[1])] = entry
        return True
    return False
