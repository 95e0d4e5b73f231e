"""Generated messages of peers with a certificate, to a replica: no crash, a status with a sentence, others go on."""

import asyncio
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.callers import CALLERS
from headrace_proto.channel_options import NO_PROXY, OWN_CONNECTION
from headrace_proto.component import Component
from headrace_proto.replica_pb2_grpc import ReplicaStub
from support import identities
from support.hostile_messages import altered, damaged, is_ours, messages
from support.loop_probe import LoopProbe
from support.worker.fake_model import expected
from support.worker.served_engine import ServedEngine

EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(EXAMPLES, max_examples=3000)
MEMORY_BYTES = 256 << 20  # that the process may grow by in a test, by what Hypothesis keeps of its examples, too
FIRST_SECONDS = 0.5  # for the first answer: a hello, or the end
ANSWER_SECONDS = 0.02  # for what follows while a stream stays open
# UNKNOWN would be an exception of a method; INTERNAL one of gRPC.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,  # by the client, after ANSWER_SECONDS
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
METHODS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["Replica"].methods)
LAG_SECONDS = 0.5 if "slipcover" in sys.modules else 0.06  # measured coverage takes up to 0.2 s of it
NEIGHBOUR = b"neighbour's id.."
OWN = b"an attempt's id."
PROMPT = [11, 12, 13, 14, 15]

ROUTER_HELLO = pb.RouterFrame(hello=pb.RouterHello(router_id="hostile", contract_version=CONTRACT_VERSION))
TARGET = pb.TargetHello(
    contract_version=CONTRACT_VERSION,
    identity=pb.ReplicaIdentity(replica_id="b", generation=1, boot_id=b"c" * 16, model="m", revision="r"),
    rendezvous=pb.PairRendezvous(host="127.0.0.1", port=9, token=b"t" * 32),
)
LONG = list(range(20, 60))
SUBMIT = pb.RouterFrame(
    submits=[
        pb.Submit(
            attempt_id=OWN,
            model="m",
            revision="r",
            prompt_token_ids=LONG,
            sampling=pb.Sampling(max_tokens=20, top_p=1, repetition_penalty=1, logit_bias={3: 1.0}),
            source=pb.Source(replica_id="b", address="127.0.0.1:9"),
        )
    ],
    cancels=[pb.Cancel(attempt_id=OWN)],
)
FETCH = pb.TargetFrame(request=pb.FetchRequest(fetch=1, token_ids=LONG))
VALID = {"Serve": SUBMIT, "Transfer": FETCH}
GIVEN: dict[str, SearchStrategy[Any]] = {
    "headrace.v1.Submit.attempt_id": st.sampled_from([NEIGHBOUR, OWN, OWN, OWN]),
    "headrace.v1.Cancel.attempt_id": st.sampled_from([NEIGHBOUR, OWN]),
    "headrace.v1.Submit.model": st.just("m"),
    "headrace.v1.Submit.revision": st.just("r"),
    "headrace.v1.Submit.adapter": st.just(""),
    "headrace.v1.Submit.prompt_token_ids": st.integers(0, 1999),
    "headrace.v1.Submit.output_token_ids": st.integers(0, 1999),
    "headrace.v1.RouterHello.contract_version": st.just(CONTRACT_VERSION),
    "headrace.v1.TargetHello.contract_version": st.just(CONTRACT_VERSION),
    "headrace.v1.Source.address": st.sampled_from(["127.0.0.1:9", "nowhere.invalid:1", "unix:/nowhere", ""]),
    "headrace.v1.FetchRequest.token_ids": st.integers(0, 1999),
    "headrace.v1.PairRendezvous.token": st.just(b"t" * 32),
}
Failures = list[Any]


