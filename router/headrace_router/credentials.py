"""What a router needs to be a member of its cluster."""

from typing import Self

import msgspec

from headrace_proto.authority import ClusterAuthority
from headrace_proto.identity import Identity
from headrace_proto.plane import Plane


class RouterCredentials(msgspec.Struct, frozen=True):
    """Secret: for a pipe to the router's process, or a private file."""

    identity: bytes  # a saved Identity
    tenant_key: bytes  # from which the tenants' salts are derived: the same for all routers

    @classmethod
    def issue(cls, authority: ClusterAuthority, name: str) -> Self:
        """For a new router."""
        identity = Identity()
        identity.install(authority.certify(identity.request, Plane.ROUTER, name))
        return cls(identity.save(), authority.tenant_key)

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Raises msgspec.ValidationError."""
        return msgspec.msgpack.decode(encoded, type=cls)

    def encode(self) -> bytes:
        """The inverse of `decode`."""
        return msgspec.msgpack.encode(self)
