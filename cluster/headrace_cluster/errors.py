"""Errors of the control plane that a user can do something about."""

from headrace_proto.errors import HeadraceError


class SpecError(HeadraceError):
    """The cluster spec, a flag or an environment variable cannot be used."""


class PlacementError(HeadraceError):
    """The Ray cluster cannot hold what the spec asks for."""


class RayStartError(HeadraceError):
    """Ray did not start, or the one to join does not answer."""


class ClusterExistsError(HeadraceError):
    """A cluster of this name runs already."""


class ReplicaFailedError(HeadraceError):
    """A replica could not start; the sentence is its own."""


class ControllerLostError(HeadraceError):
    """The controller's process ended, or does not answer."""


class ControllerFailedError(HeadraceError):
    """The controller ends again and again."""


class RouterFailedError(HeadraceError):
    """The router process ended."""


class NotRunningError(HeadraceError):
    """No server answers where a client command looks for one."""


class ProfileError(HeadraceError):
    """No profile can be made; the sentence says why."""


class RoleError(HeadraceError):
    """A replica cannot have another role now; the sentence says why."""


class DrainError(HeadraceError):
    """A replica cannot be drained or brought back; the sentence says why."""


class StateError(HeadraceError):
    """The folder that keeps keys and process ids cannot be used."""
