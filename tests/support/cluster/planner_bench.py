"""The planner over a small world: what it orders happens at once, unless the test says otherwise."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace_cluster.core.actions import (
    Action,
    CreateRanks,
    DrainBuild,
    EndBuild,
    PlaceBuild,
    Seen,
    SendSecret,
    SetRole,
)
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.planner import Planner
from headrace_cluster.core.rank_config import RankReport, Stage
from headrace_cluster.core.replica_build import Build, State
from headrace_cluster.core.router_reports import RouterReports
from headrace_cluster.core.wanted import wanted_replicas
from headrace_cluster.core.words import Roll, Words
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_worker.core.config import ReplicaStarted

OURS = (b"our secret",)
STEP = 0.5


def digest(replica_id: str, model: ModelSpec, roll: int) -> bytes:
    """Differs with the revision, the shape and the roll."""
    return f"{replica_id} {model.revision} {model.tp} {roll}".encode()


def started(address: str = "127.0.0.1:1") -> ReplicaStarted:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    others: dict[str, Any] = {"boot_id": b"", "device": "cpu", "dtype": "float32", "notes": []}
    return ReplicaStarted(address=address, revision="", **numbers, **others)


class Bench:
    """Ray with `room` places for builds, its ranks, routers, and one controller's planner at a time."""

    def __init__(self, room: int = 100, **model: Any) -> None:
        self.now = 0.0
        self.room = room
        self.words = Words()
        self.spec = self.parse(**model)
        self.groups: dict[ReplicaName, bool] = {}
        self.ranks: dict[tuple[ReplicaName, int], RankReport] = {}
        self.mute: set[ReplicaName] = set()  # their ranks do not reply, and they send no health messages
        self.unconnected: set[ReplicaName] = set()  # some router has no stream to them
        self.requests: dict[ReplicaName, int] = {}
        self.failing: dict[str, Any] = {}  # what the next starts report; empty: they succeed
        self.draining: dict[str, float] = {}  # nodes, and the time at which they end
        self.gcs_lost = False  # Ray's GCS does not answer
        self.router_words: list[dict[ReplicaName, bool]] = []
        self.done: list[Action] = []
        self.planner = self.control()

    @staticmethod
    def parse(**model: Any) -> ClusterSpec:
        return parse_spec({"models": [model or {"replicas": 1}]})

    def control(self) -> Planner:
        """A new controller, with the record of the last one."""
        self.router_reports = RouterReports()
        self.planner = Planner(self.spec.health, self.words, lambda: OURS, self.now, self.router_reports)
        self.want()
        self._observe()
        return self.planner

    def want(self, **model: Any) -> None:
        """The spec, or the words, have changed."""
        if model:
            self.spec = self.parse(**model)
        self.planner.wanted = wanted_replicas(self.spec, self.words, digest)

    def roll(self, replica_id: str, number: int = 1, *, allow_gap: bool = False) -> None:
        """An operator wants it to be built again."""
        self.words.rolls[replica_id] = Roll(number, 5.0, self.planner.wanted[replica_id].plain, allow_gap)
        self.want()

    def run(self, seconds: float = 5.0, until: Callable[[], bool] = lambda: False) -> list[Action]:
        """What was done meanwhile."""
        before, end = len(self.done), self.now + seconds
        while self.now < end and not until():
            self.now += STEP
            self._observe()
            for action in self.planner.actions(self.now):
                self.done.append(action)
                self._do(action)
        return self.done[before:]

    def ends(self, seconds: float) -> list[ReplicaName]:
        """The builds that were ended meanwhile."""
        return [action.name for action in self.run(seconds) if isinstance(action, EndBuild)]

    def build(self, replica_id: str = "smollm2-0") -> Build:
        found = self.planner.current(replica_id)
        assert found is not None
        return found

    @property
    def states(self) -> dict[ReplicaName, State]:
        return {name: build.state for name, build in self.planner.builds.items()}

    def kill(self, name: ReplicaName, rank: int = 0) -> None:
        """Ray reports it at once."""
        del self.ranks[name, rank]
        self.planner.rank_ended(name, rank, self.now)

    def add(self, name: ReplicaName, *, tp: int = 1, ranks: Iterable[int] | None = None, **report: Any) -> None:
        """A build of an earlier controller, ready unless `report` says otherwise."""
        self.groups[name] = True
        facts = {"stage": Stage.READY, "started": started(), "secrets": OURS, "tp": tp} | report
        wanted = self.planner.wanted.get(name.replica_id)
        for rank in range(tp) if ranks is None else ranks:
            self.ranks[name, rank] = _report(wanted.digest if wanted is not None else b"", **facts)

    def note(self, name: ReplicaName, only: int | None = None, **changes: Any) -> None:
        """One of its ranks, or all of them, report it."""
        for key in [key for key in self.ranks if key[0] == name and only in (None, key[1])]:
            self.ranks[key] = msgspec.structs.replace(self.ranks[key], **changes)

    def _observe(self) -> None:
        planner, now = self.planner, self.now
        for number, words in enumerate(self.router_words):
            self.router_reports.report(f"router-{number}", words, now)
        for name in self.groups:
            self.groups[name] = self.groups[name] or sum(self.groups.values()) < self.room
        left = {node: at - now for node, at in self.draining.items()}
        if not self.gcs_lost:
            planner.observe(Seen(dict(self.groups), set(self.ranks), left), now - STEP / 2, now)
        for (name, rank), report in self.ranks.items():
            if name in self.mute:
                continue
            planner.report(name, rank, report, now)
            if rank == 0 and report.started is not None and report.stage is not Stage.ENDED:
                state = State.DRAINING if report.stage is Stage.DRAINING else State.READY
                connected = name not in self.unconnected
                planner.health_received(name, state, 0.01, self.requests.get(name, 0), now, connected=connected)

    def _do(self, action: Action) -> None:
        build = self.planner.builds[action.name]
        if self.gcs_lost and isinstance(action, PlaceBuild | CreateRanks | EndBuild):
            return  # the call fails
        match action:
            case PlaceBuild(name):
                self.groups[name] = sum(self.groups.values()) < self.room
                build.requested = True
            case CreateRanks(name, model, role, wanted):
                for rank in range(model.ranks):
                    node = "here" if not self.draining else "elsewhere"
                    self.ranks[name, rank] = _report(wanted, tp=model.tp, pp=model.pp, role=str(role), node=node)
                build.filled = True
            case SendSecret(name, rank):
                report = msgspec.structs.replace(self.ranks[name, rank], secrets=OURS)
                if report.stage is Stage.WAITING:
                    up = {"stage": Stage.READY, "started": started()}
                    report = msgspec.structs.replace(report, **(self.failing or up))
                self.ranks[name, rank] = report
            case SetRole(name, role):
                self.note(name, role=str(role))
            case DrainBuild(name, seconds):
                self.note(name, stage=Stage.DRAINING, drain_seconds=seconds)
            case EndBuild(name):
                self.groups.pop(name, None)
                for key in [key for key in self.ranks if key[0] == name]:
                    del self.ranks[key]


def _report(wanted: bytes, **changes: Any) -> RankReport:
    facts: dict[str, Any] = {"pid": 7, "node": "here", "gpus": [], "secrets": (), "model": "smollm2"}
    return RankReport(digest=wanted, **(facts | {"tp": 1, "pp": 1, "role": "both"} | changes))
