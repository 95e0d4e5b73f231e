"""Which replicas routers receive from, and what silence towards the controller means. Pure."""

from collections.abc import Mapping, Sequence
from enum import Enum

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import Record

FRESH_SECONDS = 3.0  # that a router's report counts; it sends the next one earlier


class Silence(Enum):
    """Why the controller does not hear a replica."""

    LOST = "the replica is silent"
    HEARD = "routers hear it: the path to the controller is broken"
    ALL_SILENT = "neither the controller nor any router hears any replica"
    UNKNOWN = "many are silent at once, and no router reports it: the controller may be cut off"


class RouterReports:
    """The newest report of each router. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Mapping[ReplicaName, bool]]] = {}

    def report(self, router_id: str, heard: Mapping[ReplicaName, bool], now: float) -> None:
        """Replaces the last report of this router. heard: every replica that it is connected to, or should be."""
        self._reports = {key: entry for key, entry in self._reports.items() if now - entry[0] <= FRESH_SECONDS}
        self._reports[router_id] = now, heard

    def hears(self, name: ReplicaName, now: float) -> bool | None:
        """Whether any router hears this build; None if no router knows it now."""
        fresh = (heard for at, heard in self._reports.values() if now - at <= FRESH_SECONDS)
        words = [heard[name] for heard in fresh if name in heard]
        return any(words) if words else None


def judge_silence(up: Sequence[Record], router_reports: RouterReports, now: float) -> dict[str, Silence]:
    """By replica id, of those in `up` that have been silent for too long.

    One that alone is silent has failed. When many are silent at once it is the controller that does not hear, unless
    routers agree. Routers that hear no replica at all prove little: they may be cut off together with it.
    """
    silent = [record for record in up if now - record.last_health > record.silence_limit]
    words = {record.replica_id: router_reports.hears(record.name, now) for record in silent}
    many = len(silent) > 1 and 2 * len(silent) >= len(up)
    hears_any = len(silent) < len(up) or any(words.values())

    def judge(heard: bool | None) -> Silence:
        if heard:
            return Silence.HEARD
        if not many or (heard is False and hears_any):
            return Silence.LOST
        return Silence.UNKNOWN if heard is None else Silence.ALL_SILENT

    return {replica_id: judge(heard) for replica_id, heard in words.items()}
