"""One authenticated connection between rank 0 and another rank, for heartbeats and failure reports.

A frame is its kind (1 byte), the length of its text (2 bytes, big-endian), the text (UTF-8). The connecting rank first
sends a greeting: the token that the ranks were given, its rank and its process id; rank 0 answers with its own process
id.
"""

import contextlib
import os
import socket
import struct
import threading
from enum import Enum

from headrace_worker.comm.errors import RendezvousError

GREETING = struct.Struct("!32sHI")
ANSWER = struct.Struct("!I")
_HEAD = struct.Struct("!cH")
_MAX_CHARS = 2000  # of a text
_SEND_SECONDS = 0.5  # a peer that does not read for this long has a full socket: the heartbeats will detect it


class FrameKind(Enum):
    ALIVE = b"a"
    FAILED = b"f"  # the text is the reason
    LEAVING = b"l"
    NOTE = b"n"  # the text is for the listener on rank 0


class Link:
    """A connection to an authenticated rank. `read` is for one thread, `send` for any."""

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

    def send(self, kind: FrameKind, text: str = "") -> None:
        """Send a frame; errors are ignored: liveness is judged from what is received."""
        encoded = text[:_MAX_CHARS].encode()
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(_HEAD.pack(kind.value, len(encoded)) + encoded)

    def read(self) -> list[tuple[FrameKind, str]]:
        """The frames that have arrived. Raises ConnectionError when the connection closed or a frame is malformed."""
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
                kind = FrameKind(code)
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


def connect_to_rank_0(host: str, port: int, token: bytes, rank: int, seconds: float) -> Link:
    """Connect this rank to rank 0. Raises RendezvousError."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(socket.create_connection((host, port), seconds))
            connection.sendall(GREETING.pack(token, rank, os.getpid()))
            (other,) = ANSWER.unpack(_receive(connection, ANSWER.size))
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({type(error).__name__}); see rank 0's log, or "
                "check for a firewall between the nodes"
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
