"""The interface between the controller and a backend that runs ranks: Ray in production, fakes in tests."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport
from headrace_cluster.core.record import DesiredReplica
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.errors import HeadraceError
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaStarted

STOP_SECONDS = 5.0
ROLE_SECONDS = 5.0  # for a rank to confirm its role
NOTE_SECONDS = 2.0  # without a place, until the reason is shown
PLACE_POLL_SECONDS = 0.1
LATE_POLL_SECONDS = 1.0  # once a replica waits for a place: many may do so
REPORT_SECONDS = 15.0  # for a rank to report: it replies from a thread beside its step loop, on a machine that is busy


class StartFailedError(HeadraceError):
    """A replica did not become ready.

    `final`: a retry would fail the same way. `secondary`: another rank has the cause. `lacks_resources`: out of memory.
    """

    def __init__(self, sentence: str, *, final: bool, secondary: bool = False, lacks_resources: bool = False) -> None:
        super().__init__(sentence)
        self.final = final
        self.secondary = secondary
        self.lacks_resources = lacks_resources


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Where one rank runs."""

    rank: int
    pid: int
    node: str
    device: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the slowest rank: a sentence and 0..1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class AdoptedBuild:
    """A build that is up and was started by an earlier controller."""

    name: ReplicaName
    ranks: list[RankFacts]
    started: ReplicaStarted
    role: Role
    draining: bool
    held: bool | None = None  # if it drains: an operator drained it; none: it does not say
    model: str = ""
    tp: int = 1
    pp: int = 1
    same: bool = True  # as the spec describes it now; otherwise it is replaced in order, while it serves
    role_number: int | None = None  # of the decision about its role; none: it does not say
    leaving: bool = False  # a newer build, adopted too, has taken over from it: it drains
    reports: Sequence[RankReport] = ()  # of its ranks in order, for the next controller


@dataclass(frozen=True, slots=True)
class AdoptedState:
    """What is taken over from an earlier controller; of two builds of a replica, the current one comes first."""

    builds: list[AdoptedBuild] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)  # the newest found of each replica, up or not
    silent: list[ReplicaName] = field(default_factory=list)  # not adopted and not ended: they may be up
    starting: list[ReplicaName] = field(default_factory=list)  # all ranks are there, and become ready by themselves
    problems: list[str] = field(default_factory=list)  # builds that are up and neither adopted nor ended, and why


class ReplicaDriver(Protocol):
    """Builds, watches and ends replicas by name. Every method may be called while others are pending."""

    async def launch(
        self,
        name: ReplicaName,
        model: ModelSpec,
        role: Role,
        on_wait: Callable[[str], None],
        seconds: float | None = None,
    ) -> list[RankFacts]:
        """Places the ranks once there are free resources, and creates their processes.

        on_wait: called with the reason while there is no place, and with an empty string when there is one. seconds:
        to wait for it; None: without end. Raises PlacementError, StartFailedError.
        """
        ...

    async def adopt(self, replicas: Iterable[DesiredReplica], snapshot: ControllerSnapshot | None) -> AdoptedState:
        """Takes over from an earlier controller: of each replica the newest build that is up, in the spec or not, or
        one that starts.

        Ranks that do not reply are taken as the snapshot has them. Everything else of this cluster is ended by name,
        except builds that may be up. Called before anything is launched. Raises AdoptionError, and ends nothing, when
        the ranks cannot be judged now.
        """
        ...

    async def report(self, name: ReplicaName) -> AdoptedBuild | None:
        """What the ranks of a build report now; None when it is not up.

        Raises AdoptionError when one does not reply: the call is to be repeated.
        """
        ...

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """Returns once the replica is ready to serve, which its ranks become by themselves. Raises StartFailedError."""
        ...

    async def send_secret(self, name: ReplicaName) -> None:
        """Gives a replica that is up the values that are valid now. Raises when it does not reply: to be repeated."""
        ...

    async def progress(self, name: ReplicaName) -> Progress | None:
        """Progress of `start`; None when it is unknown."""
        ...

    async def wait_for_death(self, name: ReplicaName) -> str:
        """Returns when the first rank of a started replica ends, with the cause in a sentence."""
        ...

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        """Records the next steps of every rank; returns the outcomes in rank order. Never raises."""
        ...

    async def set_role(self, name: ReplicaName, role: Role, number: int) -> None:
        """Sends a replica its new role; its requests are not affected. Raises RoleError when it does not reply.

        number: of the decision. A call without a reply may arrive later; the replica ignores it after a newer one.
        """
        ...

    async def drain(self, name: ReplicaName, *, held: bool) -> None:
        """Stops a replica from accepting requests; requests in flight continue. Never raises.

        held: an operator drains it, and it stays down; its ranks report this to the next controller.
        """
        ...

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        """Ends all ranks, gracefully if they stop within `seconds`, and releases their resources.

        Idempotent. Raises when the backend does not answer: something may be left, and the call is to be repeated.
        """
        ...
