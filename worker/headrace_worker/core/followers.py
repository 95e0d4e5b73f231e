"""Waiting requests whose next block is being computed for another one: admitted now, they would compute it again.

Of a burst of requests with one prompt, the first one computes it, and the others start from its blocks.
"""

from bisect import bisect_left
from collections.abc import Sequence

from headrace_worker.core.kv.manager import BlockTable, PrefixHit
from headrace_worker.core.kv.states import StateSlots
from headrace_worker.core.queue import WaitingQueue
from headrace_worker.core.request import Request


class Followers:
    """Sets requests aside in the queue, and returns them when the block is there, or will not be."""

    def __init__(
        self, running: Sequence[Request], waiting: WaitingQueue, block_size: int, states: StateSlots | None = None
    ) -> None:
        """running: kept current by the caller. states: of a model with recurrent layers."""
        self._running = running
        self._waiting = waiting
        self._block_size = block_size
        self._states = states
        self._entries: list[tuple[Request, Request, BlockTable, int]] = []  # follower, leader, its table, last block

    def set_aside(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the waiting request, which would start from `hit`, waits for a running one instead."""
        block, usable = hit.tokens // self._block_size, (len(request.tokens) - 1) // self._block_size
        if block >= usable:
            return False  # what is missing cannot be shared
        mine = request.chain.digests[0]
        for leader in self._running:
            table, digests = leader.table, leader.chain.digests[0]
            if table is None or block >= len(digests) or digests[block] != mine[block]:
                continue
            last = -1
            if self._states is not None:  # it starts where there is a snapshot
                most = 1 + _last_shared(mine, digests, block, min(usable, len(digests)))
                last = self._states.share(table.state, block, most) - 1
            elif table.published <= block:
                last = _last_shared(mine, digests, block, min(usable, len(digests)))
            if last >= block:
                self._waiting.set_aside(request)
                self._entries.append((request, leader, table, last))
                return True
        return False

    def restore(self) -> None:
        """Queues those again that need not wait any longer."""
        kept = []
        for entry in self._entries:
            request, leader, table, block = entry
            if leader.table is table and table.published <= block:
                kept.append(entry)
            else:
                self._waiting.restore(request)
        self._entries = kept


def _last_shared(mine: Sequence[bytes], others: Sequence[bytes], shared: int, end: int) -> int:
    """The last block before `end` that both have; `shared` is one. A digest depends on all blocks before its own."""
    later = range(shared + 1, end)
    return shared + bisect_left(later, True, key=lambda block: mine[block] != others[block])
