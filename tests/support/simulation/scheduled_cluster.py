"""A cluster with one router whose member list the schedule itself writes."""

from collections.abc import Callable
from functools import partial
from random import Random

from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from support.simulation.sim_cluster import Cluster
from support.simulation.sim_model import Model
from support.simulation.sim_replica import Shape, SimReplica
from support.simulation.sim_request import ClientRequest
from support.simulation.sim_router import SimRouter
from support.simulation.world import World

ROWS = 8
STEP_SECONDS = 0.05
PROMPT_TOKENS = 12
ANSWER_TOKENS = 24
CAPACITY = ROWS / STEP_SECONDS  # tokens per second of one replica


class ScheduledCluster(Cluster):
    """Replicas are found by name: each has one build at a time."""

    def __init__(
        self, world: World, model: Model, shapes: list[Shape], decoders: set[str], source_share: float
    ) -> None:
        super().__init__(world, model)
        self._shapes = {shape.name: shape for shape in shapes}
        self._decoders = decoders
        self._generations: dict[str, int] = {}
        self._removed: set[str] = set()
        self._listed = 0
        self.router = SimRouter(self, source_share)
        self.routers.append(self.router)
        for shape in shapes:
            self.start(shape.name)
        self.publish()

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def decodes(self, name: str) -> bool:
        return name in self._decoders

    def build(self, name: str, generation: int) -> SimReplica | None:
        """See Cluster."""
        replica = self.replica_at(name)
        return replica if replica is not None and self._generations[name] == generation else None

    def start(self, name: str) -> None:
        self._generations[name] = self._generations.get(name, 0) + 1
        self._replicas[name] = SimReplica(self, self._shapes[name], self._model, self._generations[name])
        self.world.at(self.world.delay(), self.publish)

    def publish(self) -> None:
        """The controller's member list: the newest build of each replica."""
        self._listed += 1
        members = [
            control.Member(
                identity=pb.ReplicaIdentity(
                    replica_id=name,
                    generation=self._generations[name],
                    role=pb.ROLE_BOTH if self.decodes(name) else pb.ROLE_PREFILL,
                ),
                address=name,
                state=pb.REPLICA_STATE_READY,
            )
            for name in self._shapes
            if name not in self._removed
        ]
        for router in self.routers:
            router.update(control.MemberList(members=members, epoch=b"controller", version=self._listed))

    def kill(self, replica: SimReplica, back_after: float | None) -> None:
        """At once; every connected process detects it. back_after: seconds until its next build; None = never."""
        replica.alive = False
        self.disconnect(replica)
        if back_after is None:
            self._removed.add(replica.name)
            self.world.at(self.world.delay(), self.publish)
        else:
            self.world.at(back_after, lambda: self.start(replica.name))

    # -- clients -----------------------------------------------------------------------------------------------

    def schedule_requests(self, requests: list[ClientRequest]) -> None:
        self.requests_to_come = len(requests)

        def arrive(request: ClientRequest) -> None:
            self.requests_to_come -= 1
            self.router.arrive(request)

        self.router.begin()
        for request in requests:
            self.world.at(request.arrival, partial(arrive, request))

    def submit_now(self, request: ClientRequest) -> None:
        """One more request, now."""
        self.router.arrive(request)


class SteadyLoad(ScheduledCluster):
    """`count` replicas named r0, r1, …; requests of one size arrive at random times."""

    def __init__(self, count: int, scale: int = 1) -> None:
        """scale: of the rows and the time of a step; the capacity stays the same."""
        world = World(0, max_events=400_000)
        seconds = scale * STEP_SECONDS
        shapes = [Shape(f"r{n}", 1, 1, 256 * scale, scale * ROWS, 64 * scale, 0, seconds) for n in range(count)]
        super().__init__(world, Model((0,), 1), shapes, {shape.name for shape in shapes}, 0.0)
        self.poisonous: set[str] = set()  # labels of requests that kill the replica that runs them
        self.company: list[int] = []  # the other requests on the replica, at each of these deaths

    def send(self, rate: float, seconds: float) -> None:
        """Schedules `rate` requests per second, from the start on."""
        random = Random(self.world.seed)
        times = sorted(0.5 + random.random() * (seconds - 0.5) for _ in range(int(rate * seconds)))
        self.schedule_requests([self.request(at) for at in times])

    def request(self, at: float, tokens: int = ANSWER_TOKENS) -> ClientRequest:
        number = self.next_number()
        prompt = [10 + number % 900, *range(10, 9 + PROMPT_TOKENS)]
        return ClientRequest(number, at, prompt, tokens, b"", 0, None, None)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.at(seconds, call)

    def replica(self, name: str) -> SimReplica:
        replica = self.replica_at(name)
        assert replica is not None
        return replica

    def tokens_between(self, start: float, end: float) -> int:
        return sum(start <= at < end for request in self.requests for at in request.token_times)

    def watch(self, replica: SimReplica) -> None:
        super().watch(replica)
        running = list(replica.engine._requests.values())
        if replica.alive and any(request.label in self.poisonous and request.row >= 0 for request in running):
            self.company.append(len(running) - 1)
            self.kill(replica, 1.0)
