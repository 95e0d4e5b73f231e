"""Options that a request omits have the model's default, else the API's; its own values override both."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from headrace_proto.inference_pb2 import GenerateOptions, GenerateRequest, ListModelsRequest
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_proto.replica_pb2 import GenerationDefaults, Sampling
from headrace_router.core.limits import Limits
from headrace_router.core.sampling_options import SamplingOptions

DEFAULTS: dict[str, Any] = {
    "max_tokens": 21,
    "temperature": 0.25,
    "top_p": 0.75,
    "top_k": 30,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.375,
}
OWN: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
API = OWN | {"temperature": 1.0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


@pytest.fixture
def served(harness: Any, make_replica: Callable[..., Any]) -> Any:
    harness.start([make_replica(defaults=GenerationDefaults(**DEFAULTS))])
    return harness


def _sent(served: Any) -> dict[str, Any]:
    """The options of the newest submit that a model may have defaults for."""
    sampling: Sampling = served.replicas[0].submits[-1].sampling
    return {name: getattr(sampling, name) for name in SamplingOptions.model_fields}


def test_every_option_with_a_possible_default_is_tested_and_in_the_protocol() -> None:
    names = set(SamplingOptions.model_fields)
    assert names == set(DEFAULTS) == set(OWN)
    assert names == {field.name for field in GenerationDefaults.DESCRIPTOR.fields}
    assert names <= {field.name for field in GenerateOptions.DESCRIPTOR.fields}


def test_an_omitted_option_has_the_models_default(served: Any) -> None:
    with served.client() as client:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert client.post(path, json=body).status_code == 200
            assert _sent(served) == DEFAULTS, path
            nulls = dict.fromkeys(DEFAULTS)
            assert client.post(path, json=body | nulls).status_code == 200
            assert _sent(served) == DEFAULTS, path


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_a_requests_own_value_overrides_the_default_even_if_it_is_neutral(served: Any, name: str) -> None:
    with served.client() as client:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert client.post(path, json=body | {name: OWN[name]}).status_code == 200
            assert _sent(served) == DEFAULTS | {name: OWN[name]}, path


def test_without_defaults_options_are_the_apis(harness: Any, make_replica: Callable[..., Any]) -> None:
    harness.start([make_replica()])
    with harness.client() as client:
        prompt = client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
        assert _sent(harness) == API | {"max_tokens": 256 - prompt}
        client.post("/v1/completions", json=TEXT)
        assert _sent(harness) == API | {"max_tokens": 16}
        assert client.get("/v1/models").json()["data"][0]["defaults"] == {}


def test_grpc_has_the_same_defaults(served: Any) -> None:
    async def call(**options: Any) -> Any:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.router.grpc_port}") as channel:
            stub = InferenceStub(channel)
            asked = GenerateRequest(model="tiny", prompt="hi", options=GenerateOptions(**options))
            async for _ in stub.Generate(asked):
                pass
            return await stub.ListModels(ListModelsRequest())

    (model,) = served.call(call()).models
    assert _sent(served) == DEFAULTS
    assert model.defaults == GenerateOptions(**DEFAULTS)
    served.call(call(temperature=0.0, max_tokens=5))
    assert _sent(served) == DEFAULTS | {"temperature": 0.0, "max_tokens": 5}


def test_models_show_them(served: Any) -> None:
    with served.client() as client:
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["defaults"] == DEFAULTS and listed["max_model_len"] == 256
        assert client.get("/v1/models/tiny").json() == listed


def test_the_default_length_is_bounded_by_context_and_limits(harness: Any, make_replica: Callable[..., Any]) -> None:
    defaults = GenerationDefaults(max_tokens=1000)
    harness.start([make_replica(defaults=defaults)], limits=Limits(output_tokens=300))
    with harness.client() as client:
        prompt = client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
        assert _sent(harness)["max_tokens"] == 256 - prompt  # what the context has left
        assert client.post("/v1/chat/completions", json=CHAT | {"n": 4}).status_code == 200
        assert _sent(harness)["max_tokens"] == 75  # what the limit leaves to each of four choices


@pytest.mark.parametrize("asked", [65_535, 256, 250])
def test_an_answer_is_bounded_by_what_the_context_has_left(
    harness: Any, make_replica: Callable[..., Any], asked: int
) -> None:
    """Agents send more than many contexts have. The limit of the work counts what can be made."""
    harness.start([make_replica(reply="word " * 400)], limits=Limits(output_tokens=1000))
    with harness.client() as client:
        for path, body, field in (
            ("/v1/chat/completions", CHAT, "max_tokens"),
            ("/v1/chat/completions", CHAT, "max_completion_tokens"),
            ("/v1/completions", {**TEXT, "prompt": [[5] * 10]}, "max_tokens"),
            ("/v1/completions", {**TEXT, "prompt": [[5] * 10, [6] * 200]}, "max_tokens"),
        ):
            answer = client.post(path, json=body | {field: asked, "n": 2}).raise_for_status().json()
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}, path
            submits = harness.replicas[0].submits[-len(answer["choices"]) :]
            assert [one.sampling.max_tokens + len(one.prompt_token_ids) for one in submits] == [256] * len(submits)
        refused = client.post("/v1/completions", json={**TEXT, "prompt": [5] * 10, "max_tokens": asked, "n": 5})
        assert refused.json()["error"]["message"].startswith("5 choices x 246 tokens exceed"), refused.text
        assert client.post("/v1/completions", json={**TEXT, "prompt": [5] * 255, "max_tokens": asked}).is_success
        full = client.post("/v1/completions", json={**TEXT, "prompt": [5] * 256, "max_tokens": asked})
        assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
        least = client.post("/v1/completions", json={**TEXT, "prompt": [5] * 250, "max_tokens": asked, "min_tokens": 7})
        assert least.status_code == 400 and "(6)." in least.json()["error"]["message"]


def test_the_same_bound_over_grpc(harness: Any, make_replica: Callable[..., Any]) -> None:
    harness.start([make_replica(reply="word " * 400)])

    async def reasons() -> list[str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            options = GenerateOptions(max_tokens=65_535, n=2)
            events = InferenceStub(channel).Generate(GenerateRequest(model="tiny", prompt="hi", options=options))
            return [event.finish_reason async for event in events if event.finish_reason]

    assert harness.call(reasons()) == ["length"] * 2


def test_min_tokens_above_the_default_names_the_remedy(served: Any) -> None:
    with served.client() as client:
        refused = client.post("/v1/chat/completions", json=CHAT | {"min_tokens": 30})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
        assert "(21); send 'max_tokens' to allow more" in refused.json()["error"]["message"]
        longer = client.post("/v1/chat/completions", json=CHAT | {"min_tokens": 30, "max_tokens": 40})
        assert longer.status_code == 200
