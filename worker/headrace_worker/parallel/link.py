"""One authenticated connection between rank 0 and another rank, for signs of life and last words.

A frame is its kind (1 byte), the length of its text (2 bytes, big-endian), the text (UTF-8). The first thing on a
connection is the caller's greeting: the token that the ranks were told, its rank and its process id; rank 0 answers
with its own process id.
"""

import contextlib
import hmac
import socket
import struct
import threading
import time
from enum import Enum

from headrace_worker.parallel.errors import MeetingError

_GREETING = struct.Struct("!32sHI")
_ANSWER = struct.Struct("!I")
_HEAD = struct.Struct("!cH")
_MOST = 2000  # characters of a text
_SEND_SECONDS = 0.5  # a peer that does not take a frame this long has its socket full: it will be found silent


class Kind(Enum):
    ALIVE = b"a"
    FAILED = b"f"  # the text says why
    LEAVING = b"l"


class Link:
    """A connection whose other end is known. `read` is for one thread, `send` for any."""

    def __init__(self, connection: socket.socket, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.socket = connection
        self._received = bytearray()
        self._sending = threading.Lock()
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def send(self, kind: Kind, text: str = "") -> None:
        """Says something if the other end still takes it: whether it lives is judged from what it says."""
        encoded = text[:_MOST].encode()
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(_HEAD.pack(kind.value, len(encoded)) + encoded)

    def read(self) -> list[tuple[Kind, str]]:
        """What has arrived. Raises ConnectionError when the other end is gone or talks nonsense."""
        try:
            data = self.socket.recv(4096)
        except TimeoutError:
            return []
        if not data:
            raise ConnectionResetError
        self._received += data
        frames = []
        while len(self._received) >= _HEAD.size:
            code, length = _HEAD.unpack_from(self._received)
            end = _HEAD.size + length
            if len(self._received) < end:
                break
            try:
                frames.append((Kind(code), self._received[_HEAD.size : end].decode()))
            except ValueError as error:
                raise ConnectionAbortedError from error
            del self._received[:end]
        return frames

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def accept_links(listener: socket.socket, token: bytes, size: int, pid: int, seconds: float) -> list[Link]:
    """Waits until ranks 1 to size − 1 have called. Raises MeetingError. Callers without the token are hung up on."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + seconds
    while len(links) < size - 1:
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in links)
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise MeetingError(
                f"of {size} ranks these did not come within {seconds:.0f} s: {missing}; see their logs, or whether a "
                "firewall stands between the nodes"
            ) from error
        link = _greeted(connection, token, pid)
        if link is not None and 0 < link.rank < size and link.rank not in links:
            links[link.rank] = link
        else:
            connection.close()
    return [links[rank] for rank in sorted(links)]


def _greeted(connection: socket.socket, token: bytes, pid: int) -> Link | None:
    connection.settimeout(2)
    try:
        presented, rank, caller = _GREETING.unpack(_receive(connection, _GREETING.size))
        if not hmac.compare_digest(presented, token):
            return None
        connection.sendall(_ANSWER.pack(pid))
    except OSError:
        return None
    return Link(connection, rank, caller)


def call_rank_0(host: str, port: int, token: bytes, rank: int, pid: int, seconds: float) -> Link:
    """The link of another rank to rank 0. Raises MeetingError."""
    try:
        connection = socket.create_connection((host, port), seconds)
        connection.sendall(_GREETING.pack(token, rank, pid))
        (other,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
    except OSError as error:
        raise MeetingError(
            f"rank {rank} cannot reach rank 0 at {host}:{port} ({type(error).__name__}); see rank 0's log, or whether "
            "a firewall stands between the nodes"
        ) from error
    return Link(connection, 0, other)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data
