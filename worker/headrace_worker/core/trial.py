"""Keeps an attempt alone that may end this process, whichever router sent the others. Pure.

    open ── a router reserves ─▶ reserved ── a request that must run alone ─▶ running ── over ─▶ closed ─▶ open

Reserved: the others run on and are accepted; routers place requests elsewhere if they can. Running: the others are
refused, for TRIAL_SECONDS at most. Closed lasts as long as what came before it: whatever routers send, trials have half
of this replica's time at most.
"""

from collections.abc import Callable, Mapping

from headrace_proto.trial import RESERVED_SECONDS, TRIAL_SECONDS
from headrace_worker.core.request import Request


class Trial:
    """At most one at a time: it ends with its request, or when the request has enough new tokens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None  # when it was reserved, or the request was accepted
        self._until = 0.0  # when it is over in any case
        self._attempt_id = b""  # empty = reserved
        self._tokens = 0  # of the request at its end
        self._closed_until = 0.0

    def reserve(self, requests: Mapping[bytes, Request]) -> None:
        """A router has a request that must run alone, and asks again while it waits. requests: by attempt id."""
        now = self._clock()
        self._end_if_over(requests, now)
        if self._attempt_id or now < self._closed_until:
            return
        if self._began is None:
            self._began = now
        self._until = min(now + RESERVED_SECONDS, self._began + TRIAL_SECONDS)

    def reserved(self, requests: Mapping[bytes, Request]) -> bool:
        """Whether a request runs alone here, or waits to."""
        self._end_if_over(requests, self._clock())
        return self._began is not None

    def refusal(self, request: Request, others: Mapping[bytes, Request]) -> str:
        """Why a request may not run beside the others now; empty if it may."""
        now = self._clock()
        self._end_if_over(others, now)
        if self._attempt_id:
            return "another request runs alone on this replica"
        if request.trial_tokens and now < self._closed_until:
            return "another request ran alone on this replica, and now those that waited do"
        if request.trial_tokens and others:
            return "this request must run alone, and others run on this replica"
        return ""

    def accepted(self, request: Request) -> None:
        """The request runs from now on."""
        if request.trial_tokens:
            now = self._clock()
            if self._began is None:
                self._began = now
            self._until = now + TRIAL_SECONDS
            self._attempt_id, self._tokens = request.attempt_id, len(request.tokens) + request.trial_tokens

    def _end_if_over(self, requests: Mapping[bytes, Request], now: float) -> None:
        if self._began is None:
            return
        alone = requests.get(self._attempt_id)
        running = alone is not None and len(alone.tokens) < self._tokens
        if now < self._until and (running or not self._attempt_id):
            return
        self._closed_until = now + (now - self._began)
        self._began, self._attempt_id = None, b""
