"""The load that routers get includes what other routers have sent during a step."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.channel_options import NO_PROXY
from headrace_worker.core.arrivals import Arrivals
from headrace_worker.server.convert import tokens_to_compute
from support.members import MEMBER, METADATA


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
