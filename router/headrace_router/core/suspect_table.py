"""Requests that are tried alone, then refused for a while, since replicas were lost with them: pure, bounded."""

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from headrace_proto.quantities import counted
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import PoisonousRequestError
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.suspect import Suspect

SUSPECT_SECONDS = 600.0  # since the last loss
MAX_FINGERPRINTS = 8192  # the oldest ones are dropped


class SuspectTable:
    """Suspects by the fingerprint of the request: of its model, tenant and prompt. Of one router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspects: dict[bytes, Suspect] = {}  # the one with the oldest last loss first

    def __len__(self) -> int:
        return len(self._suspects)

    def find(self, fingerprint: bytes) -> Suspect | None:
        """The suspect, if any of its losses still counts."""
        self._remove_expired()
        suspect = self._suspects.get(fingerprint)
        if suspect is not None:
            suspect.take_back_losses()
            if not suspect.losses:
                del self._suspects[fingerprint]
                return None
        return suspect

    def add(
        self, fingerprint: bytes, replica: ReplicaState[Any], choice: object, output_tokens: int, *, alone: bool
    ) -> None:
        """The replica was lost while the choice ran there, and had so many tokens."""
        suspect = self.find(fingerprint) or Suspect()
        suspect.add(replica, choice, output_tokens, alone=alone)
        suspect.until = self._clock() + SUSPECT_SECONDS
        self._suspects.pop(fingerprint, None)
        self._suspects[fingerprint] = suspect
        while len(self._suspects) > MAX_FINGERPRINTS:
            del self._suspects[next(iter(self._suspects))]

    def check(self, fingerprint: bytes) -> None:
        """Raises PoisonousRequestError if the request is refused now."""
        suspect = self.find(fingerprint)
        if suspect is not None and suspect.refused:
            raise PoisonousRequestError(
                f"{counted(suspect.losses, 'replica')} were lost while this request ran, so it is refused for "
                f"{suspect.until - self._clock():.0f} s more; change it, or report it to the operator of this server."
            )

    def _remove_expired(self) -> None:
        now = self._clock()
        while self._suspects:
            fingerprint, oldest = next(iter(self._suspects.items()))
            if oldest.until > now:
                return
            del self._suspects[fingerprint]


def fingerprint(request: ChoiceRequest) -> bytes:
    """16 bytes, equal for requests with the same model, tenant and prompt."""
    digest = blake2b(digest_size=16)
    for part in (request.model.encode(), request.tenant_salt):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(array("I", request.prompt_token_ids))
    return digest.digest()
