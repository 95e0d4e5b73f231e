"""The connections of one rank to the ranks of another replica: a separate gloo group, closed without affecting others.

Bytes go through host memory on every device: an NCCL receive from a dead peer blocks its GPU's stream, one of gloo
blocks a thread.
"""

import torch
from torch import Tensor

from headrace_worker.comm.errors import RankLostError, RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import Group, Receiving, Sending, host_group
from headrace_worker.comm.rendezvous import RendezvousHost, RendezvousStore, join_rendezvous
from headrace_worker.core.transfer.orders import OpenPair

_DATA, _UNUSED = 1, 2  # tags
JOIN_SECONDS = 10.0


class PairGroup:
    """Sends and receives in order. `close` may be called from any thread, at any time."""

    def __init__(self, order: OpenPair, rank: int, host: str, opened: RendezvousHost | None) -> None:
        """Connects to the others; `rank` counts within this replica. Raises RendezvousError, RankLostError."""
        me = order.first + rank
        self._detector = FailureDetector(me)
        self._detector.start()
        self._peers = order.peers
        try:
            self._store: RendezvousStore = join_rendezvous(
                order.rendezvous, me, order.size, self._detector, opened, JOIN_SECONDS
            )
            self._group: Group = self._detector.guard(
                lambda: host_group(self._store, "pair", host, me, order.size, self._detector)
            )
            self._detector.enable_hang_detection()
        except (RendezvousError, RankLostError):
            self._detector.close()
            raise
        self._detector.on_loss(lambda failure: self._interrupt())

    def send(self, piece: Tensor, to: int) -> Sending:
        """Begins to send to a rank of the other replica; the piece must not change until `finish`."""
        return self._group.send(piece.reshape(-1).view(torch.uint8), self._peers + to, _DATA)

    def finish(self, sending: Sending) -> None:
        self._group.finish(sending)

    def expect(self, piece: Tensor, source: int) -> Receiving:
        """Begins to receive the next piece from a rank of the other replica into a contiguous tensor."""
        return self._group.expect(piece.view(-1).view(torch.uint8), self._peers + source, _DATA)

    def take(self, receiving: Receiving) -> None:
        """Waits until the piece is received."""
        self._group.take(receiving)

    def close(self) -> None:
        """Ends the connections and every wait on them. Idempotent."""
        self._detector.close()
        self._interrupt()

    def _interrupt(self) -> None:
        self._group.interrupt(self._peers, _UNUSED)
