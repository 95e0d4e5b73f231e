"""Log-probabilities of prompts, as evaluation harnesses ask for them, and the offsets of tokens in the text."""

from typing import Any

import httpx
import openai
import pytest

from support.e2e.plain_model import PlainModel

PROMPT = [100 + 37 * index for index in range(60)]


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel()


def _complete(http: httpx.Client, prompt: Any, **options: Any) -> Any:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body | options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _check_echo(plain: PlainModel, prompt: list[int], choice: Any) -> None:
    """All lists begin with the prompt; its values are those of transformers."""
    listed, tokens = choice["logprobs"], [*prompt, *choice["token_ids"]]
    assert {len(values) for values in listed.values()} == {len(tokens)}
    assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
    expected = plain.logprobs(tokens)
    for row, token in enumerate(tokens[1:]):
        assert listed["token_logprobs"][row + 1] == pytest.approx(float(expected[row, token]), abs=1e-3)
        assert max(listed["top_logprobs"][row + 1].values()) == pytest.approx(float(expected[row].max()), abs=1e-3)


@pytest.mark.parametrize("length", [1, 60])
def test_a_given_text_is_scored(http: httpx.Client, plain: PlainModel, length: int) -> None:
    """Twice: what is in the cache has no log-probabilities, and is computed again."""
    for _ in range(2):
        answer = _complete(http, PROMPT[:length], echo=True, logprobs=1)
        _check_echo(plain, PROMPT[:length], answer["choices"][0])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chosen = _complete(http, PROMPT[:length], echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in chosen["top_logprobs"][1:]] == [[token] for token in chosen["tokens"][1:]]


def test_a_text_with_its_offsets_whole_and_streamed(http: httpx.Client, client: openai.OpenAI) -> None:
    prompt = "A café costs 3 €."
    whole = _complete(http, prompt, echo=True, logprobs=2, max_tokens=12)["choices"][0]
    offsets, text = whole["logprobs"]["text_offset"], whole["text"]
    assert text.startswith(prompt) and offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    for token, offset in zip(whole["logprobs"]["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token) or token == "<|im_end|>"
    merged: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    streamed = ""
    for chunk in client.completions.create(
        model="smollm2", prompt=prompt, echo=True, logprobs=2, max_tokens=12, temperature=0, stream=True
    ):
        streamed += chunk.choices[0].text
        for name, values in merged.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert streamed == text and merged == whole["logprobs"]


def test_prompt_logprobs_of_completions_and_chats(http: httpx.Client, plain: PlainModel) -> None:
    listed = _complete(http, PROMPT, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    expected = plain.logprobs(PROMPT)
    assert listed[0] is None and len(listed) == len(PROMPT)
    for row, (token, entries) in enumerate(zip(PROMPT[1:], listed[1:], strict=True)):
        best = expected[row].topk(2)
        assert entries[str(token)]["logprob"] == pytest.approx(float(expected[row, token]), abs=1e-3)
        ranked = sorted((entry for entry in entries.values() if entry["rank"]), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in ranked] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert set(entries) == {str(token), *map(str, best.indices.tolist())}
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    chat = http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    refused = http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
