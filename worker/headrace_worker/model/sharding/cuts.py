"""Which part of a whole tensor a rank holds: pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.core.transfer.shards import Span


@dataclass(frozen=True, slots=True)
class Cut:
    """The spans of one dimension that are kept, concatenated."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.spans)


Cuts = tuple[Cut, ...]  # at most one per dimension; other dimensions are whole


def cut_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of the part of a whole tensor."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.dim] = cut.size
    return tuple(sizes)


def spans_of(cuts: Cuts, dim: int, size: int) -> tuple[Span, ...]:
    """The kept spans of a dimension of `size`."""
    return next((cut.spans for cut in cuts if cut.dim == dim), ((0, size),))


def even(size: int, rank: int, ranks: int, what: str) -> Span:
    """The rank's equal share. Raises ModelUnsupportedError naming `what` when there is none."""
    if size % ranks:
        raise ModelUnsupportedError(
            f"tp {ranks} does not divide the {size} {what} of this model: use a --tp that divides it."
        )
    share = size // ranks
    return rank * share, (rank + 1) * share


def in_units(size: int, rank: int, ranks: int, unit: int, what: str) -> Span:
    """The rank's share in whole units, of which the first ranks may have one more: sums over ranks allow that. An equal
    share if the unit is one, or there are too few. Raises ModelUnsupportedError as `even` does.
    """
    if unit == 1 or size % unit or size // unit < ranks:
        return even(size, rank, ranks, what)
    share, more = divmod(size // unit, ranks)
    start = rank * share + min(rank, more)
    return start * unit, (start + share + (rank < more)) * unit


def ceiling(size: int, rank: int, ranks: int) -> Span:
    """The rank's share of a dimension whose last shares may be smaller (vocabularies)."""
    share = -(-size // ranks)
    return min(size, rank * share), min(size, (rank + 1) * share)


def kv_heads(heads: int, kv: int, rank: int, ranks: int) -> Span:
    """The KV heads of a rank: its share, or one that several ranks hold alike when there are more ranks than heads.

    If the ranks do not divide the KV heads, the first ones have one more: sums over ranks allow that. Raises
    ModelUnsupportedError with the numbers of ranks that `heads` attention heads and `kv` KV heads allow.
    """
    if not _fits(heads, kv, ranks):
        *fitting, last = [count for count in range(1, heads + 1) if _fits(heads, kv, count)]
        allowed = f"{', '.join(map(str, fitting))} or {last}" if fitting else str(last)
        raise ModelUnsupportedError(
            f"tp {ranks} does not fit the {heads} attention heads and {kv} KV heads of this model: use --tp {allowed}."
        )
    if kv >= ranks:
        share, more = divmod(kv, ranks)
        start = rank * share + min(rank, more)
        return start, start + share + (rank < more)
    head = rank * kv // ranks
    return head, head + 1


def query_heads(heads: int, kv: int, rank: int, ranks: int) -> Span:
    """The query heads of a rank: those that read its KV heads, or its share of those if the KV head is shared.

    Raises ModelUnsupportedError as `kv_heads` does.
    """
    span = kv_heads(heads, kv, rank, ranks)
    if kv < ranks:
        return even(heads, rank, ranks, "attention heads")
    return scaled(span, heads // kv)


def _fits(heads: int, kv: int, ranks: int) -> bool:
    return kv >= ranks or (ranks % kv == 0 and heads % ranks == 0)


def scaled(span: Span, factor: int, offset: int = 0) -> Span:
    """A span of units as a span of elements, `factor` in each unit, from `offset` on."""
    return offset + span[0] * factor, offset + span[1] * factor
