"""Cache events for routers: a mirror of the cached hashes, sequence numbers, and one bounded queue per watcher."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.kv.blocks import CacheChange

SNAPSHOT_CHUNK = 4096
"""Hashes per snapshot frame: about 72 KiB on the wire."""
QUEUE_FRAMES = 1024
"""Increments that a watcher may be behind before its stream ends and it needs a new snapshot."""


class CacheEventHub:
    """For the server's event loop. `publish` is called once per step with that step's changes."""

    def __init__(self, boot_id: bytes) -> None:
        self._boot_id = boot_id
        self._sequence = 0
        self._mirror: dict[int, dict[bytes, None]] = {}  # group -> hashes in the order they were stored
        self._watchers: set[asyncio.Queue[pb.CacheFrame | None]] = set()

    def publish(self, changes: Iterable[CacheChange]) -> None:
        """Applies changes to the mirror and sends one increment to every watcher."""
        events: dict[int, pb.CacheEvent] = {}
        for group, stored in self._net(changes).items():
            event = events.setdefault(group, pb.CacheEvent(group=group))
            for digest, is_stored in stored.items():
                (event.stored if is_stored else event.removed).append(digest)
        if not events:
            return
        self._sequence += 1
        frame = pb.CacheFrame(boot_id=self._boot_id, sequence=self._sequence, events=list(events.values()))
        for watcher in list(self._watchers):
            self._send(watcher, frame)

    async def watch(self) -> AsyncIterator[pb.CacheFrame]:
        """A snapshot in chunks, then increments; ends when the watcher is too far behind."""
        queue: asyncio.Queue[pb.CacheFrame | None] = asyncio.Queue(QUEUE_FRAMES)
        snapshot = self._snapshot()  # no await between this and the registration: no change is missed or repeated
        self._watchers.add(queue)
        try:
            for frame in snapshot:
                yield frame
            while (increment := await queue.get()) is not None:
                yield increment
        finally:
            self._watchers.discard(queue)

    def _net(self, changes: Iterable[CacheChange]) -> dict[int, dict[bytes, bool]]:
        """The last state of every hash that changed; updates the mirror."""
        net: dict[int, dict[bytes, bool]] = {}
        for change in changes:
            held = self._mirror.setdefault(change.group, {})
            if change.stored:
                held[change.digest] = None
            else:
                held.pop(change.digest, None)
            net.setdefault(change.group, {})[change.digest] = change.stored
        return net

    def _snapshot(self) -> list[pb.CacheFrame]:
        frames = []
        for group, held in self._mirror.items():
            digests = list(held)
            for start in range(0, len(digests), SNAPSHOT_CHUNK):
                event = pb.CacheEvent(group=group, stored=digests[start : start + SNAPSHOT_CHUNK])
                frames.append(self._snapshot_frame([event]))
        frames.append(self._snapshot_frame([]))
        frames[0].events.insert(0, pb.CacheEvent(cleared=True))
        frames[-1].snapshot_end = True
        return frames

    def _snapshot_frame(self, events: list[pb.CacheEvent]) -> pb.CacheFrame:
        return pb.CacheFrame(boot_id=self._boot_id, sequence=self._sequence, snapshot=True, events=events)

    def _send(self, watcher: "asyncio.Queue[pb.CacheFrame | None]", frame: pb.CacheFrame) -> None:
        try:
            watcher.put_nowait(frame)
        except asyncio.QueueFull:
            self._watchers.discard(watcher)
            while not watcher.empty():
                watcher.get_nowait()
            watcher.put_nowait(None)
