"""The result of a window of recorded steps, or why there is none. Sent from a rank to the command line."""

from msgspec import Struct

from headrace_base.errors import HeadraceError

DEFAULT_STEPS, MAX_STEPS = 20, 1000
DEFAULT_SECONDS, MAX_SECONDS = 10.0, 60.0


class Operator(Struct, frozen=True):
    """One operator's own time in a trace, without the operators that it called."""

    name: str
    calls: int
    milliseconds: float
    share: float  # share of all operators' time on the same side, 0..1
    on_device: bool  # a kernel or a copy on a GPU; else a call on the host


class ProfileReport(Struct, frozen=True):
    """The path and contents of a rank's trace."""

    path: str
    steps: int
    seconds: float  # from the first recorded step to the end of the last one
    operators: list[Operator]  # those that took most of the time, on the device and on the host
    note: str = ""  # why it has fewer steps than requested


class ProfileRefusedError(HeadraceError):
    """A profile was requested that cannot be made now."""


class ProfileFailedError(HeadraceError):
    """A profile was begun, and failed. The steps that it should have recorded are not affected."""


class ProfileFolderError(HeadraceError):
    """The folder for profiles cannot be written."""
