"""What replicas report to routers beside tokens, and when: their load, and what other routers have sent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from headrace_base.cluster_member import NO_PROXY
from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_worker.core.engine import LoadSnapshot
from headrace_worker.core.latency import StepCost
from headrace_worker.core.load_reports import EARLY_SECONDS, Arrivals, LoadReports, ReportPacer, ReportState
from headrace_worker.core.request import Output
from headrace_worker.core.scheduler import SchedulerCounters
from headrace_worker.core.transfer.fetching import FetchCounters
from headrace_worker.core.transfer.offload import OffloadCounters
from headrace_worker.server.convert import tokens_to_compute
from headrace_worker.server.servicer import Outbox
from support.members import MEMBER, METADATA

LOAD = LoadSnapshot(
    1, 0, 0.5, 8, 0, 0.01, StepCost(), SchedulerCounters(), FetchCounters(), 0, OffloadCounters(), 0.0, [], 4
)


def test_a_router_is_informed_of_what_others_have_sent() -> None:
    reports = LoadReports(0.25)
    first = reports.connect(1.0)
    reports.received(first, 10)
    assert not reports.begin_announcement(), "there is no other router"
    second, third = reports.connect(1.0), reports.connect(1.0)
    reports.received(second, 20)
    assert reports.begin_announcement() and not reports.begin_announcement(), "one for all that comes until then"
    reports.disconnect(third)
    assert reports.announcement() == [first, second] and (first.others, second.others) == (1, 1)
    assert reports.begin_announcement() and reports.announcement() == [], "both know it"
    assert (len(reports.arrivals), reports.arrivals.tokens) == (2, 30)
    reports.accepted(1)
    assert (len(reports.arrivals), reports.arrivals.tokens) == (1, 20)


def test_a_refused_submit_is_counted_for_its_router_alone() -> None:
    reports = LoadReports(0.25)
    first, second = reports.connect(1.0), reports.connect(1.0)
    reports.received(first, None)
    assert (first.submits, second.submits, len(reports.arrivals)) == (1, 0, 0)
    assert reports.announcement() == []


def test_a_report_is_due_when_a_router_was_informed() -> None:
    reports = LoadReports(0.25)
    first, second = reports.connect(1.0), reports.connect(1.0)
    second.pacer.sent(reports.state(second, LOAD, draining=False), 0.0)
    reports.received(first, 5)
    assert not second.pacer.due(reports.state(second, LOAD, draining=False), 0.001)
    reports.announcement()
    assert second.pacer.due(reports.state(second, LOAD, draining=False), 0.001)
    idle = reports.state(second, replace(LOAD, running=0), draining=True)
    assert idle.next_step == 0.25 and idle.draining


STATE = ReportState(next_step=0.01)


def _reports(interval: float, step: float, seconds: float = 10.0) -> int:
    pacer, sent, now = ReportPacer(interval), 0, 0.0
    state = replace(STATE, next_step=step)
    while now < seconds:
        if pacer.due(state, now):
            pacer.sent(state, now)
            sent += 1
        now += step
    return sent


def test_reports_are_as_rare_as_the_router_requests() -> None:
    assert _reports(0.5, step=0.01) in (20, 21)
    assert _reports(0.0, step=0.01) >= 1000, "one after each step"
    assert _reports(0.02, step=0.25) == 40, "an idle replica has no more steps to report"
    assert _reports(0.5, step=0.25) == 20


def test_a_frame_with_tokens_counts_as_a_report() -> None:
    pacer = ReportPacer(0.5)
    for tenth in range(50):
        pacer.sent(STATE, tenth / 10)
        assert not pacer.due(STATE, tenth / 10 + 0.09)


@pytest.mark.parametrize("change", [{"draining": True}, {"others": 3}])
def test_a_change_that_a_router_must_know_is_reported_at_once(change: dict[str, Any]) -> None:
    pacer = ReportPacer(1.0)
    pacer.sent(STATE, 0.0)
    assert not pacer.due(STATE, 0.001) and pacer.due(replace(STATE, **change), 0.001)
    pacer.sent(replace(STATE, **change), 0.001)
    assert pacer.due(STATE, 0.002), "and its end"


def test_submits_that_the_load_includes_are_reported_soon() -> None:
    pacer = ReportPacer(1.0)
    pacer.sent(STATE, 0.0)
    counted = replace(STATE, submits=1)
    assert not pacer.due(counted, 0.001) and pacer.due(counted, EARLY_SECONDS)


def test_a_long_step_is_reported_before_it_begins() -> None:
    pacer = ReportPacer(0.2)
    pacer.sent(STATE, 0.0)
    assert pacer.due(replace(STATE, next_step=0.45), 0.001), "the report would come too late"
    pacer = ReportPacer(1.0)
    pacer.sent(STATE, 0.0)
    assert pacer.due(replace(STATE, next_step=0.6), 0.001), "a router regards it as stalled after 4 x the prediction"


def test_an_outbox_sends_tokens_at_once_and_no_empty_frames() -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        outbox = Outbox(ReportPacer(0.5), lambda: now)
        frames: list[pb.ReplicaFrame] = []

        async def send() -> None:
            while (frame := await outbox.take()) is not None:
                frames.append(frame)

        sender = asyncio.create_task(send())
        for step in range(1, 101):
            now = step * 0.01
            if step % 10 == 3:
                outbox.put([Output(b"a", step, [7])])
            outbox.set_heartbeat(step, pb.Load(running=1), STATE)
            for _ in range(3):
                await asyncio.sleep(0)
        assert [frame.step for frame in frames] == [1, *range(3, 101, 10)]
        assert all(frame.deltas for frame in frames[1:])
        outbox.finish()
        await sender
        assert frames[-1].step == 100, "the last one is sent in any case"

    asyncio.run(scenario())


def test_arrivals_count_until_a_step_includes_them() -> None:
    random, arrivals = Random(1), Arrivals()
    sent: list[int] = []
    taken = 0
    for _ in range(500):
        if random.random() < 0.6:
            sent.append(random.randrange(1000))
            arrivals.add(sent[-1])
        else:
            taken = random.randint(taken, len(sent))
            arrivals.take(taken)
        assert (arrivals.received, len(arrivals)) == (len(sent), len(sent) - taken)
        assert arrivals.tokens == sum(sent[taken:])
        known = random.randint(0, len(sent))
        first = max(known, taken)
        assert arrivals.since(known) == (len(sent) - first, sum(sent[first:]))


def test_what_a_submit_will_compute_is_its_routers_estimate() -> None:
    submit = pb.Submit(prompt_token_ids=range(100), output_token_ids=range(10))
    assert tokens_to_compute(submit) == 110
    submit.expected_cached_tokens = 96
    assert tokens_to_compute(submit) == 14
    submit.expected_cached_tokens = 4_000_000
    assert tokens_to_compute(submit) == 0
    submit.expected_cached_tokens = 0
    submit.source.address = "computes:1"
    assert tokens_to_compute(submit) == 0


def _submit(number: int, cached: int = 0) -> pb.Submit:
    return pb.Submit(
        attempt_id=bytes([number]) * 16,
        prompt_token_ids=[5] * 20,
        expected_cached_tokens=cached,
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=4, ignore_eos=True),
    )


def test_a_router_learns_within_a_step_what_another_one_has_sent(make_served: Callable[..., Any]) -> None:
    served = make_served(num_blocks=512)
    stepping, resume, received = threading.Event(), threading.Event(), threading.Event()

    def block(plan: Any) -> None:
        first = not stepping.is_set()
        stepping.set()
        assert (resume if first else received).wait(20)  # the frame of the first step holds no later step

    served.bench.runner.on_collect = block
    hello = pb.RouterHello(router_id="r", contract_version=CONTRACT_VERSION, report_interval_ms=1000)

    async def scenario() -> tuple[list[pb.Load], pb.ReplicaFrame]:
        joined = asyncio.Event()
        loads: list[pb.Load] = []

        async def sender() -> AsyncIterator[pb.RouterFrame]:
            yield pb.RouterFrame(hello=hello)
            await joined.wait()
            yield pb.RouterFrame(submits=[_submit(1)])
            await asyncio.to_thread(stepping.wait, 20)
            yield pb.RouterFrame(submits=[_submit(2), _submit(3, cached=16)])
            await asyncio.sleep(60)

        async def watcher() -> AsyncIterator[pb.RouterFrame]:
            yield pb.RouterFrame(hello=hello)
            await asyncio.sleep(60)

        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            stub = served.stub(channel)
            call = stub.Serve(sender(), metadata=METADATA)
            first: pb.ReplicaFrame | None = None

            async def send() -> None:
                nonlocal first
                async for frame in call:
                    if frame.deltas:
                        first = frame
                        received.set()
                        return

            sending = asyncio.create_task(send())
            async with asyncio.timeout(20):
                async for frame in stub.Serve(watcher(), metadata=METADATA):
                    if frame.step:
                        joined.set()
                    loads.append(frame.load)
                    if frame.load.waiting >= 2:
                        assert not resume.is_set()
                        break
                resume.set()
                await sending
            assert first is not None
            return loads, first

    loads, first = asyncio.run(scenario())
    assert loads[0].waiting == 0
    running = loads[-1].running
    waiting = loads[-1].waiting
    assert running + waiting == 3 and loads[-1].waiting_tokens >= 20 + 4
    assert first.submits == 3 and first.load.running + first.load.waiting == 3
