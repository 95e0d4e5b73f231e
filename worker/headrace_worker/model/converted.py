"""Checkpoints whose tensors are stored in other pieces than the model has: routed experts, one by one; projections.

transformers defines for each family which stored names make which tensor, and how. Three forms are supported: the
tensors of a numbered list are stacked, and those of several lists concatenated; tensors are concatenated; one tensor is
split. The result is read by part as any other tensor: only the requested experts and rows; experts as codes, where
all of them have codes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.packable import PackableExperts, PackableMatrix, merge_packable
from headrace_worker.model.sharding.cuts import Cut, Cuts, spans_of
from headrace_worker.model.weights import Weights, join

_Spans = tuple[Span, ...]  # one of each dimension


@dataclass(slots=True)
class _Joined:
    """A tensor made of stored ones: those of `parts`, each of which has numbers from 0, concatenated along `dim`.

    stacked: the tensors of a part are stacked along a new dimension 0 first; otherwise it has one.
    """

    dim: int
    stacked: bool
    parts: list[dict[int, str]] = field(default_factory=list)

    def check(self, name: str, stored: Weights) -> None:
        """Raises ModelLoadError unless all its tensors are stored."""
        whole = set(range(max(len(part) for part in self.parts)))
        shapes = {stored.shape(entry) for part in self.parts for entry in part.values()}
        if not self.stacked:
            shapes = {shape[: self.dim] + shape[self.dim + 1 :] for shape in shapes}
        if any(set(part) != whole for part in self.parts) or len(shapes) != 1:
            what = "experts" if self.stacked else "parts"
            raise ModelLoadError(f"The checkpoint lacks {what} of {name!r}: it is incomplete, download it again.")

    def shape(self, stored: Weights) -> tuple[int, ...]:
        first = stored.shape(self.parts[0][0])
        whole = [len(self.parts[0]), *first] if self.stacked else [*first]
        whole[self.dim] = sum(self._length(part, stored) for part in self.parts)
        return tuple(whole)

    def read(self, stored: Weights, spans: _Spans) -> Tensor:
        pieces = []
        offset = 0
        for part in self.parts:
            length = self._length(part, stored)
            first, stop = (min(max(edge - offset, 0), length) for edge in spans[self.dim])
            offset += length
            if first == stop:
                continue
            inner = [*spans]
            inner[self.dim] = (first, stop)
            if self.stacked:
                cuts = _cuts(inner[1:])
                pieces.append(torch.stack([stored.read(part[index], cuts) for index in range(*spans[0])]))
            else:
                pieces.append(stored.read(part[0], _cuts(inner)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def read_codes(self, stored: Weights, ranges: Sequence[Sequence[Span]]) -> PackableExperts | None:
        """The codes of stacked matrices, whose outputs are concatenated."""
        if not self.stacked or self.dim != 1 or len(ranges) != 3:
            return None
        experts = []
        for index in (index for span in ranges[0] for index in range(*span)):
            offset, pieces = 0, []
            for part in self.parts:
                length = self._length(part, stored)
                spans = [(max(start - offset, 0), min(stop - offset, length)) for start, stop in ranges[1]]
                spans = [span for span in spans if span[0] < span[1]]
                offset += length
                if spans:
                    pieces.append(stored.read_codes(part[index], (Cut(0, tuple(spans)), Cut(1, tuple(ranges[2])))))
            matrices = [piece for piece in pieces if isinstance(piece, PackableMatrix)]
            if len(matrices) < len(pieces):
                return None
            experts.append(matrices[0] if len(matrices) == 1 else merge_packable(matrices))
        return PackableExperts(experts)

    def _length(self, part: dict[int, str], stored: Weights) -> int:
        return stored.shape(part[0])[self.dim - self.stacked]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a stored tensor: from `start` on along `dim`."""

    entry: str
    dim: int
    start: int
    size: tuple[int, ...]

    def shape(self, _stored: Weights) -> tuple[int, ...]:
        return self.size

    def read_codes(self, _stored: Weights, _ranges: Sequence[Sequence[Span]]) -> None:
        return None

    def read(self, stored: Weights, spans: _Spans) -> Tensor:
        inner = [*spans]
        inner[self.dim] = (spans[self.dim][0] + self.start, spans[self.dim][1] + self.start)
        return stored.read(self.entry, _cuts(inner))


def _cuts(spans: Sequence[tuple[int, int]]) -> Cuts:
    return tuple(Cut(dim, (span,)) for dim, span in enumerate(spans))


