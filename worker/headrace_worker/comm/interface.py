"""The network interface of traffic between ranks, which partly has no password: the one of one address, and no other.

gloo gets the address itself (`group.host_group`). NCCL has no such argument and by default chooses among all
interfaces.
"""

import ipaddress
import os
import socket

import psutil

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.core.config import ReplicaConfig

VARIABLE = "NCCL_SOCKET_IFNAME"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def rank_host(config: ReplicaConfig) -> str:
    """The address of this rank for other ranks, of its own replica and of others. Raises RendezvousError.

    With `rank_interface` on that interface of this machine, such as a second, faster network; else that of the server.
    """
    return address_on(config.rank_interface) if config.rank_interface else config.host


def address_on(wanted: str) -> str:
    """This machine's first address on an interface, by its name, or in a network (CIDR). Raises RendezvousError."""
    found = {name: _addresses(name) for name in psutil.net_if_addrs()}
    if "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError as error:
            raise RendezvousError(f"--rank-interface {wanted}: write a network as 10.1.0.0/16") from error
        inside = [address for addresses in found.values() for address in addresses if address in network]
        matching = sorted(inside, key=lambda address: address.is_loopback)  # a wide network contains it, too
    else:
        matching = found.get(wanted, [])
    if not matching:
        have = ", ".join(f"{name} ({addresses[0]})" for name, addresses in found.items() if addresses)
        raise RendezvousError(f"--rank-interface {wanted}: this machine has no such address; it has {have}")
    return str(matching[0])


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """IPv4 first. Without link-local ones, which need the interface beside the address."""
    texts = [entry.address for entry in psutil.net_if_addrs().get(interface, []) if entry.family in _FAMILIES]
    found = [ipaddress.ip_address(text) for text in texts if "%" not in text]
    return sorted((address for address in found if not address.is_link_local), key=lambda address: address.version)


def interface_of(host: str) -> str:
    """The name of the interface with the address `host` (a name is resolved). Raises RendezvousError."""
    try:
        wanted = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise RendezvousError(f"the ranks cannot communicate on {host}: it is no address") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == wanted for address in addresses):
            return str(name)
    raise RendezvousError(f"the ranks cannot communicate on {host}: no interface of this machine has this address")


def restrict_nccl(host: str) -> None:
    """Call it before the first NCCL group is made: NCCL reads it then. A value that the operator set stays."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = f"={interface_of(host)}"  # '=': this name, not all that begin with it
