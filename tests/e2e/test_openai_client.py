"""The API with OpenAI's official client."""

from typing import Any
from uuid import uuid4

import openai
import pytest

MODEL = "smollm2"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def _chat(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**given | options)


def _join(chunks: list[Any], index: int = 0) -> tuple[str, str | None, list[Any]]:
    """(text, finish reason, logprob entries) of one choice of a streamed chat."""
    own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    text = "".join(choice.delta.content or "" for choice in own)
    entries = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content or []]
    return text, own[-1].finish_reason, entries


def test_a_real_model_answers(client: openai.OpenAI) -> None:
    answer = _chat(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    for options in ({}, {"max_tokens": 5}, {"stop": "Paris"}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        whole = _chat(client, logprobs=True, top_logprobs=2, **options)
        chunks = list(
            _chat(client, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}, **options)
        )
        text, reason, entries = _join(chunks)
        choice = whole.choices[0]
        assert (text, reason) == (choice.message.content, choice.finish_reason), options
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]
        for streamed, unary in zip(entries, choice.logprobs.content, strict=True):
            assert streamed.logprob == pytest.approx(unary.logprob, abs=1e-3)
            assert [t.token for t in streamed.top_logprobs] == [t.token for t in unary.top_logprobs]
        usage = [chunk.usage for chunk in chunks if chunk.usage]
        assert len(usage) == 1 and chunks[-1].usage is not None and chunks[-1].choices == []
        assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )


def test_the_second_call_finds_its_prompt_in_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": f"{uuid4()} " + "The river runs to the sea. " * 12}]
    first, second = (_chat(client, messages=messages, max_tokens=4).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < 48  # at most the beginning of the template
    assert 0 < second.prompt_tokens - second.prompt_tokens_details.cached_tokens <= 16
    assert second.prompt_tokens == first.prompt_tokens


def test_logprobs_are_those_of_greedy_choice(client: openai.OpenAI) -> None:
    answer = _chat(client, logprobs=True, top_logprobs=5, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        best = [other.logprob for other in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and len(best) == 5
        assert entry.logprob == best[0] <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_choices_of_one_request_differ_and_are_reproducible(client: openai.OpenAI) -> None:
    tale = [{"role": "user", "content": "Tell me a strange tale."}]
    options = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 16, "messages": tale}
    answers = [_chat(client, **options) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1], "the same seed gives the same tokens"
    assert len(set(texts[0])) == 3
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2]
    assert answers[0].usage.completion_tokens <= 3 * 16
    streamed = list(_chat(client, stream=True, **options))
    assert [_join(streamed, index)[0] for index in range(3)] == texts[0]
    other = _chat(client, **options | {"seed": 12})
    assert [choice.message.content for choice in other.choices] != texts[0]
