"""Errors of the control plane that a user can act on."""

from headrace_base.errors import HeadraceError


class SpecError(HeadraceError):
    """The cluster spec, a flag or an environment variable cannot be used."""


class PlacementError(HeadraceError):
    """The spec needs more resources than the Ray cluster has."""


class RayStartError(HeadraceError):
    """Ray did not start, or the Ray to join does not answer."""


class OpenRayError(HeadraceError):
    """The Ray to join needs no token, and the operator has not allowed that."""


class RayLostError(HeadraceError):
    """A process of our own Ray has ended, and with it every replica."""


class ReplicaFailedError(HeadraceError):
    """A replica could not start; the message comes from the replica."""


class ChildFailedError(HeadraceError):
    """The controller's or a router's process ended before it was up."""


class ControllerTakenError(HeadraceError):
    """Another process has taken over the cluster."""


class TakeOverError(HeadraceError):
    """Another controller acts, and this one's spec would end what that one's names."""


class AdoptionError(HeadraceError):
    """What runs in Ray cannot be taken over now; nothing of it was ended."""


class CertificateError(HeadraceError):
    """A client command does not accept the certificate of a server, or the server that of the client."""


class NotRunningError(HeadraceError):
    """No server answers at the address of a client command."""


class ServerError(HeadraceError):
    """The server answered with an error; the message is from the server."""


class AnswerCutError(ServerError):
    """The stream of an answer ended before the answer was complete."""


class ServerChoiceError(HeadraceError):
    """Several servers run, and the command selects none of them, or more than one."""


class ProfileError(HeadraceError):
    """No profile can be recorded; the message has the reason."""


class ExplainRefusedError(HeadraceError):
    """Accounts cannot be asked for now; the message has the reason."""


class UnknownRequestError(HeadraceError):
    """No router has an account of the request; the message has the reason."""


class RoleError(HeadraceError):
    """The role of a replica cannot be changed now; the message has the reason."""


class DrainError(HeadraceError):
    """A replica cannot be drained or undrained; the message has the reason."""


class ChangeError(HeadraceError):
    """The models of the cluster cannot be changed as requested; the message has the reason."""


class StateError(HeadraceError):
    """The folder that keeps keys and process ids cannot be used."""