class ConvertedWeights:
    """A checkpoint under the model's names."""

    def __init__(self, stored: Weights, names: dict[str, str], made: Mapping[str, _Joined | _Piece]) -> None:
        """`names`: for each tensor that is stored in one piece, the model's name -> the stored name."""
        self._stored, self._names, self._made = stored, names, made

    @property
    def read_bytes(self) -> int:
        return self._stored.read_bytes

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._made

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._names:
            return self._stored.shape(self._names[name])
        return self._made[name].shape(self._stored)

    def read(self, name: str, cuts: Cuts = ()) -> Tensor:
        if name in self._names:
            return self._stored.read(self._names[name], cuts)
        return join(self._ranges(name, cuts), lambda spans: self._made[name].read(self._stored, spans))

    def read_codes(self, name: str, cuts: Cuts = ()) -> PackableMatrix | PackableExperts | None:
        if name in self._names:
            return self._stored.read_codes(self._names[name], cuts)
        return self._made[name].read_codes(self._stored, self._ranges(name, cuts))

    def _ranges(self, name: str, cuts: Cuts) -> list[tuple[Span, ...]]:
        return [spans_of(cuts, dim, size) for dim, size in enumerate(self.shape(name))]


def converted(
    stored: Weights,
    model: PreTrainedModel,
    wanted: Mapping[str, tuple[int, ...]],
    own_name: Callable[[str], str | None] | None = None,
) -> Weights:
    """The checkpoint under the names of a model, `wanted`, whose shapes it has; `stored` itself if names are the same.

    own_name: of a stored tensor in a checkpoint with other models beside this one; None for a tensor of these.

    Raises ModelUnsupportedError for a conversion of another kind, ModelLoadError when experts are missing.
    """
    family = model.config.model_type
    rules: list[Any] = []
    for owner in dict.fromkeys((type(model).__name__, type(model.base_model).__name__, family)):
        rules += get_checkpoint_conversion_mapping(owner) or []
    names: dict[str, str] = {}
    made: dict[str, _Joined | _Piece] = {}
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
            if getattr(rule, "operations", None) and _collect(rule, name, entry, made, stored, wanted, family):
                break
        else:
            names[name] = entry
    for name, source in made.items():
        if isinstance(source, _Joined):
            source.check(name, stored)
    if not made and not unread and all(name == entry for name, entry in names.items()):
        return stored
    return ConvertedWeights(stored, names, made)


def _collect(
    rule: Any,
    name: str,
    entry: str,
    made: dict[str, _Joined | _Piece],
    stored: Weights,
    wanted: Mapping[str, tuple[int, ...]],
    family: str,
) -> bool:
    """Adds a stored tensor to what a rule makes of it; False when the rule does not apply."""
    for position, pattern in enumerate(rule.source_patterns):
        plain = pattern.replace("\\.", ".")  # some rules escape their dots
        found = re.search(re.escape(plain).replace(r"\*", r"(\d+)"), name)
        if not found:
            continue
        kinds = [type(operation).__name__ for operation in rule.operations]
        targets = [name[: found.start()] + target + name[found.end() :] for target in rule.target_patterns]
        numbered = bool(found.groups())
        if kinds == ["Split"] and not numbered and all(target in wanted for target in targets):
            dim, start = rule.operations[0].dim, 0
            for target in targets:
                made[target] = _Piece(entry, dim, start, wanted[target])
                start += wanted[target][dim]
            if start != stored.shape(entry)[dim]:
                raise ModelLoadError(
                    f"{entry!r} of the checkpoint has shape {list(stored.shape(entry))}, but the config requires "
                    f"{start} in dimension {dim}."
                )
            return True
        lists = kinds[0] == "MergeModulelist" and rule.operations[0].dim == 0 and kinds[1:] in ([], ["Concatenate"])
        if not (lists if numbered else kinds == ["Concatenate"]) or len(targets) != 1:
            raise ModelUnsupportedError(
                f"The checkpoint stores {entry!r} in a form of {family} that is not read ({', '.join(kinds)}): "
                "load it with transformers and save it again."
            )
        dim = rule.operations[-1].dim if kinds[-1] == "Concatenate" else 1  # 1: of a single list
        source = made.setdefault(targets[0], _Joined(dim, numbered, [{} for _ in rule.source_patterns]))
        assert isinstance(source, _Joined)
        source.parts[position][int(found[1]) if numbered else 0] = entry
        return True
    return False
