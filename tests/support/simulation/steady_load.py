"""A cluster of equal replicas under a steady load, for schedules that measure: shares, latencies, goodput."""

from collections.abc import Callable
from random import Random

from support.simulation.client_request import ClientRequest
from support.simulation.scheduled_cluster import ScheduledCluster
from support.simulation.sim_model import Model
from support.simulation.sim_replica import Shape, SimReplica
from support.simulation.world import World

ROWS = 8
STEP_SECONDS = 0.05
PROMPT_TOKENS = 12
ANSWER_TOKENS = 24
CAPACITY = ROWS / STEP_SECONDS  # tokens per second of one replica


class SteadyLoad(ScheduledCluster):
    """`count` replicas named r0, r1, …; requests of one size arrive at random times."""

    def __init__(self, seed: int, count: int, scale: int = 1) -> None:
        """scale: of the rows and the time of a step; the capacity stays the same."""
        world = World(seed, max_events=400_000)
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
