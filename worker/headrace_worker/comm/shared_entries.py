"""Keys and values that all ranks of a rendezvous share: every rank has a copy, and rank 0 forwards what it receives.

Only the ranks' links carry them: no port serves them, and no other process can read or change them.
"""

import struct
import threading

from headrace_worker.comm.link import MAX_PAYLOAD, FrameKind, Link

_KEY_LENGTH = struct.Struct("!H")


class SharedEntries:
    """A dictionary of strings to bytes. Entries do not change once they are set. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._links: list[Link] = []
        self._changed = threading.Condition()

    def attach(self, link: Link) -> None:
        """Share with one more rank, which first receives the entries so far."""
        with self._changed:
            for key, value in self._values.items():
                link.send(FrameKind.ENTRY, _encode(key, value))
            self._links.append(link)

    def publish(self, key: str, value: bytes) -> None:
        """Set an entry on all ranks. Raises ValueError when it is larger than a frame."""
        payload = _encode(key, value)
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"the entry {key} has {len(value)} bytes: a frame holds {MAX_PAYLOAD}")
        self._set(key, value, payload, None)

    def receive(self, link: Link, payload: bytes) -> None:
        """Handle an entry that another rank published. Raises ValueError when it is malformed."""
        key, value = _decode(payload)
        self._set(key, value, payload, link)

    def find(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def wait(self, key: str, seconds: float) -> bytes | None:
        """The value of `key`, waiting for at most `seconds` until it is set."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def discard(self, key: str) -> None:
        """Drop this rank's copy of an entry."""
        with self._changed:
            self._values.pop(key, None)

    def _set(self, key: str, value: bytes, payload: bytes, origin: Link | None) -> None:
        with self._changed:  # held while sending, so that a rank that is attached meanwhile misses no entry
            self._values[key] = value
            for link in self._links:
                if link is not origin:
                    link.send(FrameKind.ENTRY, payload)
            self._changed.notify_all()


def _encode(key: str, value: bytes) -> bytes:
    encoded = key.encode()
    return _KEY_LENGTH.pack(len(encoded)) + encoded + value


def _decode(payload: bytes) -> tuple[str, bytes]:
    if len(payload) < _KEY_LENGTH.size:
        raise ValueError("an entry without a key")
    (length,) = _KEY_LENGTH.unpack_from(payload)
    start = _KEY_LENGTH.size + length
    return payload[_KEY_LENGTH.size : start].decode(), payload[start:]
