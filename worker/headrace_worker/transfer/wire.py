"""The connections of one rank to the ranks of another replica: a gloo group of its own, ended without harm to others.

Bytes go through host memory on every device: an NCCL receive that waits for a dead peer holds its GPU's stream, gloo's
holds a thread.
"""

import torch
from torch import Tensor

from headrace_worker.parallel.errors import MeetingError, RankLostError
from headrace_worker.parallel.group import Group, Sending, host_group
from headrace_worker.parallel.meeting import MeetingHost, Noticeboard, meet
from headrace_worker.parallel.watch import Watch
from headrace_worker.transfer.orders import OpenPair

_DATA, _NEVER = 1, 2  # tags
JOIN_SECONDS = 10.0


class Wire:
    """Sends and receives in order. `close` may be called from any thread, at any time."""

    def __init__(self, order: OpenPair, rank: int, host: str, opened: MeetingHost | None) -> None:
        """Meets the others; `rank` counts within this replica. Raises MeetingError, RankLostError."""
        me = order.first + rank
        self._watch = Watch(me)
        self._watch.start()
        self._peers = order.peers
        try:
            self._board: Noticeboard = meet(order.meeting, me, order.size, self._watch, opened, JOIN_SECONDS)
            self._group: Group = self._watch.guard(
                lambda: host_group(self._board.store, "pair", host, me, order.size, self._watch)
            )
            self._watch.be_strict()
        except (MeetingError, RankLostError):
            self._watch.close()
            raise
        self._watch.call(lambda failure: self._break())

    def send(self, piece: Tensor, to: int) -> Sending:
        """Begins to send to a rank of the other replica; the piece must not change until `finish`."""
        return self._group.send(piece.reshape(-1).view(torch.uint8), self._peers + to, _DATA)

    def finish(self, sending: Sending) -> None:
        self._group.finish(sending)

    def receive(self, piece: Tensor, source: int) -> None:
        """Fills a contiguous piece with the next one from a rank of the other replica."""
        self._group.receive(piece.view(-1).view(torch.uint8), self._peers + source, _DATA)

    def close(self) -> None:
        """Ends the connections and every wait on them. Idempotent."""
        self._watch.close()
        self._break()

    def _break(self) -> None:
        self._group.interrupt(self._peers, _NEVER)
