"""Which part of a whole tensor a rank holds, in numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_proto.errors import ModelUnsupportedError

Span = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Cut:
    """The spans of one dimension that are kept, one after the other."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.spans)


Cuts = tuple[Cut, ...]  # at most one per dimension; dimensions that are not named are whole


def cut_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape that is left of a whole tensor's."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.dim] = cut.size
    return tuple(sizes)


def spans_of(cuts: Cuts, dim: int, size: int) -> tuple[Span, ...]:
    """What is kept of a dimension of `size`."""
    return next((cut.spans for cut in cuts if cut.dim == dim), ((0, size),))


def even(size: int, rank: int, ranks: int, what: str) -> Span:
    """The rank's equal share. Raises ModelUnsupportedError naming `what` when there is none."""
    if size % ranks:
        raise ModelUnsupportedError(
            f"tp {ranks} does not divide the {size} {what} of this model: use a --tp that divides it."
        )
    share = size // ranks
    return rank * share, (rank + 1) * share


def ceiling(size: int, rank: int, ranks: int) -> Span:
    """The rank's share of a dimension whose last shares may be smaller (vocabularies)."""
    share = -(-size // ranks)
    return min(size, rank * share), min(size, (rank + 1) * share)


def kv_heads(kv: int, rank: int, ranks: int) -> Span:
    """The KV heads of a rank: its share, or one that several ranks hold alike when there are more ranks than heads.

    Where the ranks do not divide the heads, the first ones have one more: sums over ranks do not mind.
    """
    if kv >= ranks:
        share, more = divmod(kv, ranks)
        start = rank * share + min(rank, more)
        return start, start + share + (rank < more)
    if ranks % kv:
        raise ModelUnsupportedError(
            f"tp {ranks} does not fit the {kv} KV heads of this model: use --tp {kv}, less, or a multiple of it."
        )
    head = rank * kv // ranks
    return head, head + 1


def query_heads(heads: int, kv: int, rank: int, ranks: int) -> Span:
    """The query heads of a rank: those that read its KV heads, or its share of those where the KV head is shared.

    Raises ModelUnsupportedError when there are more ranks than KV heads and they do not divide the heads.
    """
    if kv < ranks:
        return even(heads, rank, ranks, "attention heads")
    return scaled(kv_heads(kv, rank, ranks), heads // kv)


def scaled(span: Span, factor: int, offset: int = 0) -> Span:
    """A span of units as a span of elements, `factor` in each unit, from `offset` on."""
    return offset + span[0] * factor, offset + span[1] * factor
