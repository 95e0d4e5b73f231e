"""One run: a trace through routers and replicas, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from random import Random

from headrace_cluster.simulator.cluster_change import ClusterChange
from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.latency_model import LatencyModel
from headrace_cluster.simulator.policies import new_policy
from headrace_cluster.simulator.replayed_request import ReplayedRequest
from headrace_cluster.simulator.replica_shape import REVISION, ReplicaShape, member
from headrace_cluster.simulator.trace import Trace
from headrace_cluster.simulator.trace_replica import TraceReplica
from headrace_cluster.simulator.trace_router import TraceRouter
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto.replica_pb2 import ROLE_BOTH, ROLE_DECODE, ROLE_PREFILL, Role
from headrace_router.core.policy.interface import Mode

DEFAULT_CACHE_TOKENS = 800_000  # a replica's cache: about what an H200 has beside 8 billion parameters in bfloat16
DRAIN_SECONDS = 0.5  # between two looks at a replica that drains
WARM_UP_SECONDS = 1.0  # before the first request: replicas are connected and have reported


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated, besides the trace."""

    latency: LatencyModel
    policy: str = "predicted"
    replicas: int = 8  # that do both
    prefill: int = 0
    decode: int = 0
    routers: int = 1
    models: int = 1  # each with the same number of replicas; requests take turns
    cache_blocks: int = 0  # blocks of each replica's cache; 0 = what the latency model's machine has
    block_size: int = 0  # tokens; 0 = the trace's
    disaggregation: Mode = "shared"
    noise: float = 0.03  # standard deviation of a step's time
    spread: float = 0.0  # replicas differ in speed by up to this share
    network: float = 0.0003  # seconds of a message
    seed: int = 0
    changes: Sequence[ClusterChange] = ()
    skip: bool = True  # steps that only decode, exactly (`stretch.py`)

    def check(self) -> None:
        """Raises SimulationError if it cannot be simulated."""
        if not self.replicas + self.decode:
            raise SimulationError("There must be at least one replica that decodes; pass --replicas or --decode.")
        for name in ("noise", "network"):
            if not (isfinite(value := getattr(self, name)) and value >= 0):
                raise SimulationError(f"{name} is {value}; it is a number of at least 0.")
        count = self.replicas + self.decode + self.prefill
        names = [f"m{model}-r{number}" for model in range(self.models) for number in range(count)]
        for change in self.changes:
            if change.replica not in names:
                shown = ", ".join(names if len(names) <= 8 else [*names[:3], "...", names[-1]])
                raise SimulationError(f"There is no replica {change.replica} for a fault; there are {shown}.")
        if not 0 <= self.spread < 1:
            raise SimulationError(
                f"The spread is {self.spread}; it is a share of at least 0 and below 1: 0.2 for 20 %."
            )


