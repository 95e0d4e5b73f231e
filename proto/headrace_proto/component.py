"""The components of a cluster, and the certificate that makes a process a member of one."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

_DOMAIN = "headrace.internal"


class Component(StrEnum):
    """What a process is in its cluster. Each has a name of its own in certificates."""

    CONTROLLER = "controller"
    ROUTER = "router"
    REPLICA = "replica"

    @property
    def dns_name(self) -> str:
        """The name that is verified; it is never resolved."""
        return f"{self.value}.{_DOMAIN}"


class Certificate(msgspec.Struct, frozen=True):
    """What the authority returns to a member. Nothing in it is secret."""

    chain: str  # PEM
    trust: str  # PEM of the authorities that are trusted
    authorities: tuple[bytes, ...]  # their fingerprints; the first one signed
    renew_seconds: float  # until the next renewal, from its issue


# Makes a certificate for a request, in any thread. Raises HeadraceError.
CertificateIssuer = Callable[[bytes], Certificate]
