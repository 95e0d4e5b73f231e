"""Counts open connections: in all, per client address, and per tenant once its key is known."""

import ipaddress
from collections import Counter

from headrace_router.core.limits import TENANT_SHARE

IPV6_NETWORK = 64  # bits: one client can use any address of its /64


class ConnectionCounter:
    """Bounds the connections of one listening socket."""

    def __init__(self, connections: int, per_address: int) -> None:
        """The most that are open at a time: in all, and from one client address."""
        self._connections = connections
        self._per_address = per_address
        self._total = 0
        self._per_client: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Counts a connection; False = it exceeds a limit and is not counted."""
        client = client_of(address)
        if self._total >= self._connections or self._per_client[client] >= self._per_address:
            return False
        self._total += 1
        self._per_client[client] += 1
        return True

    def remove(self, address: str) -> None:
        """A connection that was counted has ended."""
        client = client_of(address)
        self._total -= 1
        self._per_client[client] -= 1
        if not self._per_client[client]:
            del self._per_client[client]

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


def client_of(address: str) -> str:
    """What counts as one client: the address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, IPV6_NETWORK), strict=False))
