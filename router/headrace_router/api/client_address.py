"""What counts as one client of a public address, until it has shown a key."""

import ipaddress
from urllib.parse import unquote

IPV6_NETWORK = 64  # bits: one client can use any address of its /64


def client_of(address: str) -> str:
    """The address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, IPV6_NETWORK), strict=False))


def client_of_peer(peer: str) -> str:
    """The same of what gRPC calls a peer: "ipv4:192.0.2.1:50000", "ipv6:%5B2001:db8::1%5D:50000"."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind  # "unix" is one client
    return client_of(address.rpartition(":")[0].strip("[]"))
