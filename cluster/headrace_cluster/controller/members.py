"""The versioned member list that routers watch, and the routers that watch it."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable

from headrace_proto import control_pb2 as pb


class Membership:
    """Who serves, now and after every change. Of one event loop."""

    def __init__(self) -> None:
        self._epoch = secrets.token_bytes(16)
        self._list = pb.MemberList(epoch=self._epoch)  # version 0: nothing is known yet, and nobody is told so
        self._changed = asyncio.Condition()
        self.routers: dict[bytes, pb.RouterInfo] = {}  # by registration

    async def publish(self, members: Iterable[pb.Member], models: Iterable[pb.ModelEntry]) -> None:
        """Sets the list; a new version goes out only if something changed."""
        fresh = pb.MemberList(epoch=self._epoch, version=self._list.version, members=members, models=models)
        if fresh == self._list and self._list.version:
            return
        fresh.version += 1
        async with self._changed:
            self._list = fresh
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[pb.MemberList]:
        """The list as soon as there is one, then each later version; those that a slow reader missed are skipped."""
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._list.version != seen)  # noqa: B023
                current = self._list
            seen = current.version
            yield current
