"""The cluster's authority in its controller, and the controller's own certificate."""

import asyncio
from collections.abc import Callable

import msgspec

from headrace_cluster.core.view import ControllerSecrets
from headrace_cluster.local.authority import ClusterAuthority
from headrace_proto.component import Component
from headrace_proto.identity import Identity

DUE_SECONDS = 600.0  # between two looks at the age of the certificates


class ControllerCertificates:
    """The authority of the secrets that are valid now, which has certified this process. For one event loop."""

    def __init__(self, identity: Identity, cluster: str, sealed: bytes) -> None:
        """sealed: ControllerSecrets for `identity`, which gets its certificate. Raises SealedMessageError."""
        self._identity = identity
        self._cluster = cluster
        self._secrets, self._authority = self._open(sealed)
        self._certify()

    @property
    def admin_key(self) -> str:
        return self._secrets.admin_key

    def authority(self) -> ClusterAuthority:
        """The one that signs now."""
        return self._authority

    def replace(self, sealed: bytes) -> None:
        """As at the start, after the secrets have changed. Raises SealedMessageError."""
        self._secrets, self._authority = self._open(sealed)
        self._certify()

    async def keep(self, on_renewal: Callable[[], None]) -> None:
        """Renews this process's certificate in time, until cancelled. on_renewal: replicas need others then, too."""
        while True:
            await asyncio.sleep(DUE_SECONDS)
            if self._identity.is_due(self._authority.fingerprints):
                self._certify()
                on_renewal()

    def _open(self, sealed: bytes) -> tuple[ControllerSecrets, ClusterAuthority]:
        unsealed = msgspec.msgpack.decode(self._identity.unseal(sealed), type=ControllerSecrets)
        return unsealed, ClusterAuthority(unsealed.secrets)

    def _certify(self) -> None:
        self._identity.install(self._authority.certify(self._identity.request, Component.CONTROLLER, self._cluster))