class _Target:
    """A replica with one attempt of another router, which runs as long as the test."""

    def __init__(self, served: ServedEngine) -> None:
        self.served = served
        self.loop = asyncio.new_event_loop()  # never closed: gRPC may still call it
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.tokens: list[int] = []
        self.finished: list[int] = []
        self._channels: dict[Component, grpc.aio.Channel] = {}
        self._over = asyncio.Event()
        self._began = threading.Event()
        target = pb.TargetFrame(hello=TARGET)
        target.hello.shards.CopyFrom(served.servicer._targets._pair_registry.shards_message)
        self.hellos = {"Serve": ROUTER_HELLO.SerializeToString(), "Transfer": target.SerializeToString()}
        self.neighbour = asyncio.run_coroutine_threadsafe(self._run_neighbour(), self.loop)
        assert self._began.wait(10)

    async def _run_neighbour(self) -> None:
        """One attempt after the other: each answers with the tokens that are expected."""
        async with identities.router().channel(self.served.address, Component.REPLICA, NO_PROXY) as channel:
            stub: Any = ReplicaStub(channel)
            call = stub.Serve()
            await call.write(ROUTER_HELLO)
            await call.read()
            sampling = pb.Sampling(max_tokens=190, top_p=1, repetition_penalty=1)
            submit = pb.Submit(attempt_id=NEIGHBOUR, model="m", prompt_token_ids=PROMPT, sampling=sampling)
            while not self._over.is_set():
                await call.write(pb.RouterFrame(submits=[submit]))
                tokens: list[int] = []
                finish = 0
                while not finish:
                    frame = await call.read()
                    for delta in frame.deltas:
                        tokens += delta.token_ids
                        finish = delta.finish
                    self._began.set()
                self.finished.append(finish)
                if finish != pb.FINISH_REFUSED:  # its queue is full: that is an answer
                    self.tokens = tokens
                    assert tokens == expected(PROMPT, len(tokens))
                await asyncio.sleep(0.01)

    def call(
        self, component: Component, method: str, sent: list[bytes], seconds: float = ANSWER_SECONDS
    ) -> tuple[grpc.StatusCode, str]:
        """The status of a call with these bytes as its messages. seconds: for what follows the first answer."""
        return asyncio.run_coroutine_threadsafe(self._call(component, method, sent, seconds), self.loop).result(20)

    async def _call(
        self, component: Component, method: str, sent: list[bytes], seconds: float
    ) -> tuple[grpc.StatusCode, str]:
        if component not in self._channels:
            options = (*NO_PROXY, *OWN_CONNECTION)
            self._channels[component] = identities.member(component).channel(
                self.served.address, Component.REPLICA, options
            )
        path = f"/headrace.v1.Replica/{method}"
        streams = method in self.hellos
        channel: Any = self._channels[component]
        call: Any = channel.stream_stream(path)() if streams else channel.unary_stream(path)(sent[0])
        try:
            if streams:
                for data in sent:
                    await call.write(data)
            async with asyncio.timeout(FIRST_SECONDS):
                answer = await call.read()
            async with asyncio.timeout(seconds):
                while answer is not grpc.aio.EOF:
                    answer = await call.read()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()
        code, details = await call.code(), await call.details()
        # The client's own words for a write at the time of the end.
        return (grpc.StatusCode.CANCELLED if details == "Internal error from Core" else code), details

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self.neighbour.result(20)
        for channel in self._channels.values():
            asyncio.run_coroutine_threadsafe(channel.close(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


@pytest.fixture
def target(make_served: Callable[..., ServedEngine], caplog: pytest.LogCaptureFixture) -> Iterator[_Target]:
    served = make_served(num_blocks=512, max_waiting=64)
    failures: Failures = []
    served.server._loop.call_soon_threadsafe(
        served.server._loop.set_exception_handler, lambda _, context: failures.append(context)
    )
    made = _Target(served)
    before, probe = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, LoopProbe(served.server._loop)
    yield made
    longest = probe.stop()
    made.close()
    assert longest < LAG_SECONDS
    assert made.tokens, "the neighbour's attempts go on"
    assert set(made.finished) <= {pb.FINISH_LENGTH, pb.FINISH_REFUSED}
    assert served.loop.failure is None and not served.loop.ended.is_set()
    end = time.monotonic() + 5
    while served.bench.engine.has_work or served.bench.kv.pool.used:
        assert time.monotonic() < end, "what a stream requested is released when it ends"
        time.sleep(0.01)
    assert failures == []
    assert [record for record in caplog.records if is_ours(record)] == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY_BYTES


def _sent(method: str, hello: bytes) -> SearchStrategy[list[bytes]]:
    """A hello, valid or not, and frames after it."""
    service = pb.DESCRIPTOR.services_by_name["Replica"].methods_by_name[method]
    any_message = messages(service.input_type, GIVEN).map(lambda message: message.SerializeToString())
    if not hello:
        return (any_message | damaged(b"\x08\x01")).map(lambda data: [data])
    valid = VALID[method]
    frame = altered(valid, GIVEN).map(lambda message: message.SerializeToString())
    frames = st.lists(frame | frame | any_message | damaged(valid.SerializeToString()), max_size=4)
    first = altered(type(valid).FromString(hello), GIVEN).map(lambda message: message.SerializeToString())
    hellos = st.just(hello) | st.just(hello) | first | damaged(hello)
    return st.tuples(hellos, frames).map(lambda parts: [parts[0], *parts[1]])


def _run(target: _Target, method: str, limits: settings) -> None:
    """Calls by the component that may call the method, and by others."""
    own = CALLERS[f"/headrace.v1.Replica/{method}"]

    @limits
    @given(component=st.sampled_from([own, own, own, *Component]), sent=_sent(method, target.hellos.get(method, b"")))
    def check(component: Component, sent: list[bytes]) -> None:
        code, details = target.call(component, method, sent)
        allowed = ALLOWED if component is own else {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.CANCELLED}
        assert code in allowed, (code, details)
        assert code is grpc.StatusCode.OK or details

    check()


@pytest.mark.parametrize("method", METHODS)
def test_a_replica_with_hostile_peers(target: _Target, method: str) -> None:
    _run(target, method, EXAMPLES)


LARGE = {
    "submits": pb.RouterFrame(submits=[pb.Submit(attempt_id=OWN, model="m")] * 20_000),
    "cancels": pb.RouterFrame(cancels=[pb.Cancel(attempt_id=OWN)] * 20_000),
    "tokens": pb.RouterFrame(submits=[pb.Submit(attempt_id=OWN, prompt_token_ids=[300] * 500_000)]),
    "tokens of a fetch": pb.TargetFrame(request=pb.FetchRequest(token_ids=[300] * 500_000)),
}


@pytest.mark.parametrize("message", LARGE.values(), ids=LARGE)
def test_a_large_frame_is_handled_in_parts(target: _Target, message: Any) -> None:
    method = "Serve" if isinstance(message, pb.RouterFrame) else "Transfer"
    component = CALLERS[f"/headrace.v1.Replica/{method}"]
    code, _ = target.call(component, method, [target.hellos[method], message.SerializeToString()], 1.0)
    assert code in ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_replica_with_many_hostile_peers(target: _Target, method: str) -> None:
    _run(target, method, MANY)
