"""What routers use a replica for: a name in configs and commands, a number in messages."""

from headrace_proto import replica_pb2 as pb
from headrace_proto.errors import HeadraceError

_NUMBERS = {"both": pb.ROLE_BOTH, "prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class UnknownRoleError(HeadraceError):
    """There is no such role."""


def role_number(name: str) -> pb.Role:
    """The role as messages carry it. Raises UnknownRoleError."""
    if name not in _NUMBERS:
        raise UnknownRoleError(f"a role is prefill, decode or both, not {name!r}")
    return _NUMBERS[name]
