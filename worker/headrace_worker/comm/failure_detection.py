"""Every rank detects within two seconds that another one exited or failed, within five that it hangs, and the cause.

rank 1 ──┐                         rank 0 keeps a link to each other rank. A failing rank reports its error; a
rank 2 ──┼── rank 0                killed process's link closes; a stopped one sends no heartbeats. Rank 0 notifies
rank 3 ──┘                         the others, and all of them detect the end of rank 0.
"""

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

from headrace_worker.comm.errors import RankLostError

_HEAD = struct.Struct("!cI")
MAX_PAYLOAD = 1 << 20
_MAX_CHARS = 2000  # most characters of a text that is sent
_SEND_SECONDS = 0.5  # a peer that does not read for this long has a full socket: the heartbeats will detect it


class FrameKind(Enum):
    ALIVE = b"a"
    ENTRY = b"e"  # the payload is a key and a value of `SharedEntries`
    FAILED = b"f"  # the text is the reason
    LEAVING = b"l"
    NOTE = b"n"  # the payload is for the listener on rank 0


class RankLink:
    """A connection to a rank that has joined. `read` is for one thread, `send` for any.

    A frame is its kind (1 byte), the length of its payload (4 bytes, big-endian), and the payload.
    """

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


_KEY_LENGTH = struct.Struct("!H")


class SharedEntries:
    """Strings to bytes. Every rank has a copy, and rank 0 forwards what it receives. Entries stay. Thread-safe.

    Only the ranks' links carry them: no port serves them, and no other process can read or change them.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._links: list[RankLink] = []
        self._changed = threading.Condition()

    def attach(self, link: RankLink) -> None:
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

    def receive(self, link: RankLink, payload: bytes) -> None:
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

    def _set(self, key: str, value: bytes, payload: bytes, origin: RankLink | None) -> None:
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


class HeartbeatTracker:
    """Ticks since each peer's last frame, counted by this process.

    Wall time would not work: when the whole machine, or this process, stalls for seconds, every peer seems silent. A
    tick is counted only while this process runs.
    """

    def __init__(self, limit: int, parting: int) -> None:
        """`limit`: ticks a peer may be silent; `parting`: ticks between a peer's orderly exit and that of this rank."""
        self.limit = limit
        self._parting = parting
        self._silent: dict[int, int] = {}
        self._left: set[int] = set()

    def add(self, rank: int) -> None:
        self._silent.setdefault(rank, 0)

    def record_frame(self, rank: int) -> None:
        if rank in self._silent:
            self._silent[rank] = 0

    def record_leaving(self, rank: int) -> None:
        """The peer announced its exit, which is orderly if this rank exits at about the same time."""
        self.record_frame(rank)
        self._left.add(rank)

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    def remove(self, rank: int) -> None:
        """The peer's end is known: stop counting its silence."""
        self._silent.pop(rank, None)

    def tick(self) -> list[int]:
        """Count one tick. Returns the ranks that have been silent for too long, each of them once."""
        overdue = []
        for rank in list(self._silent):
            self._silent[rank] += 1
            if self._silent[rank] > (self._parting if rank in self._left else self.limit):
                overdue.append(rank)
                self.remove(rank)
        return overdue


TICK_SECONDS = 0.1
SILENT_TICKS = 40  # not fewer: where many processes share few cores, a live one may not be scheduled for 1–2 s
PARTING_TICKS = 14  # between the orderly exit of another rank and that of this one
STARTUP_TICKS = 300  # while libraries and weights are loaded, which may hold the GIL

Result = TypeVar("Result")


