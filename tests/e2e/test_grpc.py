"""The gRPC port through reflection, without our stubs."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.e2e.headrace_process import Serve

SERVICE = "headrace.v1.Inference"


class Reflected:
    """A client that uses only the server's own description of a service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        self._pool = descriptor_pool.DescriptorPool()

    def services(self) -> set[str]:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = self._reflect(iter([request]))
        return {service.name for service in answer.list_services_response.service}

    def load_symbol(self, symbol: str) -> None:
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        (answer,) = self._reflect(iter([request]))
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            self._pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))

    def call(self, method: str, **fields: Any) -> Any:
        described = self._pool.FindServiceByName(SERVICE).methods_by_name[method]
        request = message_factory.GetMessageClass(described.input_type)(**fields)
        answer = message_factory.GetMessageClass(described.output_type)
        opened: Any = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        call: Any = opened(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        result = call(request, timeout=60)
        return iter(result if described.server_streaming else [result])


@pytest.fixture
def channel(server: Serve) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as opened:
        yield opened


@pytest.fixture
def reflected(channel: grpc.Channel) -> Reflected:
    client = Reflected(channel)
    client.load_symbol(SERVICE)
    return client


def test_generate_equals_http(reflected: Reflected, http: httpx.Client) -> None:
    assert {SERVICE, "grpc.health.v1.Health"} <= reflected.services()
    question = "What is the capital of France? Answer in one sentence."
    options = {"max_tokens": 24, "temperature": 0.0}
    events = list(
        reflected.call(
            "Generate",
            model="smollm2",
            chat={"messages": [{"role": "user", "content": question}]},
            options=options,
        )
    )
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], **options}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert "".join(event.text for event in events) == whole["choices"][0]["message"]["content"]
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop"] and events[-1].finish_reason
    assert events[-1].usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    assert events[-1].usage.completion_tokens == whole["usage"]["completion_tokens"]
    (models,) = reflected.call("ListModels")
    assert [(model.id, model.max_model_len) for model in models.models] == [("smollm2", 2048)]


def test_health(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_cancelled_call_frees_its_blocks(reflected: Reflected, metrics: Any, eventually: Any) -> None:
    options = {"max_tokens": 1500, "ignore_eos": True}
    events = reflected.call("Generate", model="smollm2", prompt="On and on", options=options)
    next(events)
    assert metrics()["headrace_requests_in_flight"] >= 1
    events.cancel()
    eventually(lambda: metrics().busy == {}, 3, "that a cancelled call frees everything")


def test_structured_output_and_log_probabilities_of_prompts(reflected: Reflected, http: httpx.Client) -> None:
    options = {"structured_outputs": {"choice": ["yes", "no"]}, "prompt_logprobs": 1, "temperature": 0.0}
    events = list(reflected.call("Generate", model="smollm2", prompt="Is it so?", options=options))
    body = {"model": "smollm2", "prompt": "Is it so?", **options}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert "".join(event.text for event in events) == choice["text"] in ("yes", "no")
    found = [entry for event in events for entry in event.prompt_logprobs]
    expected = [entry[str(one.token_id)] for one, entry in zip(found, choice["prompt_logprobs"][1:], strict=True)]
    assert [one.logprob for one in found] == [entry["logprob"] for entry in expected]
    assert all(len(one.top_ids) == len(one.top_logprobs) == 1 for one in found)
