"""Work that a request causes before it is admitted, and on the event loop, is bounded."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import orjson
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_proto.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateOptions,
    GenerateRequest,
    TokenIds,
)
from headrace_router.access.auth import Tenant
from headrace_router.api.body_budget import BodyBudget
from headrace_router.api.grpc.call_shares import KEYLESS_WATCHERS
from headrace_router.api.grpc.wire_size import WireError, check_values
from headrace_router.api.http import strict_json
from headrace_router.api.work_slices import BLOCK_BYTES, WorkSlices
from headrace_router.core.account import TimeAccount
from headrace_router.core.errors import OverloadedError
from headrace_router.core.limits import Limits
from headrace_router.dispatch import running_request
from headrace_router.validation.bodies import CompletionBody
from headrace_router.validation.body_errors import parse_body

GENERATE = "/headrace.v1.Inference/Generate"
EMPTY_MESSAGES = GenerateRequest(model="tiny", chat=ChatMessages()).SerializeToString()


# gRPC


def _method(make: Any, name: str) -> Any:
    """A method that sends and receives bytes as they are."""
    return make(name)


def _call(harness: Any, data: bytes, method: str = GENERATE) -> list[bytes]:
    async def call() -> list[bytes]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            return [event async for event in _method(channel.unary_stream, method)(data)]

    found: list[bytes] = harness.call(call())
    return found


def _many_messages(count: int) -> bytes:
    chat = b"\x0a\x00" * count
    length = b""
    size = len(chat)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b'\x0a\x04tiny"' + length + bytes([size]) + chat


def test_structure_is_counted_before_a_message_is_parsed(shared: Any) -> None:
    data = _many_messages(2_000_000)
    assert len(data) > 3_900_000
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _call(shared, data)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 131072 values" in str(error.value.details())


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05tiny", b"\x0b", b"\xff" * 20, b'"\x02\x0a\x05', b'"\x01\x0a'])
def test_malformed_messages_are_refused_by_name(shared: Any, data: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _call(shared, data)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "protobuf" in str(error.value.details())


def test_values_of_a_message() -> None:
    def count(message: GenerateRequest) -> int:
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high) // 2
            try:
                check_values(message.SerializeToString(), GenerateRequest.DESCRIPTOR, middle)
                high = middle
            except WireError:
                low = middle + 1
        return low

    assert count(GenerateRequest(model="m", prompt="x" * 10_000)) == 2
    assert count(GenerateRequest(prompt_token_ids=TokenIds(ids=[5, 500, 500_000] * 100))) == 8 + 1 + 300
    assert count(GenerateRequest(chat=ChatMessages(messages=[ChatMessage(role="user", content="x")] * 5))) == 8 + 5 * 10
    assert count(GenerateRequest(options=GenerateOptions(logit_bias={1: 1.0, 2: 1.0}, stop_token_ids=[1, 2]))) == (
        8 + 2 * 10 + 3
    )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        check_values(data, GenerateRequest.DESCRIPTOR, 1024)
    except WireError:
        return
    assert isinstance(data, bytes)


_text = st.text(max_size=5)
_messages = st.builds(
    GenerateRequest,
    model=_text,
    chat=st.builds(ChatMessages, messages=st.lists(st.builds(ChatMessage, role=_text, content=_text), max_size=20)),
    options=st.builds(
        GenerateOptions,
        stop=st.lists(_text, max_size=5),
        stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
        logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-5, 5), max_size=5),
        seed=st.integers(0, 2**64 - 1),
    ),
)


@settings(max_examples=100, deadline=None)
@given(_messages)
def test_every_valid_message_passes(message: GenerateRequest) -> None:
    check_values(message.SerializeToString(), GenerateRequest.DESCRIPTOR, 1024)


async def _status_without_request(port: int, method: str) -> grpc.StatusCode:
    """The status of a call that sends no request."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = _method(channel.stream_stream, method)()
        return await call.code()


def test_a_call_without_its_request_ends(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], limits={"body_seconds": 0.3, "header_seconds": 0.3})
    for method in (GENERATE, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
        code = harness.call(_status_without_request(harness.router.grpc_port, method))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED, method


def test_a_call_without_key_is_refused_before_its_request(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], auth={"keys": ["a-key-of-a-tenant"]})
    for method in (GENERATE, "/headrace.v1.Inference/ListModels", "/no.such/Method"):
        code = harness.call(_status_without_request(harness.router.grpc_port, method))
        assert code is grpc.StatusCode.UNAUTHENTICATED, method


