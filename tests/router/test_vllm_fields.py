"""Fields of vLLM's clients, over HTTP and gRPC: what a replica gets, and what the text and the usage are."""

import json
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from headrace_proto.inference_pb2 import ChatMessage, ChatMessages, GenerateOptions, GenerateRequest, TokenIds
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_proto.replica_pb2 import GenerationDefaults
from headrace_router.core.limits import Limits

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox jumps"}]}
TEXT = {"model": "tiny", "prompt": "the quick brown fox jumps"}
PATHS: tuple[tuple[str, dict[str, Any]], ...] = (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT))
GRPC_CHAT = ChatMessages(messages=[ChatMessage(role="user", content="the quick brown fox jumps")])
EOS, START, END = 2, 1, 2


def _post(harness: Any, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    with harness.client() as client:
        answer: dict[str, Any] = client.post(path, json=body | fields).raise_for_status().json()
    return answer


def _refusal(harness: Any, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    with harness.client() as client:
        answer = client.post(path, json=body | fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def _generate(harness: Any, **fields: Any) -> list[Any]:
    async def call() -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            events = InferenceStub(channel).Generate(GenerateRequest(model="tiny", **fields))
            return [event async for event in events]

    found: list[Any] = harness.call(call())
    return found


def _vllm_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """The rule of vLLM's SamplingParams: the form with a space counts where it is another token of one length."""
    found: list[list[int]] = []
    for word in words:
        for before in ("", " "):
            ids = tokenizer.encode(before + word.lstrip(), add_special_tokens=False).ids
            if not before or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


def test_bad_words_are_sent_as_tokens_alone_and_after_a_space(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    words = ["the", "  fox", "jumps over", "日本", "the", "<|im_start|>"]
    encode = lambda text: tuple(replica.tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    expected = [encode(before + word.lstrip()) for word in dict.fromkeys(words) for before in ("", " ")]
    for path, body in PATHS:
        _post(harness, path, body, bad_words=words, n=2, max_tokens=2)
        for submit in replica.submits[-2:]:
            assert [tuple(word.ids) for word in submit.sampling.bad_words] == expected
    _generate(harness, prompt="hi", options=GenerateOptions(bad_words=words))
    _generate(harness, chat=GRPC_CHAT, options=GenerateOptions(bad_words=words))
    for submit in replica.submits[-2:]:
        assert [tuple(word.ids) for word in submit.sampling.bad_words] == expected
    assert {tuple(ids) for ids in _vllm_words(replica.tokenizer, words)} < set(expected)
    _post(harness, *PATHS[0], bad_words=[])
    assert not replica.submits[-1].sampling.bad_words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a"] * 129, "'bad_words' has 129 texts; the limit is 128."),
        (["x" * 257], "'bad_words' has 257 bytes in a text; the limit is 256."),
        ([" \n"], "A bad word must have more than white space."),
        (["é" * 120 + str(number) for number in range(100)], "tokens; the limit is 2048."),
        ([5], "'bad_words[0]' is not valid"),
        ("the", "'bad_words' is not valid"),
    ],
)
def test_bad_words_have_bounds(shared: Any, words: Any, sentence: str) -> None:
    for path, body in PATHS:
        with shared.client() as client:
            content = json.dumps(body | {"bad_words": words})
            error = client.post(path, content=content, headers={"content-type": "application/json"}).json()["error"]
        assert sentence in error["message"] and error["param"].startswith("bad_words")


def test_allowed_token_ids_are_sent_and_checked(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    for path, body in PATHS:
        _post(harness, path, body, allowed_token_ids=[7, 5.0, 7])
        assert list(replica.submits[-1].sampling.allowed_token_ids) == [7, 5, 7]  # no end token is added
        vocabulary = replica.tokenizer.get_vocab_size()
        for wrong in ([], [vocabulary], [-1], ["7"], [5] * 4097):
            assert _refusal(harness, path, body, allowed_token_ids=wrong)["param"].startswith("allowed_token_ids")
    _generate(harness, prompt="hi", options=GenerateOptions(allowed_token_ids=[9]))
    _generate(harness, chat=GRPC_CHAT, options=GenerateOptions(allowed_token_ids=[9]))
    assert [list(one.sampling.allowed_token_ids) for one in replica.submits[-2:]] == [[9], [9]]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _generate(harness, prompt="hi", options=GenerateOptions(allowed_token_ids=[2**31]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_min_tokens_is_a_field_of_every_api(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    for path, body in PATHS:
        _post(harness, path, body, min_tokens=3)
    _generate(harness, prompt="hi", options=GenerateOptions(min_tokens=3))
    _generate(harness, chat=GRPC_CHAT, options=GenerateOptions(min_tokens=3))
    assert [submit.sampling.min_tokens for submit in replica.submits] == [3] * 4


def test_a_top_p_of_zero_is_greedy(harness: Any, make_replica: Any) -> None:
    replica = make_replica(defaults=GenerationDefaults(temperature=0.7, top_p=0.0))
    harness.start([replica])
    for path, body in PATHS:
        _post(harness, path, body, top_p=0, temperature=1.5)
        _post(harness, path, body, temperature=1.5)
    _generate(harness, prompt="hi", options=GenerateOptions(top_p=0, temperature=1.5))
    _generate(harness, prompt="hi")
    assert {(one.sampling.temperature, one.sampling.top_p) for one in replica.submits} == {(0, 1)}
    _post(harness, *PATHS[0], top_p=1)
    assert replica.submits[-1].sampling.temperature == 0.7


def test_priority_is_sent(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    for path, body in PATHS:
        _post(harness, path, body, priority=-7)
        _post(harness, path, body)
        for wrong in (2**31, 1.5, "high"):
            assert _refusal(harness, path, body, priority=wrong)["param"] == "priority"
    _generate(harness, prompt="hi", options=GenerateOptions(priority=-7))
    _generate(harness, chat=GRPC_CHAT, options=GenerateOptions(priority=4))
    assert [submit.priority for submit in replica.submits] == [-7, 0, -7, 0, -7, 4]


SPECIAL_REPLY = "one<|im_start|>two <|endoftext|><|im_start|> three wörds"


def test_special_tokens_stay_in_the_text(harness: Any, make_replica: Any) -> None:
    replica = make_replica(reply=SPECIAL_REPLY)
    harness.start([replica])
    without = "onetwo  three wörds"
    for path, body in PATHS:
        for fields, text in (({}, without), ({"skip_special_tokens": False}, SPECIAL_REPLY)):
            choice = _post(harness, path, body, max_tokens=99, return_token_ids=True, **fields)["choices"][0]
            assert (choice.get("text") or choice["message"]["content"]) == text
            assert choice["token_ids"][-1] == EOS
            decoded = replica.tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=not fields)
            assert decoded == text
            with harness.client() as client:
                raw = client.post(path, json=body | fields | {"stream": True, "max_tokens": 99}).text
            chunks = [json.loads(line[6:])["choices"][0] for line in raw.split("\n") if line.startswith("data: {")]
            assert "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in chunks) == text
            stopped = _post(harness, path, body, max_tokens=99, stop=["<|im_start|>"], **fields)["choices"][0]
            assert (stopped.get("text") or stopped["message"]["content"]) == ("one" if fields else text)
    options = GenerateOptions(skip_special_tokens=False, max_tokens=99)
    for given in ({"prompt": "hi"}, {"chat": GRPC_CHAT}):
        assert "".join(event.text for event in _generate(harness, options=options, **given)) == SPECIAL_REPLY
        plain = _generate(harness, options=GenerateOptions(max_tokens=99), **given)
        assert "".join(event.text for event in plain) == without


def test_an_echo_has_the_special_tokens_and_offsets_count_them(harness: Any, make_replica: Any) -> None:
    replica = make_replica(reply="yes")
    harness.start([replica])
    prompt = [START, *replica.tokenizer.encode("the fox").ids]
    body = TEXT | {"prompt": prompt, "echo": True, "skip_special_tokens": False}
    assert _post(harness, "/v1/completions", body)["choices"][0]["text"] == "<|im_start|>the foxyes"
    assert list(harness.router.services.fleet.card("tiny").tokens.offsets(prompt, True))[:2] == [0, len("<|im_start|>")]


REASONING = "<think>\nI need to think, twice.\n</think>\n\nHello <|im_start|>you."
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if open is defined %}<think>\n{% endif %}"
)


def _inside(tokenizer: Tokenizer, reply: str, opening: int, close: int) -> int:
    """Tokens of the reply whose text ends after the opening mark and not after where the closing one begins."""
    ends = [end for _, end in tokenizer.encode(reply, add_special_tokens=False).offsets]
    return sum(opening < end <= close for end in ends)


@pytest.mark.parametrize("tokens", [1, 4, 500])
def test_the_usage_has_the_tokens_of_the_reasoning(harness: Any, make_replica: Any, tokens: int) -> None:
    replica = make_replica(
        reply=REASONING + " <think>", chat_template=THINKING, tokens_per_delta=tokens, max_model_len=999
    )
    harness.start([replica])
    path = "/v1/chat/completions"
    close = REASONING.index("</think>")
    expected = _inside(replica.tokenizer, REASONING, len("<think>"), close)
    assert expected > 10
    for fields in ({}, {"logprobs": True}, {"stop": ["zzz"]}, {"skip_special_tokens": False}, {"n": 3}):
        answer = _post(harness, path, CHAT, **fields)
        count = expected * len(answer["choices"])
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}, fields
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "I need to think, twice."
        assert message["content"].startswith(
            "Hello <|im_start|>you." if "skip_special_tokens" in fields else "Hello you."
        )
        with harness.client() as client:
            body = CHAT | fields | {"stream": True, "stream_options": {"include_usage": True}}
            lines = client.post(path, json=body).text.split("\n")
        last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
        assert last["usage"] == answer["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert _generate(harness, chat=GRPC_CHAT)[-1].usage.reasoning_tokens == expected
    hidden = _post(harness, path, CHAT, include_reasoning=False)
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    ends = [end for _, end in replica.tokenizer.encode(REASONING, add_special_tokens=False).offsets]
    marks = sum(end <= len("<think>") for end in ends)  # the tokens of the stop string are reasoning
    cut = _post(harness, path, CHAT, max_tokens=12)
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12 - marks
    stopped = _post(harness, path, CHAT, stop=["think, tw"])["usage"]
    assert stopped["completion_tokens_details"]["reasoning_tokens"] == stopped["completion_tokens"] - marks
    assert "completion_tokens_details" not in _post(harness, "/v1/completions", TEXT)["usage"]


def test_reasoning_that_the_prompt_begins_is_counted_from_the_first_token(harness: Any, make_replica: Any) -> None:
    reply = "So it is.</think>Yes."
    replica = make_replica(reply=reply, chat_template=THINKING)
    harness.start([replica])
    answer = _post(harness, "/v1/chat/completions", CHAT, chat_template_kwargs={"open": True})
    assert answer["choices"][0]["message"]["content"] == "Yes."
    expected = _inside(replica.tokenizer, reply, 0, reply.index("</think>"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}


def test_reasoning_is_counted_across_a_migration(harness: Any, make_replica: Any) -> None:
    first = make_replica(reply=REASONING, chat_template=THINKING, die_after=14)
    second = make_replica(
        reply=REASONING, chat_template=THINKING, replica_id="r1", load=first.load.__class__(waiting=50)
    )
    harness.start([first, second])
    answer = _post(harness, "/v1/chat/completions", CHAT)
    expected = _inside(first.tokenizer, REASONING, len("<think>"), REASONING.index("</think>"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert sum(len(one.submits) for one in (first, second)) >= 2


def test_a_prompt_keeps_its_last_tokens(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    for path, body in PATHS:
        _post(harness, path, body)
        whole = list(replica.submits[-1].prompt_token_ids)
        assert len(whole) > 4
        for count, kept in ((1, whole[-1:]), (4, whole[-4:]), (len(whole), whole), (200, whole), (-1, whole)):
            usage = _post(harness, path, body, truncate_prompt_tokens=count)["usage"]
            assert list(replica.submits[-1].prompt_token_ids) == kept
            assert usage["prompt_tokens"] == len(kept)
        for wrong in (0, -2, 1.5):
            assert _refusal(harness, path, body, truncate_prompt_tokens=wrong)["param"] == "truncate_prompt_tokens"
    ids = [[5, 6, 7, 8], [9], [5] * 300]
    _post(harness, "/v1/completions", TEXT | {"prompt": ids}, truncate_prompt_tokens=3)
    sent = sorted(list(submit.prompt_token_ids) for submit in replica.submits[-3:])
    assert sent == [[5, 5, 5], [6, 7, 8], [9]]
    options = GenerateOptions(truncate_prompt_tokens=2)
    _generate(harness, prompt_token_ids=TokenIds(ids=[5, 6, 7]), options=options)
    assert list(replica.submits[-1].prompt_token_ids) == [6, 7]
    _generate(harness, chat=GRPC_CHAT, options=options)
    assert len(replica.submits[-1].prompt_token_ids) == 2


def test_as_many_tokens_are_kept_as_leave_room_for_the_answer(harness: Any, make_replica: Any) -> None:
    replica = make_replica(reply="word " * 400)
    harness.start([replica], limits=Limits(prompt_tokens=245))
    long = {"model": "tiny", "prompt": [5] * 600, "truncate_prompt_tokens": -1}
    text = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 600}], "truncate_prompt_tokens": -1}
    for path, body, fields, kept in (
        ("/v1/completions", long, {}, 240),  # of 256: the default of 16 tokens is left
        ("/v1/completions", long, {"max_tokens": 100}, 156),
        ("/v1/completions", long, {"max_tokens": 100, "min_tokens": 100}, 156),
        ("/v1/completions", long, {"max_tokens": 5}, 245),  # the limit of prompts
        ("/v1/completions", long, {"max_tokens": 65_535}, 128),
        ("/v1/chat/completions", text, {"max_completion_tokens": 100}, 156),
        ("/v1/chat/completions", text, {}, 128),
        ("/v1/chat/completions", text, {"min_tokens": 200}, 56),
    ):
        answer = _post(harness, path, body, **fields)
        submit = replica.submits[-1]
        assert len(submit.prompt_token_ids) == answer["usage"]["prompt_tokens"] == kept, fields
        assert submit.sampling.max_tokens >= fields.get("min_tokens", 1)
    error = _refusal(harness, "/v1/completions", long, truncate_prompt_tokens=256)
    assert error["code"] == "context_length_exceeded"


def test_an_echo_is_of_the_kept_tokens(shared: Any) -> None:
    prompts = ["the quick fox", "fox"]
    body = TEXT | {"prompt": prompts, "echo": True, "max_tokens": 1, "logprobs": 0}
    with shared.client() as client:
        whole = client.post("/v1/completions", json={**body, "logprobs": None}).json()["choices"]
    assert [one["text"].startswith(text) for one, text in zip(whole, prompts, strict=True)] == [True, True]
    answer = _post(shared, "/v1/completions", body, truncate_prompt_tokens=1, logprobs=None)
    first, second = (choice["text"] for choice in answer["choices"])
    assert len(first) < len(whole[0]["text"]) and whole[0]["text"].endswith(first)
    assert whole[1]["text"].endswith(second)
