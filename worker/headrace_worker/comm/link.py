"""One connection between rank 0 and another rank: heartbeats, failure reports, shared entries.

A frame is its kind (1 byte), the length of its payload (4 bytes, big-endian), and the payload.
"""

import contextlib
import socket
import struct
import threading
from enum import Enum

_HEAD = struct.Struct("!cI")
MAX_PAYLOAD = 1 << 20
_MAX_CHARS = 2000  # of a text
_SEND_SECONDS = 0.5  # a peer that does not read for this long has a full socket: the heartbeats will detect it


class FrameKind(Enum):
    ALIVE = b"a"
    ENTRY = b"e"  # the payload is a key and a value of `SharedEntries`
    FAILED = b"f"  # the text is the reason
    LEAVING = b"l"
    NOTE = b"n"  # the payload is for the listener on rank 0


class Link:
    """A connection to a rank that has joined. `read` is for one thread, `send` for any."""

    def __init__(self, connection: socket.socket, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.socket = connection
        self._received = bytearray()
        self._broken = False  # a frame was sent in part: nothing after it could be read
        self._sending = threading.Lock()
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def send_text(self, kind: FrameKind, text: str = "") -> None:
        """Send a frame with a text, of which at most 2,000 characters are sent."""
        self.send(kind, text[:_MAX_CHARS].encode())

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame; errors are ignored: liveness is judged from what is received."""
        with self._sending:
            if self._broken:
                return
            frame = _HEAD.pack(kind.value, len(payload)) + payload
            try:
                self.socket.sendall(frame)
            except OSError:
                self._broken = True

    def read(self) -> list[tuple[FrameKind, bytes]]:
        """The frames that have arrived. Raises ConnectionError when the connection closed or a frame is malformed."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        if not data:
            raise ConnectionResetError
        self._received += data
        frames = []
        while (frame := self._next_frame()) is not None:
            frames.append(frame)
        return frames

    def _next_frame(self) -> tuple[FrameKind, bytes] | None:
        if len(self._received) < _HEAD.size:
            return None
        code, length = _HEAD.unpack_from(self._received)
        if length > MAX_PAYLOAD:
            raise ConnectionAbortedError
        end = _HEAD.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEAD.size : end])
        del self._received[:end]
        try:
            return FrameKind(code), payload
        except ValueError as error:
            raise ConnectionAbortedError from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
