"""Bytes of unauthenticated peers at the sockets on which ranks connect and exchange KV blocks."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import Group, host_group
from headrace_worker.comm.handshake_messages import sign_hello
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.transfer.orders import OpenPair
from headrace_worker.kv_transfer.pair_group import PairGroup
from support.tls_hello import tls_hello

HELD = 200  # connections that stay open


def _openings() -> list[bytes]:
    half = sign_hello(os.urandom(32), 1, 1)[1]
    whole = [os.urandom(4096), tls_hello(), b"\xff" * (1 << 20), bytes(64), half]
    held = [b"", half[: len(half) // 2], os.urandom(7), tls_hello()[:20]]
    return whole + held * (HELD // len(held))


def _listening() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


class _Peers:
    """Sends to every socket on which this process listens since then, once each, and keeps the connections open."""

    def __init__(self, before: set[int]) -> None:
        self.reached: set[int] = set()
        self._before = before
        self._over = threading.Event()
        self._connections = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            for port in _listening() - self._before - self.reached:
                self.reached.add(port)
                for sent in _openings():
                    self._send(port, sent)

    def _send(self, port: int, sent: bytes) -> None:
        with contextlib.suppress(OSError):
            connection = self._connections.enter_context(socket.create_connection(("127.0.0.1", port), 1))
            connection.settimeout(0.1)
            connection.sendall(sent)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)

    def close(self) -> None:
        self.stop()
        self._connections.close()


@pytest.fixture
def peers() -> Iterator[_Peers]:
    made = _Peers(_listening())
    yield made
    made.close()


def _wait_until(reached: Callable[[], object], work: "Future[Any]") -> None:
    end = time.monotonic() + 10
    while not reached():
        assert not work.done() and time.monotonic() < end
        time.sleep(0.005)


def test_unauthenticated_peers_disturb_no_pair_of_ranks(peers: _Peers) -> None:
    """They reach the rendezvous before the second rank does, and stay until blocks are transferred."""
    opened = RendezvousHost("127.0.0.1")
    target_order = OpenPair(1, opened.rendezvous, 2, 0, 1, (), sends=False)
    source_order = OpenPair(1, opened.rendezvous, 2, 1, 0, (), sends=True)
    with ThreadPoolExecutor(2) as threads:
        connecting = threads.submit(PairGroup, target_order, 0, "127.0.0.1", opened)
        _wait_until(lambda: opened.rendezvous.port in peers.reached, connecting)
        source = threads.submit(PairGroup, source_order, 0, "127.0.0.1", None).result(20)
        target = connecting.result(20)
        try:
            for _ in range(20):
                piece = torch.randint(0, 255, (1 << 16,), dtype=torch.uint8)
                received = torch.zeros_like(piece)
                expected = target.expect(received, 0)
                sending = source.send(piece, 0)
                target.take(expected)
                source.finish(sending)
                assert torch.equal(received, piece)
        finally:
            source.close()
            target.close()


def test_unauthenticated_peers_disturb_no_collective(peers: _Peers) -> None:
    """They reach gloo's socket of the first rank while it waits for the second one."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor(2) as threads:

        def join(rank: int) -> "Future[Group]":
            return threads.submit(host_group, store, "host", "127.0.0.1", rank, 2, FailureDetector(rank))

        first = join(0)
        _wait_until(lambda: peers.reached, first)
        peers.stop()
        groups = [join(1).result(20), first.result(20)]
        for _ in range(20):
            sums = [threads.submit(group.reduce, torch.ones(1000)) for group in groups]
            assert [each.result(10).sum().item() for each in sums] == [2000.0, 2000.0]
