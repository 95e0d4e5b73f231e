"""A router's link to one replica: the stream of production's contract, without bytes."""

from collections import deque
from collections.abc import Callable
from typing import Any

from headrace_cluster.simulator.stretch import ReportedStretch, StretchAttempt
from headrace_cluster.simulator.trace_replica import TraceReplica
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto import replica_pb2 as pb
from headrace_proto.control_pb2 import Member
from headrace_router.core.attempt import Attempt
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_blocks import MissedEventsError, ReplicaBlocks
from headrace_router.core.replica_state import ReplicaState

RECONNECT_SECONDS = 0.1


class _StretchedState(ReplicaState[str]):
    """Gets the tokens of a stretch before they are counted."""

    def __init__(self, member: Member, deliver: Callable[[], None], **options: Any) -> None:
        """deliver: gives the attempts the tokens that have arrived."""
        super().__init__(member, **options)
        self._deliver = deliver

    def newest_started(self) -> Attempt | None:
        self._deliver()
        return super().newest_started()

    def end_attempts(self) -> None:
        self._deliver()
        super().end_attempts()


class TraceLink:
    """Connects as soon as the replica is alive, and again after it was lost."""

    def __init__(
        self,
        time: VirtualTime,
        member: Member,
        replica: Callable[[str], TraceReplica | None],
        network: float,
        new_id: Callable[[], bytes],
        index: PrefixIndex | None,
    ) -> None:
        """index: of the KV blocks; None = the router's policy does not use it."""
        self._time = time
        self._find = replica
        self._network = network
        blocks = ReplicaBlocks(index) if index is not None else None
        self._stretches: deque[ReportedStretch] = deque()
        self.state = _StretchedState(
            member, self._deliver, clock=time.clock, new_id=new_id, on_send=self._send, blocks=blocks
        )
        self._replica: TraceReplica | None = None
        self._closed = False
        self._connect()

    def close(self) -> None:
        self._closed = True
        if self._replica is not None:
            self._replica.disconnect(self)
            self.disconnected()

    def check_stall(self) -> None:
        """A simulated stream that is open brings steps."""

    def send_to_router(self, frame: pb.ReplicaFrame) -> None:
        """Sends a frame of the connected replica to the router."""
        replica = self._replica

        def arrive() -> None:
            if self._replica is replica and replica is not None:
                self._deliver()
                self.state.receive(frame)

        self._time.after(self._network, arrive)

    def add_stretch(self, stretch: ReportedStretch) -> None:
        """Adds a stretch of the connected replica."""
        self._stretches.append(stretch)

    def sync(self) -> None:
        """Applies the frames of stretches that have arrived by now, without their tokens."""
        if not self._stretches:
            return
        if self._replica is not None:
            self._replica.advance()
        for stretch in self._stretches:
            while stretch.applied < len(stretch.steps):
                step, _ = stretch.steps[stretch.applied]
                if step.end + self._network > self._time.now:
                    return
                stretch.applied += 1
                with self._time.as_of(step.end + self._network):
                    self.state.receive(stretch.fill(step))

    def _deliver(self) -> None:
        """Gives the attempts the tokens of these steps."""
        self.sync()
        while self._stretches:
            stretch = self._stretches[0]
            if stretch.applied:
                step, count = stretch.steps[stretch.applied - 1]
                first, stretch.delivered = stretch.delivered, count
                with self._time.as_of(step.end + self._network):
                    for entry in stretch.attempts if count > first else ():
                        self._deliver_tokens(entry, first, count)
            if not stretch.ended or stretch.applied < len(stretch.steps):
                return
            self._stretches.popleft()

    def _deliver_tokens(self, entry: StretchAttempt, first: int, stop: int) -> None:
        attempt = self.state.attempts.get(entry.attempt_id)
        if attempt is not None:
            tokens = entry.tokens(first, stop)
            attempt.receive(
                pb.Delta(
                    attempt_id=entry.attempt_id,
                    first_index=entry.first_index + first,
                    token_ids=tokens,
                    preemptions=entry.preemptions,
                )
            )

    def disconnected(self) -> None:
        if self._replica is not None:
            self._deliver()
            self._stretches.clear()
            self._replica = None
            if self.state.blocks is not None:
                self.state.blocks.lost()
            self.state.disconnect()
            if not self._closed:
                self._time.after(RECONNECT_SECONDS, self._connect)

    def _connect(self) -> None:
        if self._closed or self._replica is not None:
            return
        replica = self._find(self.state.address)
        if replica is None or replica.facts.identity.generation != self.state.identity.generation:
            self._time.after(RECONNECT_SECONDS, self._connect)
            return
        self._replica = replica
        self.state.describe(replica.facts, replica.facts.identity.revision)
        self.state.receive(replica.connect(self))
        if self.state.blocks is not None:
            replica.cache.watch(self.receive_cache)
        self._send()

    def receive_cache(self, frame: pb.CacheFrame) -> None:
        """An event of the replica's cache."""
        blocks, replica = self.state.blocks, self._replica
        if blocks is None or replica is None:
            return
        try:
            blocks.receive(frame)
            self.state.set_changed()
        except MissedEventsError:
            replica.cache.unwatch(self.receive_cache)
            replica.cache.watch(self.receive_cache)

    def _send(self) -> None:
        replica = self._replica
        if replica is None:
            return
        while (frame := self.state.submit_queue.take()) is not None:
            self._time.after(self._network, lambda frame=frame: replica.receive(self, frame))  # type: ignore[misc]
