"""The certificate of this router: renewed by the controller, or made from the secret file."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog

from headrace_proto.component import Certificate, CertificateIssuer
from headrace_proto.control_pb2 import RenewRequest
from headrace_proto.errors import HeadraceError
from headrace_proto.identity import Identity

RENEW_REPLY_SECONDS = 5.0
REFUSED_SECONDS = 30.0  # a controller that restarts, or reads a new secret, is consistent earlier
FIRST_PAUSE = 1.0  # between two checks
LAST_PAUSE = 15.0

log = structlog.get_logger("headrace.router.certificate")


class CertificateRefusedError(HeadraceError):
    """The cluster no longer accepts this router's certificate, and the router cannot get another one."""


class RouterCertificate:
    """Keeps an identity's certificate valid. For one event loop.

    The connections that are open need no valid certificate: a router ends only when none to a replica is left.
    """

    def __init__(
        self,
        identity: Identity,
        issue: CertificateIssuer | None = None,
        on_renewal: Callable[[bytes], None] = lambda tenant_key: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """issue: None for a router without the secret.

        on_renewal: called when the identity has another certificate, and with the tenant key, if any.
        """
        self.identity = identity
        self._issue = issue
        self._on_renewal = on_renewal
        self._clock = clock
        self._refusal = ""
        self._refused_since: float | None = None

    @property
    def refusal(self) -> str:
        """Why the cluster accepts no new connection of this router; empty when it does."""
        return "the certificate has expired" if self.identity.expired else self._refusal

    def accepted(self) -> None:
        """The controller has accepted the certificate, and this router that of the controller."""
        self._refusal = ""

    def refused(self, reason: str) -> None:
        """The controller and this router do not accept each other's certificates."""
        self._refusal = reason

    def connection_failed(self, details: str) -> None:
        """A connection to the controller failed. details: those of gRPC, which has no other form for the reason."""
        if "CERTIFICATE_VERIFY_FAILED" in details:
            self.refused("the controller's certificate is of another secret")

    async def renew_if_due(self, stub: Any, authorities: Sequence[bytes]) -> None:
        """authorities: fingerprints of those that are valid now.

        Raises AioRpcError.
        """
        if self.identity.is_due(authorities):
            try:
                reply = await stub.Renew(
                    RenewRequest(certificate_request=self.identity.request), timeout=RENEW_REPLY_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self.refused(error.details() or "the certificate is not valid")
                raise
            made = Certificate(reply.chain, reply.trust, tuple(reply.authorities), reply.renew_seconds)
            self._install(made, reply.tenant_key)
        self.accepted()

    async def run_until_refused(self, has_replica: Callable[[], bool]) -> None:
        """Makes or awaits another certificate when this one is refused, until cancelled.

        has_replica: whether a connection to any replica is open.
        Raises CertificateRefusedError when the certificate was refused for a while, and no connection is left.
        """
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            if not self.refusal:
                self._refused_since, pause = None, FIRST_PAUSE
                continue
            if self._refused_since is None:
                self._refused_since = self._clock()
                log.warning("this router gets no new connection in its cluster", reason=self.refusal)
            await self._issue_another()
            if self.refusal and not has_replica() and self._clock() - self._refused_since >= REFUSED_SECONDS:
                raise CertificateRefusedError(
                    f"this router is no longer a member of its cluster: {self.refusal}; start it with new credentials "
                    "of `headrace credentials`, or with the file of the cluster's present secret"
                )
            pause = min(2 * pause, LAST_PAUSE)

    async def _issue_another(self) -> None:
        if self._issue is None:
            return
        try:
            self._install(await asyncio.to_thread(self._issue, self.identity.request))
        except HeadraceError as error:
            log.warning("no certificate can be made from the secret file", reason=str(error))

    def _install(self, certificate: Certificate, tenant_key: bytes = b"") -> None:
        self.identity.install(certificate)
        self._on_renewal(tenant_key)
        log.info("this router has another certificate")
