"""The network interface of NCCL's connections, which have no password: that of the rank's address and no other.

gloo gets the address itself (`group.host_group`). NCCL has no such argument and by default chooses among all
interfaces.
"""

import os
import socket

import psutil

from headrace_worker.comm.errors import RendezvousError

VARIABLE = "NCCL_SOCKET_IFNAME"


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
