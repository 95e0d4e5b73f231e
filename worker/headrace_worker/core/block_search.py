"""Blocks for the waiting request that comes next."""

from headrace_worker.core.kv.manager import KVManager, PrefixHit
from headrace_worker.core.request import Request


class BlockSearch:
    """Remembers the request that found too few: others may be preempted for it, and no budget is kept for it."""

    def __init__(self, kv: KVManager, watermark: float) -> None:
        """watermark: the share of the pool that stays free while other requests run."""
        self._kv = kv
        self._watermark = watermark
        self._failed: Request | None = None

    def failed(self, request: Request) -> bool:
        """Whether the last search was for this request, and found too few blocks."""
        return request is self._failed

    def find(self, request: Request, budget: int, *, idle: bool) -> tuple[PrefixHit, int] | None:
        """The cached prefix and the end of the first chunk; None if there are too few blocks for it.

        budget: tokens of the step. idle: no request runs.
        """
        kv, tokens = self._kv, request.tokens
        kv.extend_chain(request.chain, tokens, len(tokens) // kv.block_size)
        usable = min(len(tokens) - 1, len(request.prompt_logprobs)) if request.scores else len(tokens) - 1
        hit = kv.lookup(request.chain, usable)
        chunk_end = hit.tokens + min(len(tokens) - hit.tokens, budget)
        spare = 0 if idle else int(kv.pool.total * self._watermark)
        # Of a prompt with recurrent state few borders are cached: it does not start again before all of it fits.
        needed = len(tokens) if kv.states is not None and request.preemptions and not idle else chunk_end
        found = kv.cost_of(hit, needed) + spare <= kv.pool.available
        self._failed = None if found else request
        return (hit, chunk_end) if found else None
