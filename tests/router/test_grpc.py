"""The public gRPC API: the same answers and errors as HTTP, with gRPC status codes."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from headrace_proto.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateOptions,
    GenerateRequest,
    ListModelsRequest,
    TokenIds,
)
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_router.api.client_address import client_of_peer
from headrace_router.api.grpc.call_shares import KEYLESS_CALLS, KEYLESS_WATCHERS, _keyless
from headrace_router.core.limits import TENANT_SHARE


def _generate(harness: Any, request: GenerateRequest, cancel_after: int | None = None) -> list[Any]:
    async def call() -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            stream = InferenceStub(channel).Generate(request)
            events = []
            async for event in stream:
                events.append(event)
                if cancel_after is not None and len(events) >= cancel_after:
                    stream.cancel()
                    break
            return events

    return harness.call(call())


CHAT = ChatMessages(messages=[ChatMessage(role="user", content="hi")])


def test_events_add_up_to_the_http_answer(shared: Any, expected_reply: str) -> None:
    events = _generate(shared, GenerateRequest(model="tiny", chat=CHAT))
    assert "".join(event.text for event in events) == expected_reply
    assert [event.finish_reason for event in events] == [""] * (len(events) - 1) + ["stop"]
    with shared.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    last = events[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert sum(len(event.token_ids) for event in events) == last.completion_tokens
    assert not any(event.HasField("usage") for event in events[:-1])


def test_options_and_several_choices(shared: Any) -> None:
    options = GenerateOptions(max_tokens=5, n=2, logprobs=1, stop=["zzz"], logit_bias={3: 1.0}, seed=1)
    events = _generate(shared, GenerateRequest(model="tiny", prompt_token_ids=TokenIds(ids=[5, 6]), options=options))
    for index in (0, 1):
        own = [event for event in events if event.choice_index == index]
        assert sum(len(event.token_ids) for event in own) == sum(len(event.logprobs) for event in own) == 5
        assert own[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (GenerateRequest(model="other", prompt="x"), grpc.StatusCode.NOT_FOUND),
        (GenerateRequest(model="tiny"), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(prompt="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model="tiny", prompt=""), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model="tiny", chat=ChatMessages()), grpc.StatusCode.INVALID_ARGUMENT),
        (
            GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(temperature=float("nan"))),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(seed=2**63)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(max_tokens=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (GenerateRequest(model="tiny", prompt_token_ids=TokenIds(ids=[2**31])), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model="tiny", prompt_token_ids=TokenIds(ids=[5] * 300)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_errors_are_status_codes(shared: Any, request_: GenerateRequest, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _generate(shared, request_)
    assert error.value.code() is code and error.value.details()


def test_full_and_lost_replicas(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(refuse=True)
    harness.start([replica])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _generate(harness, GenerateRequest(model="tiny", prompt="x"))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    harness.call(replica.kill())
    eventually(lambda: not harness.router.services.fleet.ready)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _generate(harness, GenerateRequest(model="tiny", prompt="x"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_cancelled_call_cancels_at_the_replica(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(token_seconds=0.05)
    harness.start([replica])
    _generate(harness, GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(max_tokens=60)), 2)
    eventually(lambda: replica.cancels == [replica.submits[0].attempt_id])
    eventually(lambda: harness.router.services.admission.running == 0)
    with harness.client() as client:
        eventually(lambda: "headrace_requests_cancelled_total 1.0" in client.get("/metrics").text)


@pytest.mark.faults("router")
def test_bursts_of_calls_without_a_key_cancel_no_call_with_one(harness: Any, make_replica: Any) -> None:
    """More of them wait than gRPC's default allows, on a few connections."""
    harness.start([make_replica()], auth={"keys": ["secret-key"]})
    port = harness.router.grpc_port
    own = (("grpc.use_local_subchannel_pool", 1),)

    async def flood(stop: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            call: Any = channel.stream_unary("/x/y")
            while not stop.is_set():
                calls = [call(iter(())) for _ in range(256)]
                await asyncio.gather(*calls, return_exceptions=True)

    async def scenario() -> int:
        stop = asyncio.Event()
        floods = [asyncio.create_task(flood(stop)) for _ in range(16)]
        answered = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            stub = InferenceStub(channel)
            for _ in range(5):
                await asyncio.sleep(0.3)
                request = GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(max_tokens=2))
                events = [
                    event async for event in stub.Generate(request, metadata=(("authorization", "Bearer secret-key"),))
                ]
                answered += bool(events)
        stop.set()
        await asyncio.gather(*floods, return_exceptions=True)
        return answered

    assert asyncio.run(scenario()) == 5


def test_models_are_listed(shared: Any) -> None:
    async def call() -> Any:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{shared.router.grpc_port}") as channel:
            return await InferenceStub(channel).ListModels(ListModelsRequest())

    (model,) = shared.call(call()).models
    assert (model.id, model.max_model_len) == ("tiny", 256)


