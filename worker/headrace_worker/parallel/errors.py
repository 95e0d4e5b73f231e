"""What can go wrong between the ranks of a replica."""

from headrace_proto.errors import HeadraceError


class RankLostError(HeadraceError):
    """Another rank ended, went silent or failed; the sentence names it. The replica ends and is built anew."""


class MeetingError(HeadraceError):
    """The ranks of a replica could not find each other."""
