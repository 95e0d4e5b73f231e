"""The public gRPC API: the same answers and errors as HTTP, with gRPC status codes."""

from typing import Any

import grpc
import pytest

from headrace_proto.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateOptions,
    GenerateRequest,
    ListModelsRequest,
    TokenIds,
)
from headrace_proto.inference_pb2_grpc import InferenceStub


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


def test_models_are_listed(shared: Any) -> None:
    async def call() -> Any:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{shared.router.grpc_port}") as channel:
            return await InferenceStub(channel).ListModels(ListModelsRequest())

    (model,) = shared.call(call()).models
    assert (model.id, model.max_model_len) == ("tiny", 256)


def test_the_request_of_a_client_that_does_not_read_is_freed(harness: Any, make_replica: Any, eventually: Any) -> None:
    harness.start([make_replica(reply="word " * 60_000, max_model_len=1_000_000)], limits={"write_seconds": 0.5})
    options = GenerateOptions(max_tokens=10_000, logprobs=5, n=4)
    with grpc.insecure_channel(
        f"127.0.0.1:{harness.router.grpc_port}", options=[("grpc.http2.bdp_probe", 0)]
    ) as channel:
        stub: Any = InferenceStub(channel)
        events = stub.Generate(GenerateRequest(model="tiny", prompt="x", options=options), timeout=60)
        assert next(events)
        admission = harness.router.services.admission
        assert admission.running == 1
        eventually(lambda: admission.running == 0)
        events.cancel()