def test_open_calls_of_one_key_leave_places_to_another(harness: Any, make_replica: Any) -> None:
    """The calls send no request: they wait for it as long as `body_seconds`."""
    limits = {"max_concurrent_requests": 1, "max_queued_requests": 1}
    harness.start([make_replica()], auth={"keys": ["first-key", "second-key"]}, limits=limits)
    share = int((2 / TENANT_SHARE + KEYLESS_WATCHERS + KEYLESS_CALLS) * TENANT_SHARE)

    def key(name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {name}-key"),)

    async def call() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            generate: Any = channel.stream_stream("/headrace.v1.Inference/Generate")
            stub = InferenceStub(channel)

            async def answer(name: str) -> list[Any]:
                request = GenerateRequest(model="tiny", chat=CHAT)
                return [event async for event in stub.Generate(request, metadata=key(name))]

            silent = [generate(metadata=key("first")) for _ in range(share)]
            for one in silent:
                await one.wait_for_connection()
            with pytest.raises(grpc.aio.AioRpcError, match="too many calls open") as raised:
                while True:  # until the server has all of them
                    await stub.ListModels(ListModelsRequest(), metadata=key("first"))
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await answer("second")
            for one in silent:
                one.cancel()
            await asyncio.sleep(0.3)
            assert await answer("first")

    harness.call(call())


CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
FLOOD = 200  # calls: more than a server with two places has


@contextlib.asynccontextmanager
async def _calls_without_request(port: int, method: str) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        make: Any = channel.stream_stream
        calls = [make(method)() for _ in range(FLOOD)]
        for one in calls:
            await one.wait_for_connection()
        yield


@contextlib.asynccontextmanager
async def _watchers(port: int) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [HealthStub(channel).Watch(HealthCheckRequest()) for _ in range(FLOOD)]  # type: ignore[no-untyped-call]
        for one in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await one.read()
        yield


def _frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """Of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def _literal(name: bytes, value: bytes) -> bytes:
    """Of HPACK, not indexed (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@contextlib.asynccontextmanager
async def _checks_whose_answers_cannot_be_sent(port: int) -> AsyncIterator[None]:
    """The client's window has no bytes."""
    pairs = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", CHECK.encode()), (b":authority", b"localhost")]
    pairs += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    head = b"".join(_literal(*pair) for pair in pairs)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, struct.pack(">HI", 4, 0)))
    for stream in range(1, 2 * FLOOD, 2):
        writer.write(_frame(1, 4, stream, head) + _frame(0, 1, stream, bytes(5)))
    await writer.drain()
    await reader.readexactly(9)
    yield
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "flood",
    [
        lambda port: _calls_without_request(port, CHECK),
        lambda port: _calls_without_request(port, WATCH),
        _watchers,
        _checks_whose_answers_cannot_be_sent,
    ],
    ids=["checks without request", "watches without request", "watches", "checks that are not read"],
)
def test_calls_without_a_key_take_no_place_of_one_with_a_key(harness: Any, make_replica: Any, flood: Any) -> None:
    limits = {"max_concurrent_requests": 1, "max_queued_requests": 1}
    harness.start([make_replica()], auth={"keys": ["first-key"]}, limits=limits)
    port, key = harness.router.grpc_port, (("authorization", "Bearer first-key"),)

    async def call() -> None:
        async with flood(port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health, inference = HealthStub(channel), InferenceStub(channel)  # type: ignore[no-untyped-call]
            for _ in range(3):
                assert (await inference.ListModels(ListModelsRequest(), metadata=key)).models
                assert await health.Check(HealthCheckRequest(), metadata=key)
                assert await health.Watch(HealthCheckRequest(), metadata=key).read()
                request = GenerateRequest(model="tiny", chat=CHAT)
                assert [event async for event in inference.Generate(request, metadata=key)]
                await asyncio.sleep(0.05)

    harness.call(call())


@contextlib.asynccontextmanager
async def _port_from_another_address(port: int) -> AsyncIterator[int]:
    """Whose connections reach the server from 127.0.0.2."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    "flood", [_watchers, _checks_whose_answers_cannot_be_sent], ids=["watches", "checks that are not read"]
)
def test_calls_without_a_key_of_one_address_leave_places_to_others(harness: Any, make_replica: Any, flood: Any) -> None:
    """The probe of a kubelet is answered."""
    harness.start([make_replica()], auth={"keys": ["first-key"]})
    port = harness.router.grpc_port

    async def call() -> None:
        async with (
            flood(port),
            _port_from_another_address(port) as other,
            grpc.aio.insecure_channel(f"127.0.0.1:{other}") as channel,
        ):
            await asyncio.sleep(0.3)  # until the flood has its places
            health = HealthStub(channel)  # type: ignore[no-untyped-call]
            watches = [health.Watch(HealthCheckRequest()) for _ in range(3)]
            for watch in watches:
                assert await watch.read()
            for _ in range(3):
                assert await health.Check(HealthCheckRequest())

    harness.call(call())


def test_every_address_has_as_many_calls_without_a_key_as_are_free() -> None:
    calls = _keyless(64)
    counts = []
    for caller in "abcdefgh":
        counts.append(0)
        while calls.enter(caller):
            counts[-1] += 1
    assert counts == [32, 16, 8, 4, 2, 1, 1, 0]
    calls.leave("a")
    assert not calls.enter("a") and calls.enter("h")


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:192.0.2.1:50000", "192.0.2.1"),
        ("ipv6:%5B2001:db8:0:1::2%5D:50000", "2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:1:3::4]:50000", "2001:db8:0:1::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50000", "fe80::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:50000", "192.0.2.1"),
        ("unix:/run/a.sock", "unix"),
        ("", ""),
    ],
)
def test_the_client_of_a_peer(peer: str, client: str) -> None:
    assert client_of_peer(peer) == client
