"""Requests that are not run for a while, since each replica that ran them was lost (I25): pure, bounded."""

from array import array
from collections.abc import Callable
from hashlib import blake2b

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import PoisonousRequestError

QUARANTINE_SECONDS = 600.0
MAX_FINGERPRINTS = 1024  # the oldest ones are dropped


class Quarantine:
    """Fingerprints of requests: of their model, tenant and prompt. Of one router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: ChoiceRequest) -> None:
        """Refuses the request, and each later one like it, for QUARANTINE_SECONDS."""
        key = _fingerprint(request)
        self._until.pop(key, None)
        self._until[key] = self._clock() + QUARANTINE_SECONDS
        while len(self._until) > MAX_FINGERPRINTS:
            del self._until[next(iter(self._until))]

    def check(self, request: ChoiceRequest) -> None:
        """Raises PoisonousRequestError if the request is refused now."""
        if not self._until:
            return
        key = _fingerprint(request)
        until = self._until.get(key)
        if until is None:
            return
        left = until - self._clock()
        if left <= 0:
            del self._until[key]
            return
        raise PoisonousRequestError(
            f"Replicas were lost while this request ran, so it is refused for {left:.0f} s more; change it, or report "
            "it to the operator of this server."
        )


def _fingerprint(request: ChoiceRequest) -> bytes:
    digest = blake2b(digest_size=16)
    for part in (request.model.encode(), request.tenant_salt):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(array("I", request.prompt_token_ids))
    return digest.digest()
