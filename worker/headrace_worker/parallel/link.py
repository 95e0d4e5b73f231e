"""One authenticated connection between rank 0 and another rank, for signs of life and last words.

A frame is its kind (1 byte), the length of its text (2 bytes, big-endian), the text (UTF-8). The first thing on a
connection is the caller's greeting: the token that the ranks were told, its rank and its process id; rank 0 answers
with its own process id.
"""

import contextlib
import os
import socket
import struct
import threading
from enum import Enum

from headrace_worker.parallel.errors import MeetingError

GREETING = struct.Struct("!32sHI")
ANSWER = struct.Struct("!I")
_HEAD = struct.Struct("!cH")
_MOST = 2000  # characters of a text
_SEND_SECONDS = 0.5  # a peer that does not take a frame this long has its socket full: it will be found silent


class Kind(Enum):
    ALIVE = b"a"
    FAILED = b"f"  # the text says why
    LEAVING = b"l"
    NOTE = b"n"  # the text is for whoever listens at rank 0


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
            try:
                kind = Kind(code)
                if len(self._received) < end:
                    break
                frames.append((kind, self._received[_HEAD.size : end].decode()))
            except ValueError as error:
                raise ConnectionAbortedError from error
            del self._received[:end]
        return frames

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def call_rank_0(host: str, port: int, token: bytes, rank: int, seconds: float) -> Link:
    """The link of another rank to rank 0. Raises MeetingError."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(socket.create_connection((host, port), seconds))
            connection.sendall(GREETING.pack(token, rank, os.getpid()))
            (other,) = ANSWER.unpack(_receive(connection, ANSWER.size))
        except OSError as error:
            raise MeetingError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({type(error).__name__}); see rank 0's log, or "
                "whether a firewall stands between the nodes"
            ) from error
        stack.pop_all()
        return Link(connection, 0, other)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data
