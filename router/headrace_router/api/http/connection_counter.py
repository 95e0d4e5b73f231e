"""Counts open connections: in all, per client address, and per tenant once its key is known."""

from collections import Counter
from collections.abc import Callable

from headrace_router.api.client_address import client_of
from headrace_router.api.http.keyless_connections import KeylessConnections
from headrace_router.core.limits import TENANT_SHARE


class Place:
    """Of one open connection, among those that are counted."""

    def __init__(self, counter: "ConnectionCounter", client: str, abort: Callable[[], None]) -> None:
        self._counter = counter
        self.client = client
        self.abort = abort

    def keep(self) -> None:
        """The client has shown a key: the connection is not aborted for another one."""
        self._counter.keyless.discard(self.client, self)

    def release(self) -> None:
        """The connection has ended."""
        self._counter.remove(self)


class ConnectionCounter:
    """Bounds the connections of one listening socket.

    A connection beyond the bound of its client takes the place of this client's oldest one without a key; one beyond
    the bound of all, that of the client with most of these. So connections that are idle, or whose request does not
    end, keep no other client out.
    """

    def __init__(self, connections: int, per_address: int) -> None:
        """The most that are open at a time: in all, and from one client address."""
        self._connections = connections
        self._per_address = per_address
        self._places: set[Place] = set()
        self._per_client: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()
        self.keyless: KeylessConnections[Place] = KeylessConnections()

    def add(self, address: str, abort: Callable[[], None]) -> Place | None:
        """Counts a connection, which has shown no key; None = it exceeds a limit and is not counted.

        abort: called at most once, when another one gets its place.
        """
        client = client_of(address)
        if self._per_client[client] >= self._per_address:
            replaced = self.keyless.oldest_of(client)
        elif len(self._places) >= self._connections:
            replaced = self.keyless.oldest_of_most()
        else:
            return self._enter(client, abort)
        if replaced is None:
            return None
        self.remove(replaced)
        replaced.abort()
        return self._enter(client, abort)

    def remove(self, place: Place) -> None:
        """Its connection has ended, or is aborted."""
        if place not in self._places:
            return
        self._places.remove(place)
        self.keyless.discard(place.client, place)
        self._per_client[place.client] -= 1
        if not self._per_client[place.client]:
            del self._per_client[place.client]

    def _enter(self, client: str, abort: Callable[[], None]) -> Place:
        place = Place(self, client, abort)
        self._places.add(place)
        self._per_client[client] += 1
        self.keyless.add(client, place)
        return place

    def assign(self, tenant: str, previous: str | None) -> bool:
        """A connection has sent a tenant's key, and `previous`'s before; False = the tenant has more than its share.

        Such a connection is closed once its request is answered, so that others can connect.
        """
        if tenant != previous:
            self.unassign(previous)
            self._per_tenant[tenant] += 1
        return self._per_tenant[tenant] <= max(1, int(self._connections * TENANT_SHARE))

    def unassign(self, tenant: str | None) -> None:
        """A connection of the tenant has ended."""
        if tenant is not None:
            self._per_tenant[tenant] -= 1
            if not self._per_tenant[tenant]:
                del self._per_tenant[tenant]
