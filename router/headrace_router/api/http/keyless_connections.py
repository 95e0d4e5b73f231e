"""Open connections that have shown no key, and which of them is aborted when another one needs its place."""

from collections import OrderedDict, defaultdict
from typing import Generic, TypeVar

C = TypeVar("C")


class KeylessConnections(Generic[C]):
    """By client, in the order in which they were added. Every method takes constant time."""

    def __init__(self) -> None:
        self._connections: dict[str, OrderedDict[C, None]] = {}  # by client; none is empty
        self._clients: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)  # by number of connections
        self._most = 0  # connections of one client

    def add(self, client: str, connection: C) -> None:
        """A connection of a client was opened."""
        opened = self._connections.setdefault(client, OrderedDict())
        opened[connection] = None
        self._count(client, len(opened) - 1, len(opened))

    def discard(self, client: str, connection: C) -> None:
        """It was closed, or has shown a key; it may have been discarded before."""
        opened = self._connections.get(client)
        if opened is None or connection not in opened:
            return
        del opened[connection]
        if not opened:
            del self._connections[client]
        self._count(client, len(opened) + 1, len(opened))

    def oldest_of(self, client: str) -> C | None:
        """The client's oldest one, if it has any."""
        opened = self._connections.get(client)
        return None if opened is None else next(iter(opened))

    def oldest_of_most(self) -> C | None:
        """The oldest one of the client that has most of them."""
        return self.oldest_of(next(iter(self._clients[self._most]))) if self._most else None

    def _count(self, client: str, before: int, after: int) -> None:
        if before:
            del self._clients[before][client]
        if after:
            self._clients[after][client] = None
        self._most = max(after, self._most if self._clients[self._most] else 0)
