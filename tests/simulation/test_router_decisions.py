"""Schedules for the router's decisions: refusals by all, requests that kill, losses under load, slow replicas."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from statistics import quantiles

import pytest
import structlog

from headrace_router.core.errors import OverloadedError, PoisonousRequestError
from headrace_worker.core.request import Finish, Output, Request
from support.simulation.sim_request import SimRequest
from support.simulation.sim_router import SimRouter
from support.simulation.steady_load import ANSWER_TOKENS, CAPACITY, SteadyLoad

SEEDS = [0]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def simulate(seed: int, count: int, plan: Callable[[SteadyLoad], None], scale: int = 1) -> SteadyLoad:
    """Runs a planned schedule to its end."""

    async def run() -> SteadyLoad:
        load = SteadyLoad(seed, count, scale)
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

    (request,) = simulate(1, count, plan).requests
    assert isinstance(request.error, OverloadedError) and request.tokens
    assert request.ended_at is not None and request.ended_at < 10.0
    assert len(request.placements) <= 40


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_that_kills_replicas_is_isolated_and_then_refused(seed: int) -> None:
    """Two deaths among others, one alone; then it fails, and so does the same prompt."""

    def plan(load: SteadyLoad) -> None:
        load.send(rate=10.0, seconds=20.0)
        poison = load.request(3.0)
        load.poisonous.add(str(poison.number))
        for at in (3.0, 18.0):
            load.at(at, lambda: load.router.arrive(poison))

    load = simulate(seed, 4, plan)
    poisonous = [request for request in load.requests if str(request.spec.number) in load.poisonous]
    assert [type(request.error) for request in poisonous] == [PoisonousRequestError] * 2
    assert len(load.company) == 3 and load.company[2] == 0, "the third time it ran alone"
    assert not poisonous[1].placements
    others = [request for request in load.requests if request not in poisonous]
    assert {request.outcome for request in others} == {"FINISH_LENGTH"}


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_of_one_prompt_that_kill_replicas_kill_three_in_all(seed: int) -> None:
    """Clients that send it again at once, on connections of their own."""

    def plan(load: SteadyLoad) -> None:
        load.send(rate=10.0, seconds=20.0)
        poison = load.request(3.0)
        for number in range(6):
            again = replace(poison, number=poison.number + 1000 * number)
            load.poisonous.add(str(again.number))
            load.at(3.0 + 0.1 * number, partial(load.router.arrive, again))

    load = simulate(seed, 6, plan)
    poisonous = [request for request in load.requests if str(request.spec.number) in load.poisonous]
    assert [type(request.error) for request in poisonous] == [PoisonousRequestError] * 6
    assert len(load.company) == 3 and load.company[2] == 0
    others = [request for request in load.requests if request not in poisonous]
    assert {request.outcome for request in others} == {"FINISH_LENGTH"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_suspect_of_one_router_runs_alone_although_another_router_sends(seed: int) -> None:
    """The second router keeps all replicas loaded with streams that are longer than the suspect's patience of 5 s."""

    def plan(load: SteadyLoad) -> None:
        second = SimRouter(load, 0.0, name="second")
        second.jitter = Random(f"{seed} second").random  # two routers do not have the same randomness
        load.routers.append(second)
        load.publish()
        second.begin()
        for number in range(60):
            load.at(0.5 + 0.5 * number, partial(second.arrive, load.request(0.5 + 0.5 * number, tokens=150)))
        poison = load.request(6.0)
        load.poisonous.add(str(poison.number))
        load.schedule_requests([poison])
        load.at(25.0, partial(load.router.arrive, poison))

    load = simulate(seed, 5, plan)
    poisonous, others = load.router.requests, load.routers[1].requests
    assert [type(request.error) for request in poisonous] == [PoisonousRequestError] * 2
    assert len(load.company) == 3 and load.company[2] == 0 and min(load.company[:2]) > 0
    ended = poisonous[0].ended_at
    assert ended is not None and ended < 6.0 + 10.0, "it waited for its trial for its patience at most"
    assert {request.outcome for request in others} == {"FINISH_LENGTH"}


def _break_connections(load: SteadyLoad) -> None:
    for stream in list(load.router.streams):
        stream.disconnect()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lost", ["connections", "a node"])
