"""The reports of a replica's load, in virtual time: `LoadReports` decides what routers are informed of, and when."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace_cluster.simulator.stretch import ReportedStretch, StretchStep
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto import replica_pb2 as pb
from headrace_worker.core.engine import LoadSnapshot
from headrace_worker.core.load_reports import EARLY_SECONDS, LoadReports, RouterReportPacer
from headrace_worker.server.convert import to_load, tokens_to_compute

IDLE_SECONDS = 0.25  # between the steps of a replica without work
REPORT_SECONDS = 0.02  # between two reports without tokens, as a router with up to 40 replicas requests


class RouterLink(Protocol):
    """A router's end of the stream."""

    def disconnected(self) -> None:
        """The stream has ended."""

    def send_to_router(self, frame: pb.ReplicaFrame) -> None:
        """Sent now."""

    def add_stretch(self, stretch: ReportedStretch) -> None:
        """Its steps follow."""

    def receive_cache(self, frame: pb.CacheFrame) -> None:
        """An event of the cache."""


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step as it is reported when it has ended."""

    step: int
    load: LoadSnapshot
    draining: bool = False
    accepted: int = 0  # requests of all routers that the load includes
    idle_steps: int = 0


class ReplicaReports:
    """To all connected routers."""

    def __init__(self, time: VirtualTime, first: EndedStep, advance: Callable[[], None]) -> None:
        """first: of the newest step. advance: reports the steps of a stretch that have ended by now."""
        self._time = time
        self._newest = first
        self._advance = advance
        self._reports = LoadReports(IDLE_SECONDS)
        self._routers: dict[RouterLink, RouterReportPacer] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def __contains__(self, link: object) -> bool:
        return link in self._routers

    @property
    def links(self) -> list[RouterLink]:
        return list(self._routers)

    def connect(self, link: RouterLink) -> pb.Load:
        """Returns what its first frame reports."""
        self._routers[link] = self._reports.connect(REPORT_SECONDS)
        return self._load()

    def disconnect(self, link: RouterLink) -> None:
        """No-op if it is not connected."""
        router = self._routers.pop(link, None)
        if router is not None:
            self._reports.disconnect(router)

    def received(self, link: RouterLink, submits: Iterable[pb.Submit]) -> None:
        """They wait for the engine's next step; other routers are informed."""
        for submit in submits:
            self._reports.received(self._routers[link], tokens_to_compute(submit))
        if submits and self._reports.begin_announcement():
            self._time.after(EARLY_SECONDS, self._announce)

    def stretch_frame(self, link: RouterLink) -> pb.ReplicaFrame:
        """A stretch begins: what the frames of its steps have in common."""
        return pb.ReplicaFrame(load=self._load(), submits=self._routers[link].submits)

    def ended(self, report: EndedStep, frames: Mapping[RouterLink, pb.ReplicaFrame]) -> None:
        """A step has ended now. frames: with tokens; the other routers get a report if it is due."""
        self._newest = report
        self._reports.accepted(report.accepted)
        for link in self._routers:
            self._report(link, frames.get(link))

    def stretch_step_ended(
        self, report: EndedStep, step: StretchStep, stretches: Mapping[RouterLink, ReportedStretch], count: int
    ) -> None:
        """A step of a stretch has ended, perhaps some time ago. count: of its steps until then."""
        self._newest = report
        for link, stretch in stretches.items():
            router = self._routers[link]
            state = self._reports.state(router, report.load, draining=report.draining)
            if stretch.attempts or router.pacer.due(state, step.end):
                router.pacer.sent(state, step.end)
                stretch.steps.append((step, count))

    def _announce(self) -> None:
        self._advance()
        informed = self._reports.announcement()
        for link, router in self._routers.items():
            if router in informed:
                self._report(link, None)

    def _report(self, link: RouterLink, frame: pb.ReplicaFrame | None) -> None:
        """frame: with tokens; None = one is sent if it is due."""
        newest, router, now = self._newest, self._routers[link], self._time.now
        state = self._reports.state(router, newest.load, draining=newest.draining)
        if frame is None and not router.pacer.due(state, now):
            return
        router.pacer.sent(state, now)
        frame = pb.ReplicaFrame() if frame is None else frame
        frame.step, frame.submits = newest.step, router.submits
        frame.load.CopyFrom(self._load())
        link.send_to_router(frame)

    def _load(self) -> pb.Load:
        newest = self._newest
        return to_load(newest.load, newest.step, newest.draining, newest.idle_steps, self._reports.arrivals)
