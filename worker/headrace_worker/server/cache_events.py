"""Cache events for routers: a mirror of the cached hashes, sequence numbers, and one bounded queue per watcher.

changes of each step ─▶ mirror
                   └──▶ net changes ── every interval ──▶ one increment, the same for all watchers
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Literal

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.kv.blocks import CacheChange

SNAPSHOT_CHUNK = 4096
"""Hashes per snapshot frame: about 72 KiB on the wire."""
QUEUE_FRAMES = 1024
"""Increments that a watcher may be behind before its stream ends and it needs a new snapshot."""
LEAST_SECONDS, MOST_SECONDS = 0.02, 2.0
"""Between two increments: what watchers request is limited to these."""

Where = Literal["stored", "offloaded", "removed"]


class CacheEventHub:
    """For the server's event loop. `publish` is called once per step with that step's changes."""

    def __init__(self, boot_id: bytes) -> None:
        self._boot_id = boot_id
        self._sequence = 0
        self._mirror: dict[int, dict[bytes, Where]] = {}  # group -> hashes in the order they were stored
        self._net: dict[int, dict[bytes, Where]] = {}  # group -> of each hash that changed since the last send
        self._watchers: dict[asyncio.Queue[pb.CacheFrame | None], float] = {}  # the interval that each one requests
        self._sending: asyncio.TimerHandle | None = None

    def publish(self, changes: Iterable[CacheChange]) -> None:
        """Applies changes to the mirror. All watchers get them with the next increment."""
        for group, digest, stored, offloaded in changes:
            held = self._mirror.setdefault(group, {})
            where: Where = "stored" if stored else "offloaded" if offloaded else "removed"
            if where == "removed":
                held.pop(digest, None)
            else:
                held[digest] = where
            if self._watchers:
                self._net.setdefault(group, {})[digest] = where
        if self._net and self._watchers and self._sending is None:
            # The longest interval of all: each of them bounds what one router receives.
            self._sending = asyncio.get_running_loop().call_later(max(self._watchers.values()), self._send_net)

    def _send_net(self) -> None:
        self._sending = None
        net, self._net = self._net, {}
        self._sequence += 1
        frame = pb.CacheFrame(boot_id=self._boot_id, sequence=self._sequence)
        for group, states in net.items():
            frame.events.append(_event(group, states.items()))
        for watcher in list(self._watchers):
            self._send(watcher, frame)

    async def watch(self, seconds: float) -> AsyncIterator[pb.CacheFrame]:
        """A snapshot in chunks, then increments; ends when the watcher is too far behind.

        seconds: between two increments at least, between LEAST_SECONDS and MOST_SECONDS.
        """
        queue: asyncio.Queue[pb.CacheFrame | None] = asyncio.Queue(QUEUE_FRAMES)
        # No await between this and the registration: no change is missed. Changes that no increment has had yet are in
        # the next one, too, with the same states.
        snapshot = self._snapshot()
        self._watchers[queue] = min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
        try:
            for frame in snapshot:
                yield frame
            while (increment := await queue.get()) is not None:
                yield increment
        finally:
            self._watchers.pop(queue, None)

    def _snapshot(self) -> list[pb.CacheFrame]:
        frames = []
        for group, held in self._mirror.items():
            states = list(held.items())
            for start in range(0, len(states), SNAPSHOT_CHUNK):
                frames.append(self._snapshot_frame([_event(group, states[start : start + SNAPSHOT_CHUNK])]))
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
            self._watchers.pop(watcher, None)
            while not watcher.empty():
                watcher.get_nowait()
            watcher.put_nowait(None)


def _event(group: int, states: Iterable[tuple[bytes, Where]]) -> pb.CacheEvent:
    event = pb.CacheEvent(group=group)
    lists = {"stored": event.stored, "offloaded": event.offloaded, "removed": event.removed}
    for digest, where in states:
        lists[where].append(digest)
    return event
