"""Which replicas routers receive from, what silence means, and which routers are cut off. Pure."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.replica_build import Build

FRESH_SECONDS = 3.0  # that a router's report counts; it sends the next one earlier


class Silence(Enum):
    """Why the controller receives nothing from a replica."""

    LOST = "the replica is silent"
    RECEIVED = "routers receive from it: the path to the controller is broken"
    ALL_SILENT = "neither the controller nor any router receives from any replica"
    UNKNOWN = "no router reports it: the controller may be cut off"


class RouterReports:
    """The newest report of each router. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Mapping[ReplicaName, bool]]] = {}

    def report(self, router_id: str, received: Mapping[ReplicaName, bool], now: float) -> None:
        """Replaces the last report of this router. received: whether it receives from each replica on its list."""
        self._reports = {key: entry for key, entry in self._reports.items() if now - entry[0] <= FRESH_SECONDS}
        self._reports[router_id] = now, received

    def receiving(self, now: float) -> set[str]:
        """The routers that receive from any replica."""
        fresh = (entry for entry in self._reports.items() if now - entry[1][0] <= FRESH_SECONDS)
        return {router_id for router_id, (_, received) in fresh if any(received.values())}

    def received(self, now: float) -> set[ReplicaName]:
        """The builds that any router receives from."""
        fresh = (received for at, received in self._reports.values() if now - at <= FRESH_SECONDS)
        return {name for received in fresh for name, heard in received.items() if heard}

    def receives(self, name: ReplicaName, now: float) -> bool | None:
        """Whether any router receives from this build; None if no router has it on its list now."""
        fresh = (received for at, received in self._reports.values() if now - at <= FRESH_SECONDS)
        found = [received[name] for received in fresh if name in received]
        return any(found) if found else None


def judge_silence(up: Sequence[Build], router_reports: RouterReports, now: float) -> dict[ReplicaName, Silence]:
    """By build, for each in `up` that has been silent for too long.

    One that alone is silent, while one that was up with it sends messages, has failed. Otherwise the controller may be
    cut off, unless routers report the same. Routers that receive from no replica at all prove little: they may be cut
    off together with it.
    """
    silent = [build for build in up if now - build.last_health > build.silence_limit]
    heard_since = [build.up_since for build in up if now - build.last_health <= build.silence_limit]
    received = {build.name: router_reports.receives(build.name, now) for build in silent}
    many = len(silent) > 1 and 2 * len(silent) >= len(up)
    any_received = bool(heard_since) or any(received.values())

    def judge(build: Build) -> Silence:
        by_router = received[build.name]
        if by_router:
            return Silence.RECEIVED
        if by_router is not None:
            return Silence.LOST if any_received else Silence.ALL_SILENT
        # A build that came up later proves nothing: it may be on this side of a cut.
        witnessed = any(since <= build.last_health for since in heard_since)
        return Silence.LOST if witnessed and not many else Silence.UNKNOWN

    return {build.name: judge(build) for build in silent}


START_SECONDS = 5.0  # for a router that has just registered to connect and to report
WAIT_SECONDS = 40.0  # that changes wait for such a router; as long as one that was lost counts


class RouterReach:
    """Since when each registered router receives from no replica. Times are seconds of the caller's clock.

    While no router receives from any replica, all count: the controller cannot judge which of them are cut off.
    """

    def __init__(self, router_reports: RouterReports) -> None:
        self._router_reports = router_reports
        self._since: dict[str, float] = {}

    def look(self, registered: Collection[str], now: float) -> None:
        """Compares the registered routers; to be called several times a minute."""
        receiving = self._router_reports.receiving(now)
        if not receiving:
            self._since = {}  # or one whose next report comes last would count as unreached all that time
            return
        self._since = {router: self._since.get(router, now) for router in registered if router not in receiving}

    def unreached(self, now: float) -> dict[str, float]:
        """Seconds for which each router has received from no replica; empty while no router does."""
        if not self._router_reports.receiving(now):
            return {}
        return {router: now - at for router, at in self._since.items()}
