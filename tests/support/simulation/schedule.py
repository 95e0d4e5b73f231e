"""One seed: a cluster, its clients and its faults, from the first event to the last.

`PYTHONPATH=tests .venv/bin/python -m support.simulation.schedule SEED` prints its events;
`… FIRST --until STOP` runs many.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

from support.simulation.command import replay
from support.simulation.faults import Faults
from support.simulation.scheduled_cluster import ScheduledCluster
from support.simulation.sim_cluster import IDLE_SECONDS
from support.simulation.sim_model import BLOCK, Model
from support.simulation.sim_replica import Shape
from support.simulation.sim_request import ClientRequest, Phase
from support.simulation.world import InvariantViolation, World

SPLITS = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (3, 1))
WINDOWS = ((0,), (0,), (0, 6), (9,), (5, 0))
LONGEST = 12 * BLOCK  # of prompt and output


def _run(seed: int, moves: bool, tracing: bool) -> Counter[str]:
    """Needs a running event loop."""
    world = World(seed, tracing=tracing)
    random = world.random
    model = Model(random.choice(WINDOWS), random.randrange(1, 4), states=seed % 5 == 3)
    shapes = [_shape(random, number, model) for number in range(random.choice((2, 3, 3, 3, 4)))]
    if seed % 4 == 2 or seed % 20 == 13:
        shapes = [_offloading(shape, model, seed + number) for number, shape in enumerate(shapes)]
    names = [shape.name for shape in shapes]
    decoders = set(names) if random.random() < 0.5 else set(names[1:])
    cluster = ScheduledCluster(world, model, shapes, decoders, random.choice((0.5, 0.9, 1.0)))
    requests = _requests(random)
    if shapes[0].host_slots:
        requests = _repeated(requests, 5 if model.states else 3)
    cluster.schedule_requests(requests)
    faults = Faults(cluster)
    faults.plan()
    if moves:
        faults.plan_moves()
    for value in (model, sorted(decoders), *shapes, *requests):
        world.log("{}", value)
    world.run()
    cluster.check_end()
    if world.now > IDLE_SECONDS:
        raise InvariantViolation(f"the cluster became idle only after {world.now:.1f} s")
    outcomes = Counter(request.outcome for request in cluster.router.requests)
    for replica in cluster.replicas:
        outcomes["fetches"] += replica.engine.exchange.fetcher.counters.started
        offload = replica.engine.exchange.offload.counters
        outcomes["loaded"] += offload.loaded
        outcomes["filled"] += offload.filled
        outcomes["loaded_with_states"] += offload.loaded if model.states else 0
        outcomes["fetched"] += replica.engine.exchange.fetcher.counters.done
        outcomes["preempted"] += replica.scheduler.counters.preemptions
    outcomes["moved"] = cluster.router.moved
    outcomes["sources_chosen"] = cluster.router.sources_chosen
    outcomes["stalled"] = cluster.router.stalled
    outcomes["events"] = world.events
    return outcomes


def _shape(random: Random, number: int, model: Model) -> Shape:
    tp, pp = random.choice([split for split in SPLITS if model.fits(split[0])])
    return Shape(
        name=f"r{number}",
        tp=tp,
        pp=pp,
        blocks=_least(model) + random.choice((1, 8, 20, 60)),
        rows=random.choice((2, 4, 8)),
        budget=random.choice((4, 8, 16, 40)),
        depth=random.choice((0, 0, 1, 2)),
        step_seconds=random.choice((0.003, 0.01, 0.02)),
    )


def _least(model: Model) -> int:
    """Blocks that the longest request needs."""
    return 1 + len(model.windows) * (LONGEST // BLOCK + 1)


def _offloading(shape: Shape, model: Model, seed: int) -> Shape:
    """With host memory and a file for what is evicted, and messages that leave before a step computes.

    Snapshots of state go to host memory alone.
    """
    host_slots, places = (5, 20, 200)[seed // 4 % 3], (0, 20, 60, 400)[seed // 12 % 4]
    if model.states:
        return replace(shape, blocks=_least(model), rows=2, host_slots=10 * host_slots, host_states=host_slots)
    return replace(shape, blocks=_least(model), host_slots=host_slots, places=places)


def _repeated(requests: list[ClientRequest], turns: int) -> list[ClientRequest]:
    """And the same prompts again, later."""
    return requests + [
        replace(request, number=len(requests) * turn + request.number, arrival=request.arrival + turn, deadline=None)
        for turn in range(1, turns)
        for request in requests
        if request.disconnects_in is None
    ]


def _requests(random: Random) -> list[ClientRequest]:
    stems = [[random.randrange(10, 900) for _ in range(6 * BLOCK)] for _ in range(2)]
    requests = []
    for number in range(random.randrange(6, 11)):
        stem = random.choice(stems)[: random.choice((0, 8, 17, 24))]
        prompt = stem + [random.randrange(10, 900) for _ in range(random.randrange(1, 4 * BLOCK))]
        disconnects_in = random.choice(list(Phase)) if random.random() < 0.25 else None
        requests.append(
            ClientRequest(
                number=number,
                arrival=random.random(),
                prompt=prompt,
                max_tokens=LONGEST - len(prompt) if disconnects_in else random.randrange(1, 9),
                salt=random.choice((b"", b"", b"tenant")),
                priority=random.choice((0, 0, 1)),
                deadline=random.choice((0.05, 0.3, 1.0)) if random.random() < 0.1 else None,
                disconnects_in=disconnects_in,
            )
        )
    return requests


def run(seed: int, moves: bool = False, tracing: bool = False) -> Counter[str]:
    """Counts of outcomes by name. Raises if an invariant does not hold.

    moves: streams are also moved at random times.
    """

    async def run_in_loop() -> Counter[str]:
        return _run(seed, moves, tracing)

    return asyncio.run(run_in_loop())


if __name__ == "__main__":
    replay(run, __doc__, "moves")
