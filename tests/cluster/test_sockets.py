"""Listening sockets of a process and its descendants, and which of them other machines can reach."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace_cluster.local.sockets import Listener, exposed_note, listeners

PROGRAM = """
import socket, sys
open_ = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
mapped = socket.socket(socket.AF_INET6)
mapped.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
mapped.bind(("::ffff:127.0.0.1", 0))
mapped.listen()
print(*[each.getsockname()[1] for each in (*open_, mapped)], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[int, list[int]]]:
    """Its pid, and its ports: on loopback, on every interface, on loopback as IPv4 in IPv6."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.pid, [int(port) for port in process.stdout.readline().split()]
    process.communicate("", timeout=10)


def test_sockets_of_a_child(child: tuple[int, list[int]]) -> None:
    pid, ports = child
    found = {listener.port: listener for listener in listeners(os.getpid()) if listener.pid == pid}
    assert sorted(found) == sorted(ports)
    assert [found[port].beyond_loopback for port in ports] == [False, True, False]
    assert found[ports[2]].address == "127.0.0.1"
    assert exposed_note(list(found.values()), {pid}, set()) == "", "a router may listen beyond loopback"
    assert f"on ports {ports[1]};" in exposed_note(list(found.values()), set(), set())
    assert exposed_note(list(found.values()), set(), {ports[1]}) == "", "the spec sets the interface of our ports"


def test_an_ended_process_has_no_sockets() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert listeners(process.pid) == []


def test_the_note_lists_each_port_once() -> None:
    found = [Listener(7, address, 1, "raylet") for address in ("::", "10.0.0.1")] + [Listener(9, "::1", 1, "gcs")]
    assert "on ports 7;" in exposed_note(found, set(), set())
