"""Members of one cluster for tests: its authority, and identities of every component."""

from collections.abc import Sequence
from functools import cache

from pydantic import SecretBytes

from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.router_credentials import issue_credentials
from headrace_proto.component import Component
from headrace_proto.identity import Identity

SECRET = b"the secret of every cluster in tests"


@cache
def authority(secrets: Sequence[bytes] = (SECRET,)) -> ClusterAuthority:
    """The authority of a cluster with these secrets."""
    return ClusterAuthority(secrets)


def member(component: Component, of: ClusterAuthority | None = None, name: str = "a member") -> Identity:
    """A new process of a cluster."""
    identity = Identity()
    identity.install((of or authority()).certify(identity.request, component, name))
    return identity


@cache
def replica() -> Identity:
    """A replica of the cluster, the same one in every call."""
    return member(Component.REPLICA)


@cache
def controller() -> Identity:
    """The controller of the cluster."""
    return member(Component.CONTROLLER)


@cache
def router() -> Identity:
    """A router of the cluster, the same one in every call."""
    return member(Component.ROUTER, name="r-1")


@cache
def router_credentials(name: str = "a router") -> SecretBytes:
    """For `RouterConfig`."""
    return SecretBytes(issue_credentials(authority(), name).encode())
