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
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.bodies import ChatMessage as ChatRecord
from support.router.fake_replica import TOOL_TEMPLATE


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


# What HTTP's fields without one of the same name are over gRPC.
ELSEWHERE = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "prompt": "prompt",
    "messages": "messages",
    **{name: "structured_outputs" for name in ("response_format", *(f"guided_{kind}" for kind in ("json", "regex")))},
    **{name: "structured_outputs" for name in ("guided_choice", "guided_grammar")},
    "best_of": "n",  # it may only equal n
}
ALWAYS = {"stream", "stream_options", "return_token_ids"}


def test_each_field_of_http_is_there() -> None:
    messages = (GenerateRequest, ChatMessages, GenerateOptions)
    known = {name for message in messages for name in message.DESCRIPTOR.fields_by_name}
    for body in (ChatBody, CompletionBody):
        missing = {name for name in body.model_fields if name not in ALWAYS and ELSEWHERE.get(name, name) not in known}
        assert not missing, missing
    assert {*ChatRecord.model_fields} - {"reasoning"} <= {*ChatMessage.DESCRIPTOR.fields_by_name}


def test_fields_that_only_chats_have(harness: Any, make_replica: Any) -> None:
    template = TOOL_TEMPLATE + "{{ documents | tojson }}{% for message in messages %}{{ message.name }}{% endfor %}"
    replica = make_replica(reply="<think>hm</think>yes", chat_template=template)
    harness.start([replica], policy="session")
    chat = ChatMessages(
        messages=[ChatMessage(role="user", content="hi", name="ann")],
        documents=['{"text": "a fact"}'],
        include_reasoning=False,
        max_reasoning_tokens=9,
        add_generation_prompt=False,
        metadata={"a": "b"},
        safety_identifier="me",
        prompt_cache_key="mine",
    )
    options = GenerateOptions(user="me", session_id="other")
    events = _generate(harness, GenerateRequest(model="tiny", chat=chat, options=options))
    assert "".join(event.text for event in events) == "yes"
    assert not any(event.reasoning_content for event in events), "it is left out"
    prompt = replica.tokenizer.decode(replica.submits[-1].prompt_token_ids, skip_special_tokens=False)
    assert '[{"text": "a fact"}]' in prompt and prompt.endswith("ann") and "assistant" not in prompt
    chat = ChatMessages(messages=[ChatMessage(role="assistant", content="The sky is")], continue_final_message=True)
    _generate(harness, GenerateRequest(model="tiny", chat=chat))
    prompt = replica.tokenizer.decode(replica.submits[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("The sky is")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _generate(harness, GenerateRequest(model="tiny", chat=ChatMessages(messages=CHAT.messages, documents=["x"])))
    assert "'documents' is no JSON object" in (error.value.details() or "")


def test_an_echo_and_alternatives(shared: Any, expected_reply: str) -> None:
    options = GenerateOptions(echo=True, max_tokens=200, n=2)
    events = _generate(shared, GenerateRequest(model="tiny", prompt="Say: ", options=options))
    for index in (0, 1):
        text = "".join(event.text for event in events if event.choice_index == index)
        assert text == f"Say: {expected_reply}"
    options = GenerateOptions(logprobs=2, max_tokens=3)
    events = _generate(shared, GenerateRequest(model="tiny", prompt="x", options=options))
    entries = [entry for event in events for entry in event.logprobs]
    assert [entry.token_id for entry in entries] == [token for event in events for token in event.token_ids]
    assert all(len(entry.top_ids) == len(entry.top_logprobs) for entry in entries) and entries[0].logprob <= 0


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
