"""A router: production's fleet, index, placement and choice runs, in virtual time."""

from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any

from headrace_cluster.simulator.replayed_request import ReplayedRequest
from headrace_cluster.simulator.trace import TraceRequest, token_ids
from headrace_cluster.simulator.trace_link import TraceLink
from headrace_cluster.simulator.trace_replica import TraceReplica
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import Sampling
from headrace_router.core.choice_run import ChoiceRun
from headrace_router.core.fleet import Fleet
from headrace_router.core.placement import FleetPlacement, Placed
from headrace_router.core.policy import Policy
from headrace_router.core.policy.interface import ChoiceRequest, Mode
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.retry import RetryState

MAINTENANCE_SECONDS = 0.1  # as production's server


class VirtualTimers:
    """Timers of a choice run."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def now(self) -> float:
        return self._time.now

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self._time.after(0.0, call).cancel

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        return self._time.after(seconds, call).cancel


class _SyncedPlacement(FleetPlacement[str]):
    """Reads the replicas as they are now."""

    def __init__(self, fleet: Fleet[str], policy: Policy, sync: Callable[[], None], **options: Any) -> None:
        """sync: applies what has arrived from the replicas."""
        super().__init__(fleet, policy, **options)
        self._sync = sync

    def place(self, *given: Any, **options: Any) -> Placed[str] | None:
        self._sync()
        return super().place(*given, **options)


class TraceRouter:
    """Has a link to each replica."""

    def __init__(
        self,
        time: VirtualTime,
        policy: Policy,
        replica: Callable[[str], TraceReplica | None],
        random: Random,
        *,
        network: float,
        index_blocks: int,
        disaggregation: Mode,
    ) -> None:
        """replica: by address. index_blocks: that the prefix index has places for."""
        self.decision_seconds: list[float] = []  # seconds of this machine's time for each decision
        self._time = time
        self._random = random
        self._timers = VirtualTimers(time)
        self._links: list[TraceLink] = []
        index = PrefixIndex(index_blocks) if policy.uses_cache else None

        def open_link(member: Member) -> TraceLink:
            link = TraceLink(time, member, replica, network, lambda: random.randbytes(16), index)
            self._links.append(link)
            return link

        self.fleet: Fleet[str] = Fleet(open_link, 0, clock=time.clock, jitter=random.random, index=index)
        self.placement = _SyncedPlacement(
            self.fleet, policy, self._sync, clock=time.clock, disaggregation=disaggregation
        )
        time.after(MAINTENANCE_SECONDS, self._maintain)

    def update(self, members: Sequence[Member]) -> None:
        """As the controller lists them."""
        self.fleet.update(MemberList(members=members))

    def arrive(
        self, number: int, model: str, revision: str, traced: TraceRequest, block: int, request: ReplayedRequest
    ) -> None:
        """A client's request: its prompt is hashed, as production does beside the tokenizer, and placed."""
        self._sync()
        tokens = token_ids(traced, block)
        schemes = self.placement.schemes(model, revision)
        choice = ChoiceRequest(
            label=str(number),
            model=model,
            revision=revision,
            tenant_salt=b"",
            prompt_token_ids=tokens,
            sampling=Sampling(max_tokens=traced.output_tokens, ignore_eos=True),
            blocks={scheme: scheme.blocks(b"", tokens) for scheme in schemes},
            session=traced.session,
        )
        retry: RetryState[ReplicaState[str]] = RetryState(model, 3, 3, 30.0, self._random.random)
        run = ChoiceRun(choice, request, self.placement, retry, self._timers, (request.recorder, request))
        began = perf_counter()
        run.begin()
        self.decision_seconds.append(perf_counter() - began)

    def _sync(self) -> None:
        for link in self._links:
            link.sync()

    def _maintain(self) -> None:
        self._sync()
        self.fleet.maintain()
        self.fleet.rebalance(self._time.now)
        self._time.after(MAINTENANCE_SECONDS, self._maintain)
