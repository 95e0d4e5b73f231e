"""Credentials and certificates of routers, made from the cluster's secrets."""

from collections.abc import Callable

from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_proto.component import Certificate, Component
from headrace_proto.identity import Identity
from headrace_router.config import new_router_id
from headrace_router.credentials import RouterCredentials


def issue_credentials(authority: ClusterAuthority, name: str) -> RouterCredentials:
    """Of a router with this id: a key of its own, and a certificate for it."""
    identity = Identity()
    identity.install(authority.certify(identity.request, Component.ROUTER, name))
    return RouterCredentials(identity.save(), authority.tenant_key)


def new_credentials(secrets: ClusterSecrets) -> RouterCredentials:
    """Of another router, with an id and a key of its own."""
    return issue_credentials(ClusterAuthority(secrets.current), new_router_id())


def issuer(secrets: ClusterSecrets, router_id: str) -> Callable[[bytes], Certificate]:
    """Makes a certificate of a router for a request, with the secrets that the file has then. Raises HeadraceError."""

    def issue(request: bytes) -> Certificate:
        secrets.reread()
        return ClusterAuthority(secrets.current).certify(request, Component.ROUTER, router_id)

    return issue
