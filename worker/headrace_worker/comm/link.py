"""One authenticated connection between rank 0 and another rank: heartbeats, failure reports, shared entries.

A frame is its kind (1 byte), the length of its payload (4 bytes, big-endian), the payload, and a MAC over the frame's
number and these. Frames cannot be forged, changed, repeated or reordered by others on the network.
"""

import contextlib
import socket
import struct
import threading
from enum import Enum
from hmac import compare_digest

from headrace_worker.comm.link_keys import MAC_BYTES, LinkKeys, compute_mac

_HEAD = struct.Struct("!cI")
_NUMBER = struct.Struct("!Q")
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
    """A connection to an authenticated rank. `read` is for one thread, `send` for any."""

    def __init__(self, connection: socket.socket, rank: int, pid: int, keys: LinkKeys) -> None:
        self.rank = rank
        self.pid = pid
        self.socket = connection
        self._keys = keys
        self._received = bytearray()
        self._received_frames = 0
        self._sent_frames = 0
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
            mac = compute_mac(self._keys.sending, _NUMBER.pack(self._sent_frames) + frame)
            self._sent_frames += 1
            try:
                self.socket.sendall(frame + mac)
            except OSError:
                self._broken = True

    def read(self) -> list[tuple[FrameKind, bytes]]:
        """The frames that have arrived. Raises ConnectionError when the connection closed or a frame is not genuine."""
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
        if len(self._received) < end + MAC_BYTES:
            return None
        frame, mac = bytes(self._received[:end]), self._received[end : end + MAC_BYTES]
        if not compare_digest(mac, compute_mac(self._keys.receiving, _NUMBER.pack(self._received_frames) + frame)):
            raise ConnectionAbortedError
        del self._received[: end + MAC_BYTES]
        self._received_frames += 1
        try:
            return FrameKind(code), frame[_HEAD.size :]
        except ValueError as error:
            raise ConnectionAbortedError from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
