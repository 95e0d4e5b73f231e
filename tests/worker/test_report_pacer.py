"""When a replica sends a frame without tokens to a router."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.report_pacer import EARLY_SECONDS, ReportPacer, ReportState
from headrace_worker.core.request import Output
from headrace_worker.server.outbox import Outbox

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
