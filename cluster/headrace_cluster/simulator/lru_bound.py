"""The hit rate of one LRU cache as large as those of all replicas together: what to compare a cluster's with.

While nothing is dropped from it, it is the most that a cluster can find. Else it is no limit: LRU is not the best order
of removal, and a cluster with small caches whose requests are kept apart by prefix can find more.
"""

from collections import OrderedDict
from collections.abc import Iterator

from headrace_cluster.simulator.trace import Trace, TraceRequest


def hit_rate_bound(trace: Trace, blocks: int, block: int = 0, models: int = 1) -> float:
    """Share of prompt tokens whose blocks were used before, by a cache of that many blocks that drops the oldest.

    blocks: of `block` tokens each; 0 = the trace's. models: that take turns and share nothing. Requests follow one
    another; only leading whole blocks count, and never all tokens of a prompt: the last one is always computed.
    """
    block = block or trace.block
    chains = _Chains(trace.block, block)
    cache: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for number, request in enumerate(trace.requests):
        total += request.input_tokens
        whole = list(chains.blocks(request, number % models))
        for place in whole[: (request.input_tokens - 1) // block]:
            if place not in cache:
                break
            found += block
        for place in reversed(whole):
            cache[place] = None
            cache.move_to_end(place)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found / total if total else 0.0


class _Chains:
    """Numbers for the simulated blocks: equal numbers are equal tokens with equal tokens before, as hashes are."""

    def __init__(self, traced: int, block: int) -> None:
        """Tokens of a block of the trace, and of a replica."""
        self._traced = traced
        self._block = block
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(self, request: TraceRequest, model: int) -> Iterator[int]:
        """Of the prompt's whole blocks."""
        before = -1 - model
        for end in range(self._block, request.input_tokens + 1, self._block):
            first = (end - self._block) // self._traced
            content = request.block_ids[first : (end - 1) // self._traced + 1]
            before = self._numbers.setdefault((before, content), len(self._numbers))
            yield before
