"""The errors of simulations."""

from headrace_base.errors import HeadraceError


class SimulationError(HeadraceError):
    """What was requested cannot be simulated."""


class TraceError(SimulationError):
    """A trace cannot be read."""
