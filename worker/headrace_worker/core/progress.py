"""How the start of a replica reports its progress."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of the phase, and the fraction of it that is done, 0..1."""


def ignore_progress(phase: str, fraction: float) -> None:
    """For a start whose progress is not shown."""
