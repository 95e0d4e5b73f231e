"""Counts open connections, in all and per client address."""

import ipaddress
from collections import Counter

from headrace_router.core.limits import Limits

IPV6_NETWORK = 64  # bits: one client can use any address of its /64


class ConnectionCounter:
    """Bounds the connections of one listening socket."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._total = 0
        self._per_client: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Counts a connection; False = it exceeds a limit and is not counted."""
        client = _client(address)
        if self._total >= self._limits.connections or self._per_client[client] >= self._limits.connections_per_address:
            return False
        self._total += 1
        self._per_client[client] += 1
        return True

    def remove(self, address: str) -> None:
        """A connection that was counted has ended."""
        client = _client(address)
        self._total -= 1
        self._per_client[client] -= 1
        if not self._per_client[client]:
            del self._per_client[client]


def _client(address: str) -> str:
    """The address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, IPV6_NETWORK), strict=False))
