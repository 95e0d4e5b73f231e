"""The replica's gRPC server with a real engine loop and a fake runner."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc
import pytest

from headrace_base.cluster_member import NO_PROXY, OWN_CONNECTION
from headrace_base.errors import ListenError
from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.server.replica_server import ReplicaServer
from support.members import MEMBER, METADATA, other_member
from support.worker.fake_model import undisturbed
from support.worker.served_engine import ServedEngine

Make = Callable[..., Any]


def submit(attempt: bytes, prompt: list[int], max_tokens: int = 8, **options: Any) -> pb.Submit:
    sampling = pb.Sampling(max_tokens=max_tokens, top_p=1, repetition_penalty=1)
    return pb.Submit(attempt_id=attempt, model="m", revision="r", prompt_token_ids=prompt, sampling=sampling, **options)


HELLO = pb.RouterHello(router_id="test", contract_version=CONTRACT_VERSION)


async def run_stream(
    served: ServedEngine, submits: list[pb.Submit], done: Callable[[dict[bytes, pb.Delta]], bool]
) -> dict[bytes, Any]:
    """Sends submits over a Serve stream, merges deltas per attempt until `done`."""
    stop = asyncio.Event()

    async def frames() -> AsyncIterator[pb.RouterFrame]:
        yield pb.RouterFrame(hello=HELLO, submits=submits)
        await stop.wait()

    merged: dict[bytes, pb.Delta] = {}
    async with MEMBER.channel(served.address, NO_PROXY) as channel:
        async for frame in served.stub(channel).Serve(frames(), metadata=METADATA):
            for delta in frame.deltas:
                known = merged.setdefault(delta.attempt_id, pb.Delta())
                assert delta.first_index == len(known.token_ids) or not delta.token_ids
                known.token_ids.extend(delta.token_ids)
                if delta.finish:
                    known.finish, known.error = delta.finish, delta.error
                if delta.HasField("cached_tokens"):
                    known.cached_tokens = delta.cached_tokens
            if done(merged):
                break
        stop.set()
    return merged


def all_finished(count: int) -> Callable[[dict[bytes, pb.Delta]], bool]:
    return lambda merged: sum(1 for delta in merged.values() if delta.finish) == count


def test_tokens_of_many_attempts_arrive_once_and_in_order(make_served: Make) -> None:
    served = make_served(num_blocks=512)
    random = Random(1)
    prompts = {bytes([i]) * 16: [random.randrange(10, 900) for _ in range(1 + i)] for i in range(20)}
    submits = [submit(attempt, prompt) for attempt, prompt in prompts.items()]
    merged = asyncio.run(run_stream(served, submits, all_finished(20)))
    for attempt, prompt in prompts.items():
        assert list(merged[attempt].token_ids) == undisturbed(prompt, 8)
        assert merged[attempt].finish == pb.FINISH_LENGTH


@pytest.mark.parametrize(
    ("change", "finish", "word"),
    [
        ({"model": "other"}, pb.FINISH_REFUSED, "another model"),
        ({"revision": "other"}, pb.FINISH_REFUSED, "another model"),
        ({"adapter": "other"}, pb.FINISH_REFUSED, "another model"),
        ({"prompt_token_ids": []}, pb.FINISH_ERROR, "empty"),
        ({"prompt_token_ids": [2000]}, pb.FINISH_ERROR, "vocabulary"),
        ({"prompt_token_ids": [1] * 200}, pb.FINISH_ERROR, "context"),
        ({"attempt_id": b"short"}, pb.FINISH_ERROR, "16 bytes"),
        ({"sampling": pb.Sampling(stop_token_ids=[4_000_000_000])}, pb.FINISH_ERROR, "vocabulary"),
        ({"sampling": pb.Sampling(allowed_token_ids=[5, 2000])}, pb.FINISH_ERROR, "vocabulary"),
        ({"sampling": pb.Sampling(bad_words=[pb.TokenSequence(ids=[2000, 5])])}, pb.FINISH_ERROR, "vocabulary"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, pb.FINISH_ERROR, "finite"),
        ({"sampling": pb.Sampling(logit_bias={3: float("inf")})}, pb.FINISH_ERROR, "finite"),
        ({"sampling": pb.Sampling(repetition_penalty=-1)}, pb.FINISH_ERROR, "negative"),
    ],
)
def test_a_bad_submit_is_answered_and_the_next_one_works(
    make_served: Make, change: dict[str, Any], finish: int, word: str
) -> None:
    served = make_served()
    bad = submit(b"x" * 16, [1, 2])
    bad.MergeFrom(pb.Submit())
    for name, value in change.items():
        bad.ClearField(name)
        bad.MergeFrom(pb.Submit(**{name: value}))
    merged = asyncio.run(run_stream(served, [bad, submit(b"y" * 16, [1, 2])], all_finished(2)))
    assert merged[bad.attempt_id].finish == finish
    assert word in merged[bad.attempt_id].error
    assert merged[b"y" * 16].finish == pb.FINISH_LENGTH


def test_closing_the_stream_frees_everything(make_served: Make) -> None:
    served = make_served(num_blocks=512)
    submits = [submit(bytes([i]) * 16, [10 + i] * 20, 150) for i in range(12)]
    asyncio.run(run_stream(served, submits, lambda merged: len(merged) >= 4))
    while served.bench.engine.has_work:
        time.sleep(0.01)
    assert served.bench.kv.pool.used == 0


def test_a_replica_takes_the_first_free_port_of_its_range(make_served: Make) -> None:
    servicer = make_served().servicer
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = int(taken.getsockname()[1])
        servers = [ReplicaServer("127.0.0.1", (first, last), MEMBER) for last in (first, first + 40)]
        with pytest.raises(ListenError, match=rf"127.0.0.1:{first}: all ports are in use"):
            servers[0].start(servicer)
        assert first < int(servers[1].start(servicer).rpartition(":")[2]) <= first + 40
        for server in servers:
            server.stop()


def test_no_call_is_answered_without_the_secret(make_served: Make) -> None:
    served = make_served()

    async def silence() -> AsyncIterator[Any]:
        await asyncio.Event().wait()  # a write at the time of the refusal would be another error in the client
        yield pb.RouterFrame(hello=HELLO)

    async def run() -> None:
        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            stub: Any = ReplicaStub(channel)
            for metadata in (None, other_member().metadata):
                for call in (
                    stub.Describe(pb.DescribeRequest(), metadata=metadata),
                    stub.WatchCache(pb.CacheWatchRequest(), metadata=metadata),
                    stub.WatchHealth(pb.HealthRequest(), metadata=metadata),
                    stub.Serve(silence(), metadata=metadata),
                    stub.Transfer(silence(), metadata=metadata),
                ):
                    with pytest.raises(grpc.aio.AioRpcError, match="--secret-file") as caught:
                        async for _ in call:
                            pass
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())


def test_describe_sends_the_tokenizer_unless_it_is_known(make_served: Make) -> None:
    served = make_served()

    async def describe(digest: bytes, facts_only: bool = False) -> tuple[pb.ModelFacts, bytes]:
        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            call = served.stub(channel).Describe(
                pb.DescribeRequest(known_digest=digest, facts_only=facts_only), metadata=METADATA
            )
            chunks = [chunk async for chunk in call]
        return chunks[0].facts, b"".join(chunk.tokenizer_json for chunk in chunks[1:])

    facts, tokenizer = asyncio.run(describe(b""))
    assert (facts.max_model_len, len(tokenizer)) == (200, 3 << 19)
    assert asyncio.run(describe(b"d"))[1] == b""
    assert asyncio.run(describe(b"", facts_only=True)) == (facts, b"")


def test_cache_events_rebuild_the_cached_hashes(make_served: Make) -> None:
    served = make_served(num_blocks=24)

    known: set[bytes] = set()

    async def follow(call: AsyncIterator[pb.CacheFrame]) -> None:
        sequence = None
        async for frame in call:
            if frame.snapshot:
                sequence = frame.sequence
            else:
                assert sequence is not None
                sequence += 1
                assert frame.sequence == sequence
            for event in frame.events:
                if event.cleared:
                    known.clear()
                known.update(event.stored)
                known.difference_update(event.removed)

    async def compare() -> None:
        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            following = asyncio.create_task(
                follow(served.stub(channel).WatchCache(pb.CacheWatchRequest(), metadata=METADATA))
            )
            await run_stream(served, [submit(bytes([i]) * 16, [20 + i] * 30) for i in range(9)], all_finished(9))
            while known != served.bench.indexed_digests:  # the last increment comes after the last token
                assert not following.done(), following
                await asyncio.sleep(0.01)
            following.cancel()

    async def bounded() -> None:
        await run_stream(served, [submit(b"z" * 16, [9] * 30)], all_finished(1))
        await asyncio.wait_for(compare(), 10)

    asyncio.run(bounded())
    assert known


def test_health_counts_the_routers_that_are_connected(make_served: Make) -> None:
    """The controller drains an old build when every router has a stream to the new one."""
    served = make_served()

    async def counts() -> list[int]:
        async with (
            MEMBER.channel(served.address, NO_PROXY) as channel,
            MEMBER.channel(served.address, (*NO_PROXY, *OWN_CONNECTION)) as second,
            MEMBER.channel(served.address, NO_PROXY) as own,
        ):
            watcher: Any = served.stub(own)
            stub = served.stub(channel)
            stream = watcher.WatchHealth(pb.HealthRequest(interval_ms=50), metadata=METADATA)
            found = [(await stream.read()).routers]
            calls = [
                served.stub(second).Serve(metadata=METADATA),
                stub.Serve(metadata=METADATA),
                stub.Serve(metadata=METADATA),
            ]  # one router has connected again
            for call, name in zip(calls, ("r-2", "r-1", "r-1"), strict=True):
                hello = pb.RouterHello(router_id=name, contract_version=CONTRACT_VERSION)
                await call.write(pb.RouterFrame(hello=hello))
                await call.read()
            while (routers := (await stream.read()).routers) != 2:
                pass
            found.append(routers)
            calls[0].cancel()
            while (routers := (await stream.read()).routers) == 2:
                pass
            return [*found, routers]

    assert asyncio.run(asyncio.wait_for(counts(), 20)) == [0, 2, 1]


def test_health_distinguishes_a_stalled_from_an_idle_loop(make_served: Make) -> None:
    served = make_served()
    release = threading.Event()

    async def states(count: int) -> list[int]:
        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            call = served.stub(channel).WatchHealth(pb.HealthRequest(interval_ms=100), metadata=METADATA)
            seen = []
            async for health in call:
                seen.append(health.state)
                if len(seen) == count:
                    return seen
        return seen

    time.sleep(0.4)
    assert asyncio.run(states(3))[-1] == pb.REPLICA_STATE_READY
    served.bench.runner.on_launch = lambda plan: release.wait(10)
    try:
        served.loop.submit(served.bench.request([1, 2, 3]))
        assert asyncio.run(states(28))[-1] == pb.REPLICA_STATE_UNHEALTHY
    finally:
        release.set()
    time.sleep(0.3)
    assert asyncio.run(states(2))[-1] == pb.REPLICA_STATE_READY
    served.loop.drain()
    time.sleep(0.3)
    assert asyncio.run(states(2))[-1] == pb.REPLICA_STATE_DRAINING


def test_a_failed_loop_ends_its_requests_and_reports_its_failure(make_served: Make) -> None:
    served = make_served()

    def fail(plan: Any) -> None:
        raise SystemError("the device is lost")

    served.bench.runner.on_launch = fail
    served.bench.engine._failed_steps = 100
    # Until the stream ends: one that stayed open would show routers a process that lives on.
    merged = asyncio.run(run_stream(served, [submit(b"q" * 16, [5, 6])], lambda merged: False))
    assert merged[b"q" * 16].finish == pb.FINISH_CANCELLED
    assert served.loop.ended.wait(5)
    assert served.loop.failure is not None
    with pytest.raises(grpc.aio.AioRpcError, match="has ended"):
        asyncio.run(run_stream(served, [], lambda merged: False))


@pytest.mark.parametrize(
    ("version", "refused"),
    [(0, True), (CONTRACT_VERSION, False), (CONTRACT_VERSION + 1, False), (CONTRACT_VERSION + 2, True)],
)
def test_replicas_whose_contract_versions_differ_by_one_exchange_blocks(
    make_served: Make, version: int, refused: bool
) -> None:
    """What is wrong besides is found after that: another model."""
    served = make_served()

    async def reason() -> str:
        async def frames() -> AsyncIterator[pb.TransferFrame]:
            identity = pb.ReplicaIdentity(replica_id="b", model="other")
            hello = pb.TransferHello(contract_version=version, identity=identity, shards=b"\xc0")
            yield pb.TransferFrame(hello=hello)

        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await served.stub(channel).Transfer(frames(), metadata=METADATA).read()
        return error.value.details() or ""

    assert ("contract version" in asyncio.run(reason())) is refused


def test_a_router_gets_frames_without_tokens_at_the_interval_that_it_requests(make_served: Make) -> None:
    """A frame after each step, to each router, was most of what a router of many replicas received."""
    served = make_served(num_blocks=512)
    served.bench.runner.on_launch = lambda plan: time.sleep(0.01)
    running = submit(b"r" * 16, [5, 6, 7], max_tokens=190)
    running.sampling.ignore_eos = True
    hellos = [
        pb.RouterHello(router_id="rare", contract_version=CONTRACT_VERSION, report_interval_ms=400),
        pb.RouterHello(router_id="before", contract_version=CONTRACT_VERSION),
    ]
    own: list[pb.ReplicaFrame] = []
    others: list[list[pb.ReplicaFrame]] = [[], []]

    async def read(seen: list[pb.ReplicaFrame], first: pb.RouterFrame, seconds: float) -> None:
        async def frames() -> AsyncIterator[pb.RouterFrame]:
            yield first
            await asyncio.sleep(60)

        async with MEMBER.channel(served.address, NO_PROXY) as channel:
            call = served.stub(channel).Serve(frames(), metadata=METADATA)
            try:
                async with asyncio.timeout(seconds):
                    async for frame in call:
                        seen.append(frame)
            except TimeoutError:
                pass

    async def scenario() -> None:
        streams = [read(seen, pb.RouterFrame(hello=hello), 1.5) for seen, hello in zip(others, hellos, strict=True)]
        busy = pb.RouterFrame(hello=hellos[0], submits=[running])
        await asyncio.gather(read(own, busy, 1.5), *streams)

    asyncio.run(scenario())
    with_tokens = sum(bool(frame.deltas) for frame in own)
    assert with_tokens > 50 and len(own) - with_tokens <= 3, "tokens are sent after each step"
    rare, before = map(len, others)
    assert 3 <= rare <= 8 and before > 50, (rare, before)
    busy = [frame.load.counters.idle_steps for frame in others[1] if frame.load.running]
    assert len(busy) > 50 and len(set(busy)) == 1, "never idle between two of these"
