"""Credentials and certificates of routers, made from the cluster's secrets."""

from secrets import token_hex

from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_proto.component import Certificate, CertificateIssuer, Component
from headrace_proto.identity import Identity
from headrace_router.credentials import RouterCredentials


def issue_credentials(authority: ClusterAuthority, name: str) -> RouterCredentials:
    """Of a router with this id: a key of its own, and a certificate for it."""
    identity = Identity()
    identity.install(authority.certify(identity.request, Component.ROUTER, name))
    return RouterCredentials(identity.save(), authority.tenant_key)


def new_credentials(secrets: ClusterSecrets) -> RouterCredentials:
    """Of another router, with an id and a key of its own: every start of a router is another one."""
    return issue_credentials(ClusterAuthority(secrets.current), f"router-{token_hex(8)}")


def issuer(secrets: ClusterSecrets, router_id: str) -> CertificateIssuer:
    """Of certificates of a router, with the secrets that the file has at the time of each."""

    def issue(request: bytes) -> Certificate:
        secrets.reread()
        return ClusterAuthority(secrets.current).certify(request, Component.ROUTER, router_id)

    return issue
