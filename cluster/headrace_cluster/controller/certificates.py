"""The cluster's authority in its controller, and the controller's own certificate."""

import asyncio
from collections.abc import Callable

import structlog

from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_proto.component import Component
from headrace_proto.errors import HeadraceError
from headrace_proto.identity import Identity

REREAD_SECONDS = 2.0  # between two looks at the secret file and at the age of the certificates

log = structlog.get_logger(__name__)


class ControllerCertificates:
    """The authority of the secrets that are valid now, which has certified this process. For one event loop."""

    def __init__(self, identity: Identity, cluster: str, secrets: ClusterSecrets) -> None:
        """identity: gets its certificate."""
        self._identity = identity
        self._cluster = cluster
        self._secrets = secrets
        self._authority = ClusterAuthority(secrets.current)
        self._problem = ""
        self._certify()

    def authority(self) -> ClusterAuthority:
        """The one that signs now."""
        return self._authority

    async def keep(self, on_renewal: Callable[[], None]) -> None:
        """Follows the secret file, and renews this process's certificate in time, until cancelled.

        on_renewal: replicas need other certificates then, too.
        """
        while True:
            await asyncio.sleep(REREAD_SECONDS)
            changed = await asyncio.to_thread(self._reread)
            if changed:
                self._authority = ClusterAuthority(self._secrets.current)
                log.info("the secret file has changed: every process gets another certificate")
            if changed or self._identity.is_due(self._authority.fingerprints):
                self._certify()
                on_renewal()

    def _reread(self) -> bool:
        problem = ""
        changed = False
        try:
            changed = self._secrets.reread()
        except HeadraceError as error:
            problem = str(error)
        if problem and problem != self._problem:
            log.warning(f"{problem}; the secrets from before stay valid")
        self._problem = problem
        return changed

    def _certify(self) -> None:
        self._identity.install(self._authority.certify(self._identity.request, Component.CONTROLLER, self._cluster))