class FailureDetector:
    """Monitors the links to the other ranks on its own thread."""

    def __init__(self, rank: int, links: Iterable[RankLink] = ()) -> None:
        self.failure: RankLostError | None = None
        self.entries = SharedEntries()
        self._rank = rank
        self._links: dict[int, RankLink] = {}
        self._heartbeats = HeartbeatTracker(STARTUP_TICKS, PARTING_TICKS)
        self._new: deque[RankLink] = deque()
        self._callbacks: list[Callable[[RankLostError], object]] = []
        self._listener: Callable[[bytes], None] = lambda note: None
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-failure-detector", daemon=True)
        for link in links:
            self.add(link)

    def start(self) -> None:
        self._thread.start()

    def add(self, link: RankLink) -> None:
        """Monitor one more rank; if a rank is lost already, the new one is notified of the failure."""
        with self._lock:
            self._links = self._links | {link.rank: link}
            self._new.append(link)
            failure = self.failure
        self.entries.attach(link)
        if failure is not None:
            link.send_text(FrameKind.FAILED, str(failure))

    def on_loss(self, callback: Callable[[RankLostError], object]) -> None:
        """Call `callback` once when a rank is lost, at once if one is already; on the detector's thread or this one."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def notify_rank_0(self, note: bytes) -> None:
        """Send a short message to rank 0, outside of the steps. For ranks other than 0."""
        for link in self._links.values():
            link.send(FrameKind.NOTE, note)

    def on_notice(self, listener: Callable[[bytes], None]) -> None:
        """On rank 0: pass the other ranks' notes to `listener`, on the detector's thread."""
        self._listener = listener

    def guard(self, work: Callable[[], Result]) -> Result:
        """Returns or raises what `work` does; raises RankLostError as soon as a rank is lost.

        `work` runs on its own thread: some waits of libraries end only when the peer connects, and a lost peer never
        does. Such a thread is abandoned.
        """
        over = threading.Event()
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            over.set()

        self.on_loss(lambda failure: over.set())
        threading.Thread(target=run, name="headrace-guarded", daemon=True).start()
        over.wait()
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise RankLostError(str(self.failure))

    def enable_hang_detection(self) -> None:
        """From now on a peer without a heartbeat for more than `SILENT_TICKS` counts as hanging."""
        self._heartbeats.limit = SILENT_TICKS

    def check(self) -> None:
        """Raises RankLostError when a rank is lost."""
        if self.failure is not None:
            raise RankLostError(str(self.failure))

    def fail(self, sentence: str) -> None:
        """Notify all other ranks that this rank failed."""
        self._fail(f"rank {self._rank} (process {os.getpid()}) failed: {sentence}", notify=self._links.values())

    def explain(self, error: Exception, seconds: float = 1.0) -> RankLostError:
        """The rank that caused a broken connection: the detector learns of it at about the same time."""
        self._failed.wait(seconds)
        if self.failure is not None:
            return RankLostError(str(self.failure))
        return RankLostError(f"the connection between the ranks broke: {type(error).__name__}")

    def close(self) -> None:
        """Leave in an orderly way. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for link in self._links.values():
            link.send(FrameKind.LEAVING)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2)
        for link in self._links.values():
            link.close()

    def _run(self) -> None:
        try:
            self._monitor()
        except Exception as error:  # without detection ranks would wait for each other forever
            self.fail(f"{type(error).__name__} in its failure detector")

    def _monitor(self) -> None:
        with selectors.DefaultSelector() as selector:
            next_tick = time.monotonic()
            while not self._closing.is_set():
                while self._new:
                    link = self._new.popleft()
                    selector.register(link.socket, selectors.EVENT_READ, link)
                    self._heartbeats.add(link.rank)
                for key, _ in selector.select(max(0.0, next_tick - time.monotonic())):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._tick()

    def _tick(self) -> None:
        for link in self._links.values():
            link.send(FrameKind.ALIVE)
        for rank in self._heartbeats.tick():
            how = "left before the others" if self._heartbeats.has_left(rank) else "hangs: it sent no heartbeat"
            self._lose(self._links[rank], how)

    def _receive(self, link: RankLink) -> bool:
        """Handles what arrived on a link; False when nothing more will arrive."""
        try:
            frames = link.read()
        except OSError:
            self._heartbeats.remove(link.rank)
            if not self._closing.is_set():
                self._lose(link, "is lost: its connection closed")
            return False
        self._heartbeats.record_frame(link.rank)
        for kind, payload in frames:
            if kind is FrameKind.FAILED:
                others = [other for other in self._links.values() if other is not link]
                self._fail(payload.decode(errors="replace"), notify=others)
            elif kind is FrameKind.ENTRY:
                self.entries.receive(link, payload)
            elif kind is FrameKind.NOTE:
                self._listener(payload)
            elif kind is FrameKind.LEAVING:
                self._heartbeats.record_leaving(link.rank)
                return False
        return True

    def _lose(self, link: RankLink, how: str) -> None:
        others = [other for other in self._links.values() if other is not link]
        self._fail(f"{link.name} {how}", notify=others)

    def _fail(self, sentence: str, notify: Iterable[RankLink]) -> None:
        with self._lock:
            if self.failure is not None:
                return  # the first cause is reported
            self.failure = RankLostError(sentence)
            callbacks, self._callbacks = self._callbacks, []
        self._failed.set()
        for link in notify:  # before this rank exits, which the others would take for the cause
            link.send_text(FrameKind.FAILED, sentence)
        for callback in callbacks:
            with contextlib.suppress(Exception):  # a failing callback must not keep the others from being called
                callback(self.failure)
