"""Schedules for the router's decisions: refusals by all, requests that kill, losses under load, slow replicas."""

import asyncio
from collections.abc import Callable

import pytest

from headrace_router.core.errors import OverloadedError, ReplicaLostError
from headrace_worker.core.request import Finish, Output, Request
from support.simulation.scheduled_cluster import ANSWER_TOKENS, CAPACITY, SteadyLoad


def simulate(count: int, plan: Callable[[SteadyLoad], None], scale: int = 1) -> SteadyLoad:
    """Runs a planned schedule to its end."""

    async def run() -> SteadyLoad:
        load = SteadyLoad(count, scale)
        plan(load)
        load.world.run()
        load.check_end()
        return load

    return asyncio.run(run())


@pytest.mark.parametrize("count", [2, 5])
def test_a_stream_that_all_replicas_refuse_ends(count: int) -> None:
    """Bounded in time (patience is 5 s) and in attempts."""

    def refuse(request: Request) -> Output:
        return Output(request.attempt_id, 0, [], finish=Finish.REFUSED, error="full")

    def refuse_all(load: SteadyLoad) -> None:
        for replica in load.replicas:
            replica.engine.submit = refuse  # type: ignore[method-assign]
        for stream in load.router.streams:
            stream.disconnect()

    def plan(load: SteadyLoad) -> None:
        load.schedule_requests([load.request(0.5, tokens=60)])
        load.at(1.0, lambda: refuse_all(load))

    (request,) = simulate(count, plan).requests
    assert isinstance(request.error, OverloadedError) and request.tokens
    assert request.ended_at is not None and request.ended_at < 10.0
    assert len(request.placements) <= 40


def test_a_request_that_kills_replicas_kills_few() -> None:
    """It fails with the fourth of eight replicas, as its limit is three; all others continue."""

    def plan(load: SteadyLoad) -> None:
        load.send(rate=10.0, seconds=20.0)
        poison = load.request(3.0)
        load.poisonous.add(str(poison.number))
        load.at(3.0, lambda: load.router.arrive(poison))

    load = simulate(8, plan)
    (poisonous,) = [request for request in load.requests if str(request.spec.number) in load.poisonous]
    assert isinstance(poisonous.error, ReplicaLostError) and len(load.company) <= 4
    others = [request for request in load.requests if request is not poisonous]
    assert {request.outcome for request in others} == {"FINISH_LENGTH"}


def test_moves_after_a_loss_are_paced_and_goodput_recovers() -> None:
    """One of four replicas is lost at 90 % load."""
    lost_at, end = 10.0, 40.0
    rate = 0.9 * 4 * CAPACITY / ANSWER_TOKENS
    most = [0]

    def look(load: SteadyLoad) -> None:
        arriving = [len(link.state.arriving) for link in load.router.links]
        most[0] = max(most[0], *arriving)
        if load.world.now < end:
            load.at(0.01, lambda: look(load))

    def plan(load: SteadyLoad) -> None:
        load.send(rate, end)
        load.at(lost_at, lambda: load.kill(load.replica("r3"), None))
        load.at(lost_at, lambda: look(load))

    load = simulate(4, plan, scale=4)
    three = simulate(3, lambda load: load.send(rate, end), scale=4)
    carried = three.tokens_between(lost_at + 10.0, end)
    assert load.tokens_between(lost_at + 10.0, end) >= 0.95 * carried
    moved = [request for request in load.requests if len(request.placements) > 1 and request.tokens]
    present = [request for request in moved if request.placements[0][1] == "r3"]
    assert present and all(request.placements[0][0] < lost_at for request in present)
    assert {request.outcome for request in present} == {"FINISH_LENGTH"}, "the wait for a turn ends none"
    late = [at for request in present for at, _ in request.placements[1:] if at > lost_at + 10.0]
    assert not late, "no second wave"
    assert most[0] <= 4, "streams that a replica continues at a time"


def shares(load: SteadyLoad, start: float, end: float) -> float:
    """The share of new requests that r3 got."""
    names = [name for request in load.requests for at, name in request.placements[:1] if start <= at < end]
    return names.count("r3") / len(names)


@pytest.mark.parametrize("load_share", [0.4, 0.7])
def test_a_slow_replica_is_taken_out_and_comes_back(load_share: float) -> None:
    """Its steps take five times as long for 20 s."""

    def plan(load: SteadyLoad) -> None:
        def set_slowdown(factor: float) -> None:
            load.replica("r3").slowdown = factor

        load.send(load_share * 4 * CAPACITY / ANSWER_TOKENS, 60.0)
        load.at(10.0, lambda: set_slowdown(5.0))
        load.at(30.0, lambda: set_slowdown(1.0))

    load = simulate(4, plan)
    assert shares(load, 0.0, 10.0) > 0.2
    assert shares(load, 20.0, 30.0) <= 0.05
    assert shares(load, 40.0, 60.0) > 0.2, "back in use"
