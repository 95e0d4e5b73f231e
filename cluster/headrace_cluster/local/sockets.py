"""Sockets on which the processes of a server listen, including Ray's, which no setting of ours lists."""

import contextlib
import ipaddress
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A TCP socket in state LISTEN."""

    port: int
    address: str
    pid: int
    process: str

    @property
    def beyond_loopback(self) -> bool:
        return not ipaddress.ip_address(self.address).is_loopback

    def document(self) -> dict[str, Any]:
        """As `headrace status --json` prints it."""
        return {"port": self.port, "address": self.address, "pid": self.pid, "process": self.process}


def listeners(root: int) -> list[Listener]:
    """Of a process and its descendants, by port; those that end meanwhile are left out. IPv4 in IPv6 counts as IPv4."""
    found = set()
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = _name(process)
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        address = connection.laddr.ip.removeprefix("::ffff:")
                        found.add(Listener(connection.laddr.port, address, process.pid, name))
    return sorted(found)


def exposed_note(found: list[Listener], routers: set[int], own: set[int]) -> str:
    """A sentence about Ray's sockets beyond loopback; empty when there is none.

    routers: their pids; own: our own ports, whose interface the spec sets.
    """
    open_ = [listener for listener in found if listener.beyond_loopback and listener.pid not in routers]
    ports = sorted({listener.port for listener in open_} - own)
    if not ports:
        return ""
    return (
        f"Ray listens beyond this machine on ports {', '.join(map(str, ports))}; its token guards them, but not those "
        "of its metrics: close them to others by a firewall"
    )


def _name(process: psutil.Process) -> str:
    """The title, or the program and its module or script: no paths, no arguments."""
    command = process.cmdline()
    if not command:
        return str(process.name())
    words = [word.rpartition("/")[2] for word in command if word and not word.startswith("-")]
    return " ".join(words[:3] if words[0].startswith("python") else words[:1])