def test_small_requests_are_small(shared: Any) -> None:
    for method in ("/grpc.health.v1.Health/Check", "/headrace.v1.Inference/ListModels"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            _call(shared, b"\x0a\x00" * 1000, method)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_streams_of_health_are_bounded(shared: Any, eventually: Any) -> None:
    async def watch() -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{shared.router.grpc_port}") as channel:
            calls = [HealthStub(channel).Watch(HealthCheckRequest()) for _ in range(KEYLESS_WATCHERS // 2 + 3)]  # type: ignore[no-untyped-call]
            codes = []
            for call in calls:
                try:
                    await asyncio.wait_for(call.read(), 5)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
            return codes

    assert shared.call(watch()) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
    assert _call(shared, b"", "/grpc.health.v1.Health/Check")


def test_a_call_whose_client_does_not_read_ends(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica(reply="word " * 3000, max_model_len=100_000, tokens_per_delta=1000)
    harness.start([replica], limits={"write_seconds": 0.3})
    request = GenerateRequest(model="tiny", prompt="x", options=GenerateOptions(n=64))

    async def call() -> None:
        narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}", narrow) as channel:
            call = _method(channel.unary_stream, GENERATE)(request.SerializeToString())
            await call.read()
            for _ in range(100):
                if not harness.router.services.admission.running:
                    return
                await asyncio.sleep(0.1)
            pytest.fail("the call is still running")

    harness.call(call())
    with harness.client() as client:
        eventually(lambda: "headrace_requests_cancelled_total 1.0" in client.get("/metrics").text)


# HTTP bodies


def test_json_values_are_counted_before_parsing() -> None:
    text = json.dumps({"text": 'a, "b", [c], {d}, \\' * 1000}).encode()
    assert strict_json.parse(text, 10, 1024)["text"].count(",") == 4000, "what is in strings is no structure"
    for body in (
        b"[" + b"1," * 1024 + b"1]",
        b"[" + b"[]," * 130 + b"[]]",
        b'{"a":"' + b"\\n" * 9000 + b'"}',
        b"[" + b'"",' * 1024 + b'""]',
        b'["' + b'\\"' * 100 + b'"' + b",1" * 1024 + b"]",
    ):
        with pytest.raises(strict_json.JsonError, match="more than 1024 values"):
            strict_json.parse(body, 10, 1024)
    assert len(strict_json.parse(b"[" + b"1," * 1000 + b"1]", 10, 1024)) == 1001


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet='",[]{}\\ab\n', max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(alphabet='",[]{}\\ab', max_size=4), inner),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(_json, st.booleans())
def test_no_value_is_counted_twice(value: Any, ascii_only: bool) -> None:
    """A limit that the values themselves keep is never exceeded by what is in their strings."""

    def cost(entry: Any) -> int:
        if isinstance(entry, dict):
            return 8 + sum(map(cost, entry.values())) + sum(map(len, entry))
        if isinstance(entry, list):
            return 8 + sum(map(cost, entry))
        return 1 + (len(entry) if isinstance(entry, str) else 0)  # at most one escape per character

    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert strict_json.parse(body, 100, cost(value)) == value


def test_bodies_count_until_they_are_tokenized(harness: Any, make_replica: Any, eventually: Any) -> None:
    harness.start([make_replica()], limits={"total_body_bytes": 5000, "tokenize_threads": 1})
    router = harness.router
    go_on = threading.Event()
    blocked = asyncio.run_coroutine_threadsafe(router.services.pool.run(go_on.wait, "other", 1), harness.loop)
    body = {"model": "tiny", "prompt": "x", "user": "", "max_tokens": 1, "stop": ["y" * 1000] * 3}
    with harness.client() as client, ThreadPoolExecutor(1) as threads:
        try:
            first = threads.submit(client.post, "/v1/completions", json=body)
            eventually(lambda: router.services.admission.running == 1)
            second = client.post("/v1/completions", json=body)
            assert second.status_code == 503 and "bodies" in second.json()["error"]["message"]
        finally:
            go_on.set()
        assert first.result(30).status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200
    assert blocked.result(30) and router.services.body_budget.held == 0


def test_a_share_is_released_once() -> None:
    budget = BodyBudget(Limits(total_body_bytes=2048))
    first, second = budget.share("a"), budget.share("a")
    first.add(2000)
    with pytest.raises(OverloadedError):
        second.add(100)
    first.release()
    first.release()
    second.add(100)
    assert budget.held == 100


def test_bodies_of_one_tenant_leave_room_for_another() -> None:
    budget = BodyBudget(Limits(total_body_bytes=4000))
    flood, more, other = budget.share("flood"), budget.share("flood"), budget.share("other")
    flood.add(4000)
    for share, size in ((more, 1), (other, 1001)):
        with pytest.raises(OverloadedError):
            share.add(size)
    other.add(1000)
    with pytest.raises(OverloadedError):
        budget.share("third").add(1)  # the reserve is bounded, too
    flood.release()
    other.add(3000)
    with pytest.raises(OverloadedError):
        other.add(1)
    other.release()
    assert budget.held == 0


# log-probabilities and echo


def test_logprobs_are_bounded(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], limits={"logprob_entries": 100})
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    with harness.client() as client:
        answer = client.post("/v1/chat/completions", json={**chat, "top_logprobs": 4, "n": 2, "max_tokens": 11})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        assert "10 tokens" in answer.json()["error"]["message"]
        answer = client.post("/v1/chat/completions", json={**chat, "top_logprobs": 4, "n": 2, "max_tokens": 10})
        assert answer.status_code == 200
        answer = client.post("/v1/chat/completions", json={**chat, "top_logprobs": 9})
        assert answer.json()["usage"]["completion_tokens"] == 10, "the default is lowered"
        answer = client.post("/v1/chat/completions", json={**chat, "logprobs": False, "max_tokens": 101})
        assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_large_answers_are_made_in_slices(harness: Any, make_replica: Any, path: str, stream: bool) -> None:
    """And they are the same as small ones: every token has its entries, in valid JSON."""
    tokens = 1500
    replica = make_replica(reply="word " * tokens, max_model_len=10_000, tokens_per_delta=tokens)
    harness.start([replica])
    body: dict[str, Any] = {"model": "tiny", "n": 2, "max_tokens": tokens, "stream": stream}
    if path == "/v1/completions":
        body |= {"prompt": "x", "logprobs": 20}
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    writes: list[int] = []
    with harness.client() as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        raw = b""
        for piece in answer.iter_raw():
            writes.append(len(piece))
            raw += piece
    assert "content-length" not in answer.headers
    objects = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")] if stream else []
    choices = [choice for one in (objects or [orjson.loads(raw)]) for choice in one["choices"]]
    for index in (0, 1):
        own = [choice["logprobs"] for choice in choices if choice["index"] == index and choice["logprobs"]]
        if path == "/v1/completions":
            assert sum(len(entry["top_logprobs"]) for entry in own) == tokens
            assert all(len(top) >= 20 for entry in own for top in entry["top_logprobs"])
            assert [len(entry["tokens"]) for entry in own] == [len(entry["text_offset"]) for entry in own]
        else:
            assert sum(len(entry["content"]) for entry in own) == tokens
            assert all(len(token["top_logprobs"]) == 20 for entry in own for token in entry["content"])


def test_slices_leave_the_event_loop_to_others() -> None:
    slices, turns, blocks = WorkSlices(), 0, 0

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(0.001)
            yield b"x" * 1000

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(block: bytes) -> None:
        nonlocal blocks
        blocks += 1
        assert len(block) <= BLOCK_BYTES + 1000

    async def main() -> None:
        other = asyncio.create_task(count_turns())
        await asyncio.gather(*(slices.send(pieces(), send) for _ in range(4)))
        other.cancel()

    asyncio.run(main())
    assert blocks >= 4 * 25, "a slice is about 2 ms of work"
    assert turns >= blocks - 4, "after the first slices there is one per turn of the loop"


def test_an_echo_is_made_choice_by_choice(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "tiny", "prompt": "word " * 20, "echo": True, "n": 128, "max_tokens": 1, "stream": True}
    sizes: list[int] = []
    send = WorkSlices.send

    async def recording(self: WorkSlices, pieces: Iterator[bytes], deliver: Any) -> None:
        def counted() -> Iterator[bytes]:
            for piece in pieces:
                sizes.append(len(piece))
                yield piece

        await send(self, counted(), deliver)

    monkeypatch.setattr(WorkSlices, "send", recording)
    with shared.client() as client:
        text = client.post("/v1/completions", json=body).text
    assert text.count('"text":"word') == 128 and max(sizes) < 1000


def test_choices_begin_in_slices_and_a_cancel_reaches_them(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_request, "SLICE_SECONDS", 0)
    began: list[int] = []
    cancelled: list[int] = []

    async def main() -> None:
        services = shared.router.services
        body = parse_body(CompletionBody, {"model": "tiny", "prompt": "x", "n": 16}, Limits())
        request = await services.preparer.prepare(body, Tenant("name", b""), "label")
        running = running_request.RunningRequest(
            request, services.placement, services.metrics, services.config, services.turns, TimeAccount("label", 0.0)
        )
        runs = [
            SimpleNamespace(begin=lambda i=i: began.append(i), cancel=lambda i=i: cancelled.append(i))
            for i in range(16)
        ]
        monkeypatch.setattr(running, "_runs", runs)
        task = asyncio.create_task(running.__aenter__())
        while len(began) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(began) == 5, "others run between the choices"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    shared.call(main())
    assert began == list(range(5)) and cancelled == list(range(16))
