"""Errors between the ranks of a replica."""

from headrace_base.errors import HeadraceError


class RankLostError(HeadraceError):
    """Another rank exited, stopped responding or failed; the sentence names it. The replica ends and is recreated."""


class RendezvousError(HeadraceError):
    """The ranks of a replica could not connect to each other."""