class Simulation:
    """`run` it once; then `requests` have their times."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        """Raises SimulationError if a request cannot fit into a replica."""
        setup.check()
        if not trace.requests:
            raise SimulationError(f"The trace {trace.name} has no requests; name another one.")
        self.time = VirtualTime()
        self.setup = setup
        self.trace = trace
        self.requests: list[ReplayedRequest] = []
        self.ended = 0
        self.shapes = self._shapes()
        self._random = Random(setup.seed)
        self.replicas: dict[str, TraceReplica] = {}
        self._members: list[tuple[str, ReplicaShape, Role]] = []
        self._draining: set[str] = set()
        self._added = 0
        roles = [ROLE_BOTH] * setup.replicas + [ROLE_DECODE] * setup.decode + [ROLE_PREFILL] * setup.prefill
        for shape in self.shapes:
            self._members += [(f"{shape.model}-r{number}", shape, role) for number, role in enumerate(roles)]
        for name, shape, role in self._members:
            self.replicas[name] = self._start(name, shape, role, 1)
        blocks = sum(shape.kv_blocks for _, shape, _ in self._members)
        self.routers = [
            TraceRouter(
                self.time,
                new_policy(setup.policy),
                self.alive,
                Random(self._random.random()),
                network=setup.network,
                index_blocks=3 * blocks + 100_000,
                disaggregation=setup.disaggregation,
            )
            for _ in range(setup.routers)
        ]
        self._update()
        for change in setup.changes:
            self.time.at(WARM_UP_SECONDS + change.at, partial(change.apply, self))

    def add_replica(self, like: str) -> str:
        """One more of the same model and role, with an empty cache. Returns its name."""
        _, shape, role = next(entry for entry in self._members if entry[0] == like)
        self._added += 1
        name = f"{shape.model}-a{self._added}"
        self._members.append((name, shape, role))
        self.replicas[name] = self._start(name, shape, role, 1)
        self._update()
        return name

    def drain(self, name: str) -> None:
        """It gets no new requests, and leaves when it has none."""
        self._draining.add(name)
        self.replicas[name].drain()
        self._update()
        self.time.after(DRAIN_SECONDS, lambda: self._leave(name))

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> None:
        """progress: called now and then with the number of requests that have ended."""
        self._begin_next(0)
        total = len(self.trace.requests)
        shown = 0

        def done() -> bool:
            nonlocal shown
            if self.ended - shown >= 20 or not self.time.events % 4096:
                shown = self.ended
                progress(shown)
            return self.ended == total

        self.time.run(done)
        for replica in self.replicas.values():
            replica.interrupt()
        progress(self.ended)

    def _shapes(self) -> list[ReplicaShape]:
        setup, trace = self.setup, self.trace
        block = setup.block_size or trace.block
        longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
        need = -(-longest // block) + 1
        blocks = setup.cache_blocks or max(need, int(DEFAULT_CACHE_TOKENS // block))
        if blocks < need:
            raise SimulationError(
                f"The longest request has {longest} tokens, {need} blocks of {block}, but a replica has {blocks}; pass "
                f"--cache-blocks {need} or more, or --limit."
            )
        return [
            ReplicaShape(setup.latency, block, blocks, longest + 1, model=f"m{number}")
            for number in range(setup.models)
        ]

    def _start(self, name: str, shape: ReplicaShape, role: Role, generation: int) -> TraceReplica:
        setup = self.setup
        random = Random(f"{setup.seed}/{name}/{generation}")
        return TraceReplica(
            self.time,
            name,
            shape,
            role,
            random,
            noise=setup.noise,
            slowdown=1.0 + setup.spread * (2 * random.random() - 1),
            network=setup.network,
            peer=self.alive,
            generation=generation,
            skip=setup.skip,
        )

    def alive(self, name: str) -> TraceReplica | None:
        """The replica, or None while its process does not run."""
        replica = self.replicas.get(name)
        return replica if replica is not None and replica.alive else None

    def _leave(self, name: str) -> None:
        if not self.replicas[name].idle:
            self.time.after(DRAIN_SECONDS, lambda: self._leave(name))
            return
        self._members = [entry for entry in self._members if entry[0] != name]
        self._update()
        self.replicas[name].kill()

    def _update(self) -> None:
        members = [member(self.replicas[name].facts, draining=name in self._draining) for name, _, _ in self._members]
        for router in self.routers:
            router.update(members)

    def _begin_next(self, number: int) -> None:
        if number < len(self.trace.requests):
            begin = WARM_UP_SECONDS + self.trace.requests[number].arrival - self.trace.requests[0].arrival
            self.time.at(begin, lambda: self._begin(number))

    def _begin(self, number: int) -> None:
        traced = self.trace.requests[number]
        request = ReplayedRequest(self.time, traced, self._request_ended)
        self.requests.append(request)
        router = self.routers[number % len(self.routers)]
        model = self.shapes[number % len(self.shapes)].model
        router.arrive(number, model, REVISION, traced, self.trace.block, request)
        self._begin_next(number + 1)

    def _request_ended(self, request: ReplayedRequest) -> None:
        self.ended += 1

    def restart(self, name: str) -> None:
        """Its process has ended: another one starts, with an empty cache."""
        _, shape, role = next(entry for entry in self._members if entry[0] == name)
        generation = self.replicas[name].facts.identity.generation + 1
        self.replicas[name] = self._start(name, shape, role, generation)
        self._update()
