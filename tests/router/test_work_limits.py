"""Work that a request causes before it is admitted is bounded."""

from typing import Any

import grpc
import pytest

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
    harness.start([make_replica()], limits={"body_seconds": 0.3})
    code = harness.call(_status_without_request(harness.router.grpc_port, GENERATE))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_call_without_key_is_refused_before_its_request(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], auth={"keys": ["a-key-of-a-tenant"]})
    for method in (GENERATE, "/headrace.v1.Inference/ListModels", "/no.such/Method"):
        code = harness.call(_status_without_request(harness.router.grpc_port, method))
        assert code is grpc.StatusCode.UNAUTHENTICATED, method


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
