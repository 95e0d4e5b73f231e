"""The errors of simulations."""

from headrace_proto.errors import HeadraceError


class SimulationError(HeadraceError):
    """What was requested cannot be simulated."""


class TraceError(SimulationError):
    """A trace cannot be read."""
