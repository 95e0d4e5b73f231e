"""/v1/chat/completions through the official client and as raw HTTP, against a fake replica."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest


def _client(harness: Any, key: str = "none") -> openai.OpenAI:
    http: Any = httpx.Client(trust_env=False, timeout=20)
    return openai.OpenAI(base_url=harness.url + "/v1", api_key=key, max_retries=0, http_client=http)


def _events(text: str) -> list[Any]:
    """The data of a server-sent event stream; comments are dropped."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def test_openai_client_reads_whole_and_streamed_answers(shared: Any, expected_reply: str) -> None:
    client = _client(shared)
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.choices[0].message.content == expected_reply
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion"

    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected_reply
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 7},
        {"n": 3, "max_tokens": 9, "seed": 5},
        {"logprobs": True, "top_logprobs": 3, "max_tokens": 12},
        {"stop": ["END", "zzz"]},
        {"stop": "日本"},
        {"stop": ["END"], "logprobs": True, "top_logprobs": 1},
        {"return_token_ids": True, "max_tokens": 5},
    ],
)
def test_stream_equals_unary(shared: Any, options: dict[str, Any]) -> None:
    with shared.client() as client:
        body = {"model": "tiny", "messages": MESSAGES, **options}
        whole = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        raw = client.post(
            "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        ).raise_for_status()
    events = _events(raw.text)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
            assert choice["message"]["content"].startswith("".join(e["token"] for e in entries)[:4])
        if "token_ids" in choice:
            assert [i for c in own for i in c.get("token_ids", [])] == choice["token_ids"]


def test_stop_string_cancels_and_counts_tokens_up_to_it(
    harness: Any, make_replica: Callable[..., Any], eventually: Any, expected_reply: str
) -> None:
    replica = make_replica(token_seconds=0.005)
    harness.start([replica])
    with harness.client() as client:
        body = {"model": "tiny", "messages": MESSAGES, "stop": ["END of"]}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == expected_reply[: expected_reply.index("END of")]
    assert answer["choices"][0]["finish_reason"] == "stop"
    upto = replica.tokenizer.encode(expected_reply[: expected_reply.index("END of") + 6]).ids
    assert answer["usage"]["completion_tokens"] == len(upto)
    eventually(lambda: replica.cancels == [replica.submits[0].attempt_id])


def test_stream_headers_and_request_id(shared: Any) -> None:
    with shared.client() as client:
        body = {"model": "tiny", "messages": MESSAGES, "stream": True}
        answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc-1"})
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "abc-1"
        other = client.get("/nowhere", headers={"x-request-id": "a b"})
        assert len(other.headers["x-request-id"]) == 32


def test_sampling_options_reach_the_replica(harness: Any, make_replica: Callable[..., Any]) -> None:
    replica = make_replica()
    harness.start([replica])
    with harness.client() as client:
        body = {
            "model": "tiny",
            "messages": MESSAGES,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "seed": -1,
            "n": 2,
            "max_completion_tokens": 5,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "logit_bias": {"5": -100, "6": 1.5},
            "logprobs": True,
            "user": None,
        }
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    first, second = sorted((submit.sampling for submit in replica.submits), key=lambda s: s.choice_index)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 40, 0.05)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.1, 0.25, -0.5)
    assert first.seed == second.seed == 2**64 - 1
    assert (first.choice_index, second.choice_index) == (0, 1)
    assert (first.max_tokens, first.min_tokens, list(first.stop_token_ids)) == (5, 2, [7])
    assert first.ignore_eos and dict(first.logit_bias) == {5: -100.0, 6: 1.5} and first.logprobs == 0
    assert replica.submits[0].revision == "rev1" and len(replica.submits[0].attempt_id) == 16


def test_variables_of_the_chat_template(harness: Any, make_replica: Any) -> None:
    replica = make_replica(
        chat_template="{{ reasoning_effort }}|{{ x }}|{{ documents[0].text }}|{{ add_generation_prompt }}"
    )
    harness.start([replica])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    options = {"reasoning_effort": "high", "chat_template_kwargs": {"x": [1, 2]}, "documents": [{"text": "doc"}]}
    with harness.client() as client:
        answer = client.post("/v1/chat/completions", json=body | options | {"add_generation_prompt": False})
        assert answer.status_code == 200, answer.text
        sent = replica.tokenizer.decode(list(replica.submits[-1].prompt_token_ids), skip_special_tokens=False)
        assert sent == "high|[1, 2]|doc|False"
        for wrong, param in (
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ):
            refused = client.post("/v1/chat/completions", json=body | wrong)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
