"""The role of a replica: a name in configs and commands, a number in messages."""

from headrace_proto import replica_pb2 as pb
from headrace_proto.errors import HeadraceError

_NUMBERS = {"both": pb.ROLE_BOTH, "prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class UnknownRoleError(HeadraceError):
    """The role's name is unknown."""


def role_number(name: str) -> pb.Role:
    """The role's number in messages. Raises UnknownRoleError."""
    if name not in _NUMBERS:
        raise UnknownRoleError(f"a role is prefill, decode or both, not {name!r}")
    return _NUMBERS[name]
