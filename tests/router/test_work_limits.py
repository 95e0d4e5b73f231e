"""Work that a request causes before it is admitted is bounded."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from headrace_router.api.body_budget import BodyBudget
from headrace_router.api.http import strict_json
from headrace_router.core.errors import OverloadedError
from headrace_router.core.limits import Limits

GENERATE = "/headrace.v1.Inference/Generate"


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
