"""A later turn of a conversation has the tokens of earlier answers as the model wrote them."""

import json
from typing import Any

import pytest

from headrace_router.text.answer_memory import (
    AnswerMemory,
    Known,
    answer_place,
    message_digest,
    message_keys,
)
from support.router.fake_replica import TOOL_TEMPLATE

USER = {"role": "user", "content": "What is the weather?"}
ROOT = b"tenant and tools"


def _keys(messages: list[dict[str, Any]], root: bytes = ROOT) -> list[bytes]:
    return message_keys(root, [*map(message_digest, messages)])


def _bytes(token_id: int) -> bytes:
    """Tokens of this test: a byte each, and longer ones."""
    return {256: b"ab", 257: "€".encode()[:2], 258: "€".encode()[2:], 259: b"<|im_end|>"}.get(token_id) or bytes(
        [token_id]
    )


def _ids(text: str) -> list[int]:
    return list(text.encode())


def test_tokens_are_used_as_far_as_the_template_writes_the_same_text() -> None:
    memory = AnswerMemory()
    keys = _keys([USER])
    before = "<user>What is the weather?<assistant>"
    answer = {"role": "assistant", "content": "a€b"}
    memory.add(answer_place(before, keys[-1]), answer, [97, 257, 258, 98, 259])
    messages = [USER, answer, {"role": "user", "content": "And now?"}]

    def known(text: str, given: list[dict[str, Any]] = messages, root: bytes = ROOT) -> list[Known]:
        return memory.known(text, given, _keys(given, root), _bytes)

    start = len(before)
    (part,) = known(f"{before}a€b<|im_end|><user>")
    assert (part.start, part.end, list(part.token_ids)) == (start, start + 13, [97, 257, 258, 98, 259])
    (part,) = known(f"{before}a€b</s>")
    assert (part.end - start, list(part.token_ids)) == (3, [97, 257, 258, 98]), "what ends it is written differently"
    (part,) = known(f"{before}a¢")  # its first byte is another one
    assert list(part.token_ids) == [97], "not a part of a character"
    assert known(f"{before}Another answer") == [] == known(f"x{before}a€b") == known(before[:-1])
    assert known(f"{before}a€b", root=b"another one") == [], "of another tenant, or with other tools"
    assert known(f"{before}a€b", [{**USER, "content": "x"}, *messages[1:]]) == [], "after another message"


def test_what_clients_change_of_an_answer_is_no_matter() -> None:
    """Ids of calls, how JSON is written, white space around the text, reasoning that is left out."""
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    memory = AnswerMemory()
    place = answer_place("x", _keys([USER])[-1])
    memory.add(place, {"role": "assistant", "content": "\n hm ", "tool_calls": [call]}, _ids("y"))
    again = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    given = {"role": "assistant", "content": "hm", "tool_calls": [again], "reasoning_content": "z"}
    messages: list[dict[str, Any]] = [USER, given]
    assert memory.known("xy", messages, _keys(messages), _bytes)
    changes: list[dict[str, Any]] = [{"content": "h"}, {"tool_calls": []}, {"role": "user"}]
    for changed in changes:
        messages = [USER, {**given, **changed}]
        assert not memory.known("xy", messages, _keys(messages), _bytes)


def test_the_memory_is_bounded() -> None:
    memory = AnswerMemory(most_bytes=3000)
    place = answer_place("x", _keys([USER])[-1])
    answers = [{"role": "assistant", "content": str(number)} for number in range(10)]

    def kept() -> list[int]:
        found = []
        for number, answer in enumerate(answers):
            messages = [USER, answer]
            if memory.known("xyy", messages, _keys(messages), _bytes):
                found.append(number)
        return found

    for answer in answers[:5]:
        memory.add(place, answer, _ids("yy"))
        assert 0 in kept()
    for answer in answers[5:]:
        memory.add(place, answer, _ids("yy"))
    assert 3 < len(kept()) < 8 and 9 in kept()
    memory.add(place, answers[0], [121] * 10_000)
    assert kept() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_turn_repeats_the_tokens_of_the_last_one(harness: Any, make_replica: Any, path: str, stream: bool) -> None:
    """The replica spells its answer with a token per byte, which no tokenizer does."""
    text = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    written = '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    template = TOOL_TEMPLATE.replace(
        "<tool_call>{{ call.function | tojson }}</tool_call>",
        "{{ '\\n<tool_call>\\n' }}" + written + "{{ '\\n</tool_call>' }}",
    )
    replica = make_replica(reply=text, chat_template=template, max_model_len=4096, spelled=True)
    harness.start([replica])
    with harness.client() as client:

        def ask(body: dict[str, Any]) -> Any:
            answer = client.post(path, json={"model": "tiny", **body, "stream": stream})
            assert answer.status_code == 200, answer.text
            return answer

        first, second = _turns(path, ask, stream)
    before, after = (list(submit.prompt_token_ids) for submit in replica.submits)
    spelled = replica.spelling(text)
    assert first != second and after[: len(before) + len(spelled)] == before + spelled
    assert after[len(before) + len(spelled)] == 2, "the token that ends the answer"


