"""Changes of the cluster at given times: faults, and replicas that are added or drained."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.virtual_time import VirtualTime

SLOW_FACTOR = 3.0  # if the text has none


class ChangedReplica(Protocol):
    """A replica of the cluster."""

    def kill(self) -> None:
        """Its process ends."""

    def slow_down(self, factor: float) -> None:
        """From its next step on."""


class ChangedCluster(Protocol):
    """The simulated cluster, as changes use it."""

    time: VirtualTime

    def alive(self, name: str) -> ChangedReplica | None:
        """The replica, or None while its process does not run."""

    def add_replica(self, like: str) -> str:
        """One more of the same model and role. Returns its name."""

    def drain(self, name: str) -> None:
        """It gets no new requests, and leaves when it has none."""

    def restart(self, name: str) -> None:
        """Its process has ended: another one starts."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The replica's process ends; a new one starts `seconds` later."""

    replica: str
    at: float  # seconds after the first arrival
    seconds: float

    def apply(self, cluster: ChangedCluster) -> None:
        """No-op while its process does not run."""
        if (replica := cluster.alive(self.replica)) is not None:
            replica.kill()
            cluster.time.after(self.seconds, lambda: cluster.restart(self.replica))


@dataclass(frozen=True, slots=True)
class Slow:
    """Its steps take `factor` times as long for `seconds`."""

    replica: str
    at: float
    seconds: float
    factor: float = SLOW_FACTOR

    def apply(self, cluster: ChangedCluster) -> None:
        """No-op while its process does not run."""
        if (replica := cluster.alive(self.replica)) is not None:
            replica.slow_down(self.factor)
            cluster.time.after(self.seconds, lambda: replica.slow_down(1.0))


@dataclass(frozen=True, slots=True)
class Add:
    """One more replica like this one."""

    replica: str
    at: float

    def apply(self, cluster: ChangedCluster) -> None:
        """No-op while the process of this one does not run."""
        if cluster.alive(self.replica) is not None:
            cluster.add_replica(self.replica)


@dataclass(frozen=True, slots=True)
class Drain:
    """It gets no new requests, and leaves when it has none."""

    replica: str
    at: float

    def apply(self, cluster: ChangedCluster) -> None:
        """No-op while its process does not run."""
        if cluster.alive(self.replica) is not None:
            cluster.drain(self.replica)


ClusterChange: TypeAlias = Kill | Slow | Add | Drain

_AT = r"([\w-]+)@([\d.]+)"
_FORMS: dict[str, tuple[str, Callable[..., ClusterChange]]] = {
    "kill": (rf"{_AT}\+([\d.]+)", Kill),
    "slow": (rf"{_AT}\+([\d.]+)(?:x([\d.]+))?", Slow),
    "add": (_AT, Add),
    "drain": (_AT, Drain),
}


def read_changes(text: str) -> list[ClusterChange]:
    """Such as `kill:m0-r1@60+20,slow:m0-r2@30+60x4`. Raises SimulationError."""
    return [_read(part) for part in text.split(",") if part]


def to_text(change: ClusterChange) -> str:
    """As `read_changes` reads it."""
    text = f"{type(change).__name__.lower()}:{change.replica}@{change.at:g}"
    if isinstance(change, Kill | Slow):
        text += f"+{change.seconds:g}"
    return text + (f"x{change.factor:g}" if isinstance(change, Slow) else "")


def _read(text: str) -> ClusterChange:
    kind, _, rest = text.partition(":")
    form, change = _FORMS.get(kind, ("", None))
    found = re.fullmatch(form, rest)
    if found is None or change is None:
        raise SimulationError(
            f"'{text}' is no fault; write kill:REPLICA@SECONDS+SECONDS, slow:REPLICA@SECONDS+SECONDSxFACTOR, "
            "add:REPLICA@SECONDS or drain:REPLICA@SECONDS, as in kill:m0-r1@60+20,slow:m0-r2@30+60x4,add:m0-r0@90."
        )
    replica, *numbers = found.groups()
    try:
        read = change(replica, *(float(number) for number in numbers if number is not None))
    except ValueError:
        raise SimulationError(f"'{text}' has a number that cannot be read; write seconds as 60 or 0.5.") from None
    if isinstance(read, Slow) and read.factor <= 0:
        raise SimulationError(f"'{text}' makes steps take no time; the factor is above 0, as in x4.")
    return read
