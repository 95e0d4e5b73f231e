"""Every rank learns within two seconds that another one is dead or failed, within five that it hangs, and what it was.

rank 1 ──┐                         rank 0 keeps a link to each other rank. Whoever fails says so; a killed
rank 2 ──┼── rank 0                process' link closes; a stopped one's grows silent. Rank 0 tells the others,
rank 3 ──┘                         and rank 0's own end is seen by all of them.
"""

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from headrace_worker.parallel.errors import RankLostError
from headrace_worker.parallel.link import Kind, Link
from headrace_worker.parallel.roll import Roll

TICK_SECONDS = 0.1
SILENT_TICKS = 40  # not fewer: where many processes share few cores, one that lives gets no turn for a second or two
PARTING_TICKS = 14  # that another may be gone in order before this rank goes too
PATIENT_TICKS = 300  # while libraries and weights are loaded, which may hold the interpreter's lock

Result = TypeVar("Result")


class Watch:
    """This rank's eye on the others, on a thread of its own."""

    def __init__(self, rank: int, links: Iterable[Link] = ()) -> None:
        self.failure: RankLostError | None = None
        self._rank = rank
        self._links: dict[int, Link] = {}
        self._roll = Roll(PATIENT_TICKS, PARTING_TICKS)
        self._new: deque[Link] = deque()
        self._callbacks: list[Callable[[RankLostError], None]] = []
        self._listener: Callable[[str], None] = lambda text: None
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-watch", daemon=True)
        for link in links:
            self.add(link)

    def start(self) -> None:
        self._thread.start()

    def add(self, link: Link) -> None:
        """Watch one more rank; one that comes too late is told so."""
        with self._lock:
            self._links = self._links | {link.rank: link}
            self._new.append(link)
            failure = self.failure
        if failure is not None:
            link.send(Kind.FAILED, str(failure))

    def call(self, callback: Callable[[RankLostError], None]) -> None:
        """Have `callback` called once when a rank is lost, at once if one is; from the watch's thread or this one."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def note(self, text: str) -> None:
        """Say something short to rank 0, beside the steps. Of other ranks."""
        for link in self._links.values():
            link.send(Kind.NOTE, text)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Of rank 0: have the others' notes, on the watch's thread."""
        self._listener = listener

    def guard(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises; or RankLostError as soon as a rank is lost.

        `work` runs on a thread of its own: some waits of libraries end only when the peer comes, and a peer that is
        lost never comes. Such a thread is left behind.
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

        self.call(lambda failure: over.set())
        threading.Thread(target=run, name="headrace-guarded", daemon=True).start()
        over.wait()
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise RankLostError(str(self.failure))

    def be_strict(self) -> None:
        """From now on, a peer that is silent for more than `SILENT_TICKS` hangs."""
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
        if self.failure is not None:
            return RankLostError(str(self.failure))
        return RankLostError(f"the connection between the ranks broke: {type(error).__name__}")

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
        try:
            self._look()
        except Exception as error:  # unwatched ranks would wait for each other for good
            self.fail(f"{type(error).__name__} in its watch")

    def _look(self) -> None:
        with selectors.DefaultSelector() as selector:
            next_tick = time.monotonic()
            while not self._closing.is_set():
                while self._new:
                    link = self._new.popleft()
                    selector.register(link.socket, selectors.EVENT_READ, link)
                    self._roll.add(link.rank)
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
            how = "left before the others" if self._roll.has_left(rank) else "hangs: it gave no sign of life"
            self._lose(self._links[rank], how)

    def _hear(self, link: Link) -> bool:
        """Takes in what a link brought; False when nothing more will come."""
        try:
            frames = link.read()
        except OSError:
            self._roll.strike(link.rank)
            if not self._closing.is_set():
                self._lose(link, "is gone: its connection closed")
            return False
        self._roll.heard(link.rank)
        for kind, text in frames:
            if kind is Kind.FAILED:
                others = [other for other in self._links.values() if other is not link]
                self._fail(text, tell=others)
            elif kind is Kind.NOTE:
                self._listener(text)
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
        for link in tell:  # before this rank ends, which the others would take for the cause
            link.send(Kind.FAILED, sentence)
        for callback in callbacks:
            with contextlib.suppress(Exception):  # one that fails must not keep the others from hearing
                callback(self.failure)
