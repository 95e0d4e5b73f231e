"""Keeps an attempt alone that may end this process, whichever router sent the others (I25). Pure."""

from collections.abc import Mapping

from headrace_proto.trial import TRIAL_TOKENS
from headrace_worker.core.request import Request


class Trial:
    """At most one at a time: it ends with its request, or when the request has enough new tokens."""

    def __init__(self) -> None:
        self._attempt_id = b""
        self._tokens = 0  # of the request at its end

    def refusal(self, request: Request, others: Mapping[bytes, Request]) -> str:
        """Why a request may not run beside the others now; empty if it may. others: by attempt id."""
        alone = others.get(self._attempt_id)
        if alone is not None and len(alone.tokens) < self._tokens:
            return "another request runs alone on this replica"
        if request.alone and others:
            return "this request must run alone, and others run on this replica"
        return ""

    def accepted(self, request: Request) -> None:
        """The request runs from now on."""
        if request.alone:
            self._attempt_id, self._tokens = request.attempt_id, len(request.tokens) + TRIAL_TOKENS