def test_a_long_answer_is_repeated_too(harness: Any, make_replica: Any, eventually: Any) -> None:
    """It is read again in a thread."""
    text = "word " * 600
    replica = make_replica(reply=text, chat_template=TOOL_TEMPLATE, max_model_len=40_000, spelled=True)
    harness.start([replica])
    with harness.client() as client:

        def kept() -> bool:
            body = {"model": "tiny", "messages": [USER, {"role": "assistant", "content": text}, USER], "max_tokens": 1}
            client.post("/v1/chat/completions", json=body).raise_for_status()
            spelled, found = replica.spelling(text.strip()), list(replica.submits[-1].prompt_token_ids)
            return any(found[place : place + len(spelled)] == spelled for place in range(40))

        assert not kept()
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]}).raise_for_status()
        eventually(kept)


def _turns(path: str, ask: Any, stream: bool) -> tuple[Any, Any]:
    """Two turns of a loop with a tool, as a client of this API makes them."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    question = "What is the weather in Zürich?"
    arguments = {"city": "Zürich"}
    call = {"name": "get_weather", "arguments": json.dumps(arguments)}
    if path == "/v1/messages":
        asked: list[Any] = [{"role": "user", "content": question}]
        body: dict[str, Any] = {"max_tokens": 500, "tools": [{"name": "get_weather", "input_schema": schema}]}
        use = {"type": "tool_use", "id": "t", "name": "get_weather", "input": arguments}
        asked_again = [
            *asked,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}]},
        ]
        return ask({**body, "messages": asked}), ask({**body, "messages": asked_again})
    if path == "/v1/responses":
        tools: Any = [{"type": "function", "name": "get_weather", "parameters": schema}]
        items: list[Any] = [{"role": "user", "content": question}]
        again = [
            *items,
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "c", **call},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ]
        return ask({"input": items, "tools": tools}), ask({"input": again, "tools": tools})
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    asked = [{"role": "user", "content": question}]
    asked_again = [
        *asked,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    return ask({"messages": asked, "tools": tools}), ask({"messages": asked_again, "tools": tools})


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=%s;"


@pytest.mark.parametrize("kept", [False, True])
def test_what_changes_with_each_request_is_no_part_of_the_prompt(harness: Any, make_replica: Any, kept: bool) -> None:
    replica = make_replica(chat_template=TOOL_TEMPLATE)
    harness.start([replica], **({"volatile_blocks": "keep"} if kept else {}))
    prompts = []
    with harness.client() as client:
        for number in range(2):
            system = [{"type": "text", "text": BILLING % number}, {"type": "text", "text": "You are an agent."}]
            body: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [USER], "system": system}
            client.post("/v1/messages", json=body).raise_for_status()
            prompts.append(list(replica.submits[-1].prompt_token_ids))
        text = replica.tokenizer.decode(prompts[0], skip_special_tokens=False)
        assert (prompts[0] == prompts[1]) is not kept and ("billing" in text) is kept and "You are an agent." in text
        chat = [{"role": "system", "content": f"{BILLING % 7}\nYou are an agent."}, USER]
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": chat}).raise_for_status()
        assert (list(replica.submits[-1].prompt_token_ids) == prompts[1]) is not kept
        chat = [{"role": "system", "content": BILLING % 7}, {**USER, "content": BILLING % 8}]
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": chat}).raise_for_status()
        text = replica.tokenizer.decode(replica.submits[-1].prompt_token_ids, skip_special_tokens=False)
        assert "cch=8" in text and ("system" in text) is kept, "what the user says stays"


def test_a_template_that_rewrites_earlier_turns_is_named(harness: Any, make_replica: Any, capsys: Any) -> None:
    rewriting = TOOL_TEMPLATE.replace("{% if message.reasoning_content %}", "{% if loop.last %}")
    harness.start([make_replica(chat_template=rewriting), make_replica(chat_template=TOOL_TEMPLATE, model="other")])
    lines = [line for line in capsys.readouterr().out.splitlines() if "turns part" in line]
    assert len(lines) == 1 and "model=tiny" in lines[0] and "token " in lines[0], lines
