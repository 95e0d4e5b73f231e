"""Every listening socket of a cluster is in docs/sockets.md; bytes of unauthenticated clients do no harm at any."""

import contextlib
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.e2e.headrace_process import Serve
from support.e2e.pinned_stream import PinnedStream
from support.tls_hello import tls_hello

TABLE = Path(__file__).parents[2] / "docs" / "sockets.md"
TOKENS = 64
BODY = {"model": "smollm2", "prompt": [504, 3575, 282], "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


BYTES = {
    "random": random.Random(0).randbytes(4096),
    "HTTP": b"GET / HTTP/1.1\r\nhost: unknown.example\r\n\r\n",
    "TLS": tls_hello(),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 64,
    "garbage": b"\xff" * (1 << 20),
}


HELD = 10  # connections to each socket that stay open, with half of a handshake


def _hold(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        client = socket.create_connection(("127.0.0.1", port), 1)
        client.sendall(BYTES["TLS"][:20])
        return client
    return None


def _owners() -> Counter[str]:
    """How many sockets each process of the table may have."""
    rows = re.findall(r"^\| [^|]+ \| `([^`|]+)`", TABLE.read_text(), re.MULTILINE)
    return Counter(rows)


def _owner(process: str, owners: Counter[str]) -> str:
    return next((name for name in owners if name in process), "")


def _send(port: int, sent: bytes) -> None:
    with socket.socket() as client, contextlib.suppress(OSError):
        client.settimeout(1)
        client.connect(("127.0.0.1", port))
        client.sendall(sent)
        client.settimeout(0.3)
        client.recv(4096)


def test_every_socket_is_in_the_table_and_no_bytes_do_harm(
    server: Serve, eventually: Callable[[Callable[[], bool], float, str], None]
) -> None:
    owners = _owners()
    listening = server.listening()
    assert {entry.address for entry in listening} == {"127.0.0.1"}
    unlisted = [entry.process for entry in listening if not _owner(entry.process, owners)]
    assert not unlisted, "add their sockets to docs/sockets.md"
    per_process = Counter((entry.pid, _owner(entry.process, owners)) for entry in listening)
    assert not [pair for pair, count in per_process.items() if count > owners[pair[1]]], "more sockets than rows"

    beside: list[PinnedStream] = []
    over = threading.Event()

    def stream() -> None:
        """One stream after the other, so that one always runs."""
        while not over.is_set():
            beside.append(PinnedStream(server.url))
            beside[-1].body = BODY
            beside[-1].run()

    streaming = threading.Thread(target=stream)
    streaming.start()
    try:
        eventually(lambda: bool(beside) and beside[0].events > 2, 60, "that a stream runs")
        held = [_hold(entry.port) for entry in listening for _ in range(HELD)]
        assert len([connection for connection in held if connection is not None]) > 100
        with ThreadPoolExecutor(8) as clients:
            work = [clients.submit(_send, entry.port, sent) for entry in listening for sent in BYTES.values()]
            for each in work:
                each.result()
        for connection in held:
            if connection is not None:
                connection.close()
    finally:
        over.set()
        streaming.join(120)
    assert [(one.failure, one.finished) for one in beside] == [("", True)] * len(beside)
    assert {entry.port for entry in listening} <= {entry.port for entry in server.listening()}, (
        "all of them still listen"
    )
    assert {entry.pid for entry in listening} <= server.running_pids()
    assert "Traceback" not in server.stderr_text
