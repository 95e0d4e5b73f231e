"""Rank 0's door: who comes with the token is let in, everybody else is hung up on and holds nobody up."""

import contextlib
import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass

from headrace_worker.parallel.errors import MeetingError
from headrace_worker.parallel.link import ANSWER, GREETING, Link
from headrace_worker.parallel.watch import Watch

_POLL_SECONDS = 0.1
_GREETING_SECONDS = 2.0  # in which a caller says all of its greeting
_MOST_CALLERS = 1024  # who have not said their greeting yet


@dataclass(slots=True)
class _Caller:
    connection: socket.socket
    until: float
    said: bytes = b""


class Door:
    """Waits for ranks 1 to `size` − 1, and gives their links to the watch."""

    def __init__(self, listener: socket.socket, token: bytes, size: int) -> None:
        self._listener = listener
        self._token = token
        self._missing = set(range(1, size))
        self._size = size
        self._callers: dict[int, _Caller] = {}  # by file descriptor
        self._selector = selectors.DefaultSelector()

    def admit(self, watch: Watch, seconds: float) -> None:
        """Raises MeetingError when somebody does not come, RankLostError when somebody who came is lost."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        deadline = time.monotonic() + seconds
        try:
            while self._missing:
                watch.check()
                if time.monotonic() > deadline:
                    missing = ", ".join(map(str, sorted(self._missing)))
                    raise MeetingError(
                        f"of {self._size} ranks these did not come within {seconds:.0f} s: {missing}; see their logs, "
                        "or whether a firewall stands between the nodes"
                    )
                self._wait(watch)
        finally:
            for caller in list(self._callers.values()):
                self._dismiss(caller)
            self._selector.close()

    def _wait(self, watch: Watch) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._listener:
                self._open()
                continue
            caller = self._callers.get(key.fd)
            link = self._hear(caller) if caller is not None else None
            if link is not None:
                self._missing.discard(link.rank)
                watch.add(link)
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until < now]:
            self._dismiss(caller)

    def _open(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away again
            return
        if len(self._callers) >= _MOST_CALLERS:
            self._dismiss(next(iter(self._callers.values())))
        connection.setblocking(False)
        self._callers[connection.fileno()] = _Caller(connection, time.monotonic() + _GREETING_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, caller: _Caller) -> Link | None:
        """The caller's link once its greeting is complete and right."""
        try:
            data = caller.connection.recv(GREETING.size - len(caller.said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        caller.said += data
        if data and len(caller.said) < GREETING.size:
            return None
        link = self._recognise(caller) if data else None
        self._forget(caller)
        if link is None:
            caller.connection.close()
        return link

    def _recognise(self, caller: _Caller) -> Link | None:
        presented, rank, pid = GREETING.unpack(caller.said)
        if not hmac.compare_digest(presented, self._token) or rank not in self._missing:
            return None
        try:
            caller.connection.sendall(ANSWER.pack(os.getpid()))
        except OSError:
            return None
        return Link(caller.connection, rank, pid)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection.fileno()]

    def _dismiss(self, caller: _Caller) -> None:
        self._forget(caller)
        with contextlib.suppress(OSError):
            caller.connection.close()
