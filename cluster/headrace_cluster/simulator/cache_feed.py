"""The cache events of a replica, for the routers that follow it: as production's CacheEventHub sends them."""

from collections.abc import Callable, Iterable

from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto.replica_pb2 import CacheEvent, CacheFrame
from headrace_worker.core.kv.blocks import CacheChange

INTERVAL_SECONDS = 0.1  # between two increments
Watcher = Callable[[CacheFrame], None]


class CacheFeed:
    """A snapshot, then net changes at an interval, to each watcher."""

    def __init__(self, time: VirtualTime, boot_id: bytes, network: float) -> None:
        """network: seconds until a frame arrives."""
        self._time = time
        self._boot_id = boot_id
        self._network = network
        self._sequence = 0
        self._held: dict[bytes, None] = {}
        self._net: dict[bytes, bool] = {}
        self._watchers: list[Watcher] = []
        self._sending = False

    def add(self, changes: Iterable[CacheChange]) -> None:
        """Those of a step."""
        for _, digest, stored, _ in changes:  # simulated replicas have no host memory for evicted blocks
            if stored:
                self._held[digest] = None
            else:
                self._held.pop(digest, None)
            if self._watchers:
                self._net[digest] = stored
        if self._net and not self._sending:
            self._sending = True
            self._time.after(INTERVAL_SECONDS, self._send)

    def watch(self, watcher: Watcher) -> None:
        """Changes that no increment has had yet are in the snapshot and in the next increment, with equal states."""
        event = CacheEvent(group=0, stored=list(self._held), cleared=True)
        watcher(
            CacheFrame(boot_id=self._boot_id, sequence=self._sequence, snapshot=True, snapshot_end=True, events=[event])
        )
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _send(self) -> None:
        self._sending = False
        net, self._net = self._net, {}
        self._sequence += 1
        event = CacheEvent(
            group=0,
            stored=[digest for digest, stored in net.items() if stored],
            removed=[digest for digest, stored in net.items() if not stored],
        )
        frame = CacheFrame(boot_id=self._boot_id, sequence=self._sequence, events=[event])
        for watcher in self._watchers:
            self._time.after(self._network, lambda watcher=watcher: watcher(frame))  # type: ignore[misc]
