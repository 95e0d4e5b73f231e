"""OpenAI's Responses API, by its official client, against a replica that answers with a given text."""

import json
from typing import Any

import openai
import pytest

from support.router.fake_replica import TOOL_TEMPLATE

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
ANSWER = (
    '<think>\nI need "tools".\n</think>\n\nLet me look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Zürich 🙂"}}\n</tool_call>\n<tool_call>\n{"name": "apply_patch", "arguments": '
    '{"input": "+ \\"a\\"\\n"}}\n</tool_call>'
)


def _client(harness: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{harness.url}/v1", api_key="a-key", max_retries=0, _strict_response_validation=True)


def _start(harness: Any, make_replica: Any, **options: Any) -> Any:
    replica = make_replica(**{"reply": ANSWER, "chat_template": TOOL_TEMPLATE, "max_model_len": 4096} | options)
    harness.start([replica])
    return replica


def _without_ids(value: Any) -> Any:
    """Without what is drawn for each answer."""
    if isinstance(value, dict):
        return {key: _without_ids(part) for key, part in value.items() if key not in ("id", "call_id", "created_at")}
    return [_without_ids(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("tokens", [1, 3, 500])
def test_streamed_is_whole(harness: Any, make_replica: Any, tokens: int) -> None:
    _start(harness, make_replica, tokens_per_delta=tokens)
    given: dict[str, Any] = {"model": "tiny", "input": "What is the weather in Zürich?", "tools": [WEATHER, PATCH]}
    with _client(harness) as client:
        whole = client.responses.create(**given)
        events = list(client.responses.create(**given, stream=True))
    thought, message, weather, patch = [item.to_dict() for item in whole.output]
    assert thought["content"] == [{"type": "reasoning_text", "text": 'I need "tools".'}]
    assert whole.output_text == "Let me look." and message["status"] == "completed"
    assert weather["name"] == "get_weather" and json.loads(weather["arguments"]) == {"city": "Zürich 🙂"}
    assert patch["type"] == "custom_tool_call" and patch["input"] == '+ "a"\n'
    assert whole.status == "completed" and whole.store is False and whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert _without_ids(last.response.to_dict()) == _without_ids(whole.to_dict())


def test_an_item_has_one_id_and_all_of_its_done_events(harness: Any, make_replica: Any) -> None:
    _start(harness, make_replica)
    with _client(harness) as client:
        events = list(client.responses.create(model="tiny", input="x", tools=[WEATHER, PATCH], stream=True))
    found = [event.to_dict() for event in events]
    final: list[Any] = found[-1]["response"]["output"]  # type: ignore[index, assignment]
    for index, item in enumerate(final):
        own: list[Any] = [event for event in found if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in own]
        ids = {event["item_id"] for event in own if "item_id" in event}
        ids |= {event["item"]["id"] for event in own if "item" in event}
        assert ids == {item["id"]}
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done" and own[-1]["item"] == item
        name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        name["custom_tool_call"] = "custom_tool_call_input"
        deltas = [event["delta"] for event in own if event["type"] == f"response.{name[item['type']]}.delta"]
        (done,) = [event for event in own if event["type"] == f"response.{name[item['type']]}.done"]
        assert "".join(deltas) == done.get("text", done.get("arguments", done.get("input")))
        assert (
            ("content_part.added" in kinds)
            == ("content_part.done" in kinds)
            == (item["type"] in name and "content" in item)
        )


def test_a_conversation_with_tools_becomes_the_chat(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply="It is sunny.")
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Z"}'},
        {"type": "function_call", "call_id": "call_2", "name": "get_weather", "arguments": '{"city": "B"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "20 degrees"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "9 degrees"}]},
    ]
    with _client(harness) as client:
        answer = client.responses.create(
            model="tiny", instructions="Be brief.", input=items, tools=[WEATHER], max_output_tokens=2
        )
    prompt = replica.last_prompt
    assert "system\nBe brief.\n\nUse tools.<|im_end|>" in prompt and prompt.count("<|im_start|>assistant") == 2
    assert "<think>Look.</think>One moment.<tool_call>" in prompt
    assert prompt.index("tool\n20 degrees") < prompt.index("tool\n9 degrees")
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.to_dict()["status"] for item in answer.output] == ["incomplete"]


def test_a_schema_of_the_text_is_followed(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, reply='{"city": "Z"}')
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    with _client(harness) as client:
        answer = client.responses.create(model="tiny", input="x", text=text, reasoning={"effort": "low"})
    assert replica.submits[-1].grammar and answer.output_text == '{"city": "Z"}'
    assert answer.text is not None and answer.text.to_dict()["format"] == text["format"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": None}, "'input' is required"),
        ({"input": []}, "'input' is empty."),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not supported: this server keeps no answers"),
        ({"conversation": "c"}, "'conversation' is not supported"),
        ({"background": True}, "'background' is not supported"),
        ({"store": True}, "'store' may only be false"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input[0]' refers to an item of an earlier answer"),
        ({"input": [{"type": "hologram"}]}, "'input[0]' has the type 'hologram'"),
        ({"input": [{"role": "boss", "content": "x"}]}, "'input[0].role' must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads and answers text only"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "names no call"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "needs 'call_id', 'name' and 'arguments'"),
        ({"tools": [{"name": "x"}]}, "'tools[0].type' is required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "'tool_choice' names no tool"),
        ({"max_output_tokens": 0}, "'max_output_tokens' is not valid"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema' is missing"),
    ],
)
def test_mistakes_are_one_sentence(shared: Any, fields: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "input": "x", "max_output_tokens": 5} | fields
    with shared.client() as client:
        answer = client.post("/v1/responses", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and said in error["message"], error


def test_hosted_tools_are_left_out_and_named(shared: Any) -> None:
    body = {
        "model": "tiny",
        "input": "x",
        "max_output_tokens": 5,
        "tools": [{"type": "web_search"}, {"type": "local_shell"}],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
        "max_tool_calls": 3,
        "store": False,
    }
    with shared.client() as client:
        answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200 and answer.json()["tools"] == []
    named = answer.headers["x-headrace-ignored-fields"].split(", ")
    left_out = ["include", "max_tool_calls", "text.verbosity"]
    assert sorted(named) == [*left_out, "tools[0].web_search", "tools[1].local_shell"]


def test_a_stream_that_fails_ends_with_a_failed_response(harness: Any, make_replica: Any) -> None:
    _start(harness, make_replica, reply="one two three four", end_with_error=True)
    with harness.client() as client:
        body = {"model": "tiny", "input": "x", "stream": True}
        *_, last = client.post("/v1/responses", json=body).text.strip().split("\n\n")
    name, data = last.split("\ndata: ")
    failed = json.loads(data)["response"]
    assert name == "event: response.failed" and failed["status"] == "failed" and failed["error"]["message"]
    with _client(harness) as strict:
        *_, event = strict.responses.create(model="tiny", input="x", stream=True)
    assert event.type == "response.failed" and event.response.status == "failed"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("after", [4, 30, 60])
def test_a_stream_whose_replica_is_lost_inside_of_a_call_goes_on(
    harness: Any, make_replica: Any, path: str, after: int
) -> None:
    """The same blocks with the same ids: what a client has of a call is not sent again."""
    options: dict[str, Any] = {"reply": ANSWER, "chat_template": TOOL_TEMPLATE, "max_model_len": 4096}
    lost = make_replica(replica_id="lost", die_after=after, **options)
    well = make_replica(replica_id="well", **options)
    harness.start([lost, well])
    tools = [WEATHER] if path == "/v1/responses" else [{"name": "get_weather", "input_schema": SCHEMA}]
    body: dict[str, Any] = {"model": "tiny", "tools": tools, "stream": True}
    if path == "/v1/responses":
        body |= {"input": "x"}
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "thinking": {"type": "adaptive"}}

    def stream() -> tuple[list[str], dict[str, str], set[str]]:
        """The order of events without deltas, the deltas of each block joined, and the ids of items."""
        with harness.client() as client:
            text = client.post(path, json=body).raise_for_status().text
        events = [json.loads(part.split("\ndata: ")[1]) for part in text.strip().split("\n\n") if "data: " in part]
        joined: dict[str, str] = {}
        for event in events:
            if event["type"].endswith("delta") and "delta" in event and event["type"] != "message_delta":
                delta, place = event["delta"], str(event.get("output_index", event.get("index")))
                added = delta if isinstance(delta, str) else "".join(v for k, v in delta.items() if k != "type")
                joined[place] = joined.get(place, "") + added
        order = [event["type"] for event in events if "delta" not in event["type"] and event["type"] != "ping"]
        return order, joined, {event["item_id"] for event in events if "item_id" in event}

    streams = [stream() for _ in range(3)]
    assert lost.submits and any(submit.output_token_ids for submit in well.submits), "one stream has moved"
    assert all(one[:2] == streams[0][:2] and len(one[1]) >= 3 for one in streams)
    assert all(len(one[2]) == (len(one[1]) if path == "/v1/responses" else 0) for one in streams)


def test_tools_in_a_namespace_are_offered_and_called(harness: Any, make_replica: Any) -> None:
    """As Codex groups the tools of a server of MCP."""
    call = '<tool_call>\n{"name": "mcp__zoo__look", "arguments": {"at": "zebra"}}\n</tool_call>'
    replica = _start(harness, make_replica, reply=call)
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    body: dict[str, Any] = {"model": "tiny", "tools": [{"type": "namespace", "name": "mcp__zoo", "tools": [look]}]}
    with harness.client() as client:
        answer = client.post("/v1/responses", json={**body, "input": "x"})
        (item,) = answer.json()["output"]
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "look", "mcp__zoo")
        assert "x-headrace-ignored-fields" not in answer.headers
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "striped"}
        client.post("/v1/responses", json={**body, "input": [{"role": "user", "content": "x"}, item, output]})
    assert '"name": "mcp__zoo__look"' in replica.last_prompt and "striped" in replica.last_prompt


def test_reasoning_comes_back_in_the_form_that_was_asked_for(harness: Any, make_replica: Any) -> None:
    """Clients that keep no reasoning text give `encrypted_content` back as it was."""
    replica = _start(harness, make_replica, reply="<think>\nI need it.\n</think>\n\nhi")
    body: dict[str, Any] = {"model": "tiny", "include": ["reasoning.encrypted_content"]}
    with harness.client() as client:
        thought, said = client.post("/v1/responses", json={**body, "input": "x"}).json()["output"]
        bare = {
            "type": "reasoning",
            "id": thought["id"],
            "summary": [],
            "encrypted_content": thought["encrypted_content"],
        }
        client.post("/v1/responses", json={**body, "input": [bare, said, {"role": "user", "content": "y"}]})
        assert "<think>I need it.</think>hi" in replica.last_prompt
        foreign = {**bare, "encrypted_content": "gAAAA"}
        again = client.post("/v1/responses", json={**body, "input": [foreign, said, {"role": "user", "content": "y"}]})
    assert again.status_code == 200 and "I need it" not in replica.last_prompt


def test_items_of_tools_that_a_provider_ran_are_left_out(shared: Any) -> None:
    items = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "x"}]
    with shared.client() as client:
        answer = client.post("/v1/responses", json={"model": "tiny", "input": items, "max_output_tokens": 5})
    assert answer.status_code == 200 and answer.headers["x-headrace-ignored-fields"] == "input[0].web_search_call"


def test_reasoning_is_a_summary_for_clients_that_ask_for_one(harness: Any, make_replica: Any) -> None:
    """The whole of it: clients such as the AI SDK show no other form."""
    _start(harness, make_replica)
    given: dict[str, Any] = {"model": "tiny", "input": "x", "tools": [WEATHER], "reasoning": {"summary": "auto"}}
    with _client(harness) as client:
        whole = client.responses.create(**given)
        events = list(client.responses.create(**given, stream=True))
    thought = whole.output[0].to_dict()
    assert thought["summary"] == [{"type": "summary_text", "text": 'I need "tools".'}] and thought["content"] == []
    last: Any = events[-1]
    assert _without_ids(last.response.to_dict()) == _without_ids(whole.to_dict())
    kinds = [event.type for event in events if "reasoning" in event.type]
    assert kinds[0] == "response.reasoning_summary_part.added" and kinds[-1] == "response.reasoning_summary_part.done"
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == 'I need "tools".'
