"""/v1/completions: its four prompt forms, echo, legacy logprobs."""

import json
from typing import Any

import httpx
import openai


def test_the_official_client_reads_answers_and_streams(shared: Any, expected_reply: str) -> None:
    http: Any = httpx.Client(trust_env=False, timeout=20)
    client = openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, http_client=http)
    whole = client.completions.create(model="tiny", prompt="hi", max_tokens=200, logprobs=2)
    choice = whole.choices[0]
    assert choice.text == expected_reply and choice.finish_reason == "stop"
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert (
        len(tokens)
        == len(offsets)
        == len(choice.logprobs.token_logprobs or [])
        == len(choice.logprobs.top_logprobs or [])
    )
    first_word = expected_reply[: offsets[3]]
    assert "".join(tokens[:3]) == first_word
    assert all(token in top for token, top in zip(tokens, choice.logprobs.top_logprobs or [], strict=True))
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(model="tiny", prompt="hi", max_tokens=200, stream=True)
    ]
    assert "".join(pieces) == expected_reply
    assert client.completions.create(model="tiny", prompt="hi").choices[0].finish_reason == "length"  # 16 tokens


def test_prompt_forms(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    encode = lambda text: replica.tokenizer.encode(text).ids  # noqa: E731
    with harness.client() as client:
        for prompt, expected in [
            ("the fox", [encode("the fox")]),
            (["the", "fox"], [encode("the"), encode("fox")]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5], [6, 7]], [[5], [6, 7]]),
        ]:
            replica.submits.clear()
            answer = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2, "n": 2})
            assert answer.status_code == 200, answer.text
            sent = [list(submit.prompt_token_ids) for submit in replica.submits]
            assert sorted(sent) == sorted(expected * 2)
            indices = [choice["index"] for choice in answer.json()["choices"]]
            assert indices == list(range(2 * len(expected)))
            assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))
            assert answer.json()["usage"]["completion_tokens"] == 4 * len(expected)
            by_prompt: dict[tuple[int, ...], set[int]] = {}
            for submit in replica.submits:
                by_prompt.setdefault(tuple(submit.prompt_token_ids), set()).add(submit.sampling.seed)
            assert all(len(seeds) == 1 for seeds in by_prompt.values())
            assert len(set.union(*by_prompt.values())) == len(expected)


def test_echo_puts_the_prompt_first(shared: Any) -> None:
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 4, "echo": True}
    with shared.client() as client:
        plain = client.post("/v1/completions", json={**body, "echo": False}).json()["choices"][0]["text"]
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        raw = client.post("/v1/completions", json={**body, "stream": True}).text
        as_ids = client.post("/v1/completions", json={**body, "prompt": [44, 45]}).json()["choices"][0]["text"]
    assert whole == "the fox" + plain
    chunks = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert as_ids.endswith(plain) and len(as_ids) > len(plain)


def test_return_token_ids_lists_every_counted_token(shared: Any) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 500 - 400, "return_token_ids": True}
    with shared.client() as client:
        answer = client.post("/v1/completions", json=body).json()
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["token_ids"][-1] == 2  # the end-of-sequence token is counted, and has no text


def test_an_event_is_one_line_for_every_line_reader(shared: Any) -> None:
    """JSON does not escape U+0085, U+2028 and U+2029; httpx ends a line at each."""
    prompt = "a\u0085b\u2028c\u2029d é"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "echo": True, "stream": True}
    with shared.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == prompt


def test_whole_numbers_may_be_written_with_a_point(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    with harness.client() as client:
        body = {
            "model": "tiny",
            "prompt": [[5.0, 6], [7]],
            "max_tokens": 2.0,
            "seed": 3.0,
            "top_k": 4.0,
            "logprobs": 1.0,
        }
        answer = client.post("/v1/completions", json=body | {"stop_token_ids": [9.0], "min_tokens": 0.0, "n": 1.0})
        assert answer.status_code == 200, answer.text
        assert [list(submit.prompt_token_ids) for submit in replica.submits] == [[5, 6], [7]]
        options = replica.submits[0].sampling
        assert (options.max_tokens, options.seed, options.top_k, options.logprobs) == (2, 3, 4, 1)
        for wrong in ({"max_tokens": 2.5}, {"prompt": [5.5]}, {"seed": 1e300}):
            refused = client.post("/v1/completions", json=body | wrong)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(wrong))
