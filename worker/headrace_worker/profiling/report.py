"""What a window of recorded steps brought. Plain data: it goes from a rank to the command line."""

from msgspec import Struct

DEFAULT_STEPS, MOST_STEPS = 20, 1000
DEFAULT_SECONDS, MOST_SECONDS = 10.0, 60.0


class Operator(Struct, frozen=True):
    """One operator's own time in a trace, what it called left out."""

    name: str
    calls: int
    milliseconds: float
    share: float  # of all operators' time on the same side, 0..1
    on_device: bool  # a kernel or a copy on a GPU; else a call on the host


class ProfileReport(Struct, frozen=True):
    """Where a rank's trace lies and what is in it."""

    path: str
    steps: int
    seconds: float  # from the first recorded step to the end of the last one
    operators: list[Operator]  # those that took most of the time, by side
    note: str = ""  # why it holds less than was asked for