def test_many_streams_of_one_prompt_survive_a_fault_that_is_not_theirs(seed: int, lost: str) -> None:
    """All connections of the router break, or a node with three of four replicas is lost: the prompt is accepted."""
    prompt: list[int] = []

    def plan(load: SteadyLoad) -> None:
        prompt.extend(load.request(0.5).prompt)
        same = [replace(load.request(0.5 + 0.01 * number, tokens=200), prompt=prompt) for number in range(12)]
        load.schedule_requests([*same, *(replace(load.request(at), prompt=prompt) for at in (40.0, 60.0, 120.0))])
        if lost == "connections":
            load.at(3.0, partial(_break_connections, load))
        else:
            for name in ("r0", "r1", "r2"):
                load.at(3.0, partial(load.kill, load.replica(name), 5.0))

    load = simulate(seed, 4, plan)
    *streams, first, second, third = load.requests
    assert {request.outcome for request in (first, second, third)} == {"FINISH_LENGTH"}
    assert not any(isinstance(request.error, PoisonousRequestError) for request in streams)
    if lost == "connections":
        assert {request.outcome for request in streams} == {"FINISH_LENGTH"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_was_present_at_two_losses_runs_alone_although_the_others_are_long(seed: int) -> None:
    """Two of four replicas are lost, one after the other; all streams are longer than their patience."""
    trials = [0]

    def look(load: SteadyLoad) -> None:
        trials[0] += sum(link.state.isolated for link in load.router.links)
        if load.world.now < 20.0:
            load.at(0.1, lambda: look(load))

    def present(load: SteadyLoad) -> list[SimRequest]:
        return [request for request in load.requests if request.placements[0][1] == "r3"]

    def plan(load: SteadyLoad) -> None:
        load.router.patience = 10.0
        load.schedule_requests([load.request(0.5 + 0.1 * number, tokens=240) for number in range(12)])
        load.at(3.0, lambda: load.kill(load.replica("r3"), None))
        load.at(6.0, lambda: load.kill(load.replica(present(load)[0].replica_name), None))
        load.at(6.0, lambda: look(load))

    load = simulate(seed, 4, plan, scale=2)
    assert {request.outcome for request in load.requests} == {"FINISH_LENGTH"}
    assert len(present(load)[0].placements) >= 3 and trials[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_after_a_loss_are_paced_and_goodput_recovers(seed: int) -> None:
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

    load = simulate(seed, 4, plan, scale=4)
    three = simulate(seed, 3, lambda load: load.send(rate, end), scale=4)
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


def slow_from_10_to_30(seed: int, load_share: float, slowdown: float) -> SteadyLoad:
    """r3's steps take `slowdown` times as long for 20 s."""

    def plan(load: SteadyLoad) -> None:
        def set_slowdown(factor: float) -> None:
            load.replica("r3").slowdown = factor

        load.send(load_share * 4 * CAPACITY / ANSWER_TOKENS, 60.0)
        load.at(10.0, lambda: set_slowdown(slowdown))
        load.at(30.0, lambda: set_slowdown(1.0))

    return simulate(seed, 4, plan)


def times_elsewhere(load: SteadyLoad, start: float, end: float) -> list[float]:
    """Seconds of each request that does not run on r3."""
    return [
        request.token_times[-1] - request.spec.arrival
        for request in load.requests
        if start <= request.spec.arrival < end and all(name != "r3" for _, name in request.placements)
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load_share", [0.4, 0.7])
def test_a_slow_replica_is_taken_out_and_comes_back(seed: int, load_share: float) -> None:
    """Its steps take five times as long."""
    slow = slow_from_10_to_30(seed, load_share, 5.0)
    assert shares(slow, 0.0, 10.0) > 0.2
    assert shares(slow, 20.0, 30.0) <= 0.05
    assert shares(slow, 40.0, 60.0) > 0.2, "back in use"


@pytest.mark.parametrize("seeds", [1])
def test_the_requests_on_other_replicas_take_as_long_as_before(seeds: int) -> None:
    """Where three carry the load. Of all seeds together: 1 % of one are few requests."""

    def p99(slowdown: float) -> float:
        loads = [slow_from_10_to_30(seed, 0.4, slowdown) for seed in range(seeds)]
        return quantiles([time for load in loads for time in times_elsewhere(load, 10.0, 30.0)], n=100)[98]

    assert p99(5.0) <= 1.1 * p99(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_of_lasting_different_speed_all_stay_in_use(seed: int) -> None:
    """A slower machine is no failure: weighing speeds belongs to placement."""

    def plan(load: SteadyLoad) -> None:
        load.replica("r3").slowdown = 4.0
        load.send(0.4 * 4 * CAPACITY / ANSWER_TOKENS, 30.0)

    assert shares(simulate(seed, 4, plan), 15.0, 30.0) > 0.08
