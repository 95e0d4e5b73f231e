"""Every rank learns within two seconds that another one is dead, hangs or failed, and what it was.

rank 1 ──┐                         rank 0 keeps a link to each other rank. Whoever fails says so; a killed
rank 2 ──┼── rank 0                process' link closes; a stopped one's grows silent. Rank 0 tells the others,
rank 3 ──┘                         and rank 0's own end is seen by all of them.
"""

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable

from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.link import Kind, Link
from headrace_worker.parallel.roll import Roll

TICK_SECONDS = 0.2
SILENT_TICKS = 8
PATIENT_TICKS = 150  # while libraries and weights are loaded, which may hold the interpreter's lock


class Watch:
    """This rank's eye on the others, on a thread of its own."""

    def __init__(self, rank: int, links: Iterable[Link]) -> None:
        self.failure: RankLostError | None = None
        self._rank = rank
        self._links = {link.rank: link for link in links}
        self._roll = Roll(self._links, PATIENT_TICKS)
        self._callbacks: list[Callable[[RankLostError], None]] = []
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, callback: Callable[[RankLostError], None]) -> None:
        """Have `callback` called once when a rank is lost, at once if one is; from the watch's thread or this one."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def be_strict(self) -> None:
        """From now on, a peer that is silent for 1.6 s hangs."""
        self._roll.limit = SILENT_TICKS

    def check(self) -> None:
        """Raises RankLostError when a rank is lost."""
        if self.failure is not None:
            raise RankLostError(str(self.failure))

    def fail(self, sentence: str) -> None:
        """Tell all others that this rank cannot go on."""
        self._fail(f"rank {self._rank} (process {os.getpid()}) failed: {sentence}", tell=self._links.values())

    def explain(self, error: Exception, seconds: float = 1.0) -> RankLostError:
        """Who is to blame for a connection between ranks that broke: the watch hears of it at about the same time."""
        self._failed.wait(seconds)
        return self.failure or RankLostError(f"the connection between the ranks broke: {type(error).__name__}")

    def close(self) -> None:
        """Leave in order. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for link in self._links.values():
            link.send(Kind.LEAVING)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2)
        for link in self._links.values():
            link.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ, link)
            next_tick = time.monotonic()
            while not self._closing.is_set():
                for key, _ in selector.select(max(0.0, next_tick - time.monotonic())):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._tick()

    def _tick(self) -> None:
        for link in self._links.values():
            link.send(Kind.ALIVE)
        for rank in self._roll.tick():
            self._lose(self._links[rank], "hangs: it gave no sign of life")

    def _hear(self, link: Link) -> bool:
        """Takes in what a link brought; False when nothing more will come."""
        try:
            frames = link.read()
        except OSError:
            self._roll.left(link.rank)
            if not self._closing.is_set():
                self._lose(link, "is gone: its connection closed")
            return False
        self._roll.heard(link.rank)
        for kind, text in frames:
            if kind is Kind.FAILED:
                others = [other for other in self._links.values() if other is not link]
                self._fail(text, tell=others)
            elif kind is Kind.LEAVING:
                self._roll.left(link.rank)
                return False
        return True

    def _lose(self, link: Link, how: str) -> None:
        others = [other for other in self._links.values() if other is not link]
        self._fail(f"{link.name} {how}", tell=others)

    def _fail(self, sentence: str, tell: Iterable[Link]) -> None:
        with self._lock:
            if self.failure is not None:
                return  # the first cause is the cause
            self.failure = RankLostError(sentence)
            callbacks, self._callbacks = self._callbacks, []
        self._failed.set()
        for callback in callbacks:
            with contextlib.suppress(Exception):  # one that fails must not keep the others from hearing
                callback(self.failure)
        for link in tell:
            link.send(Kind.FAILED, sentence)
