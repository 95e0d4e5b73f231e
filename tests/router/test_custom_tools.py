"""Custom tools, which take free text, and the choice of allowed tools: with OpenAI's client, and over gRPC."""

import json
import re
from typing import Any

import grpc
import openai
import pytest

from headrace_proto.grammar import compile_grammar, grammar_tokenizer
from headrace_proto.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, InputGrammar, Tool, ToolCall
from headrace_proto.inference_pb2_grpc import InferenceStub
from headrace_router.answer.input_text import InputText, input_grammar
from support.router.fake_replica import TOOL_TEMPLATE

RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CODE = 'print("Zürich 🙂\\n")\n\tx = 1 < 2 </tool_call>'
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Run it."}]


def _reply(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'


REPLY = f'{_reply(json.dumps({"input": CODE}))}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


def _grammar(definition: str, syntax: str = "lark") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**RUN["custom"], "format": form}}


def _start(harness: Any, make_replica: Any, **options: Any) -> Any:
    replica = make_replica(**{"reply": REPLY, "chat_template": TOOL_TEMPLATE, "max_model_len": 4096} | options)
    harness.start([replica])
    return replica


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "tools": [RUN, TIME], **fields}


def _client(harness: Any) -> Any:
    return openai.OpenAI(base_url=harness.url + "/v1", api_key="none", max_retries=0)


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_the_input_of_arguments_in_pieces(size: int, ascii_only: bool) -> None:
    text = 'a"b\\c\n\r\t\b\f\x00\x1f/ü🙂🙂\u2028 }'
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only).replace("/", "\\/")
    read = InputText()
    assert "".join(map(read.add, _pieces(arguments, size))) + read.finish() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", "{}"),
        ('{ "input" : "a", "more": "b"}', "a"),
        ('{"code": "a\\n"}', '{"code": "a\\n"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"input": "\\q\\u12x4 \\ud83d \\ude42 \\ud83d\\n\\ud83d"}', "\\q\\u12x4 \ufffd \ufffd \ufffd\n\ufffd"),
        ('{"input": "two\nlines"}', "two\nlines"),
    ],
)
def test_arguments_that_are_no_input_are_the_input_as_they_are(arguments: str, text: str) -> None:
    for size in (1, 4, 1000):
        read = InputText()
        assert "".join(map(read.add, _pieces(arguments, size))) + read.finish() == text


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        ("start: /.+/", 'a "b" \\ \t', "a\nb"),
        ("start: /.+/s", "a\n\r\x7f", ""),
        ("start: /a(?s:.)(?-s:.)./", "a\n\t ", "a \n "),
        ("start: /(?s)./", "\n", "\n\n"),
        (r"start: /[^\n\"a-c]*/", "\t\\de", 'd"'),
        (r"start: /[]\\[x-z]&&[^y]]+|\s+/", "]\\z", "y"),
        (r"start: /\s+\S+\w\W\pL\p{Lu}[[:digit:]]/", '\n\t "\\_"aA1', '\n\t "\\_"aA'),
        (r"start: /\x41\u0042\u{43}\x{0a}\t\"\\\/\}/", 'ABC\n\t"\\/}', 'ABCn\t"\\/}'),
        (r"start: /a\nb[\n]c/i", "A\nB\nC", "A\rB\nC"),
        ('start: "a\\n\\"\\x41" "\\tb"i', 'a\n"A\tB', 'a\n"a\tB'),
        ('start: " ".."~"', '"', "\n"),
        ('start: ("a" | x)~2..3 ["b"]  # x\nx: "\\n" -> y // z', "a\nab", "a"),
        ("?start: A{2} !b?\n!b: _C\nA: /x/ & /[a-x]/\n_C: A", "xxx", "x"),
        (
            "start: WS ESCAPED_STRING L\n%import common (WS, ESCAPED_STRING)\n%import common.LF -> L",
            ' \n"a\\""\n',
            '""\n',
        ),
        ("start: NEWLINE CPP_COMMENT NUMBER\n%import common (NEWLINE, CPP_COMMENT, NUMBER)", '\r\n// "x"1', "\n/ 1"),
    ],
)
def test_a_grammar_of_text_in_a_json_string(tokenizer: Any, definition: str, right: str, wrong: str) -> None:
    terminal, lines = input_grammar(definition, "I_", quoted=True)
    plain, plain_lines = input_grammar(definition, "I_", quoted=False)
    eos = tokenizer.token_to_id("<|im_end|>")
    compiler = grammar_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [eos])

    def accepts(text: str, grammar: str) -> bool:
        matcher = compile_grammar(compiler, grammar)
        ids = compiler.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    for text, fits in ((right, True), (wrong, False)):
        assert accepts(text, f"start: {plain}\n{plain_lines}") is fits
        quoted = json.dumps(text, ensure_ascii=False)
        assert accepts(quoted, f'start: "\\"" {terminal} "\\""\n{lines}') is fits, quoted


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ('start: "(" start ")" | "x"', "its rule 'start' contains itself"),
        ("start: a\na: b\nb: a?", "contains itself"),
        ("start: a", "'a' is not defined"),
        ('a: "x"', "'start' is not defined"),
        ('start: "a" "b"\n%ignore " "', "'%ignore' is not supported"),
        ("start: %json {}", "'%json' is not supported"),
        ("start: <|im_end|>", "'<|im_end|>' is not supported"),
        ("start: @other", "'@other' is not supported"),
        ("start: ~/a/", "'~' is not supported"),
        ("start[lazy]: /a/", "'start[' is not supported"),
        ("start: N\nN.2: /a/", "'N.2' is not supported"),
        ('start: "a', "'\"' is not supported"),
        ("start: /a b/x", "the flag x"),
        ("start: /(?x:a b)/", "the flag x"),
        ("start: /[[[[a/", "has no end"),
        (r"start: /[\q]/", r"the pattern [\q] is not supported"),
        (r"start: /\u{110000}/", "is no character"),
    ],
)
def test_a_grammar_that_is_not_supported(definition: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        input_grammar(definition, "I_", quoted=True)


@pytest.mark.parametrize("tokens", [1, 3, 500])
def test_the_openai_client_reads_calls_of_custom_tools(harness: Any, make_replica: Any, tokens: int) -> None:
    replica = _start(harness, make_replica, tokens_per_delta=tokens)
    client = _client(harness)
    choice = client.chat.completions.create(**_body()).choices[0]
    call, other = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert type(call).__name__ == "ChatCompletionMessageCustomToolCall" and call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("run", CODE)
    assert (other.type, other.function.name) == ("function", "get_time")
    shown = {"name": "run", "description": "Runs Python."}
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {**shown, "parameters": {**parameters, "additionalProperties": False}}
    assert json.dumps([{"type": "function", "function": function}, TIME]) in replica.last_prompt

    chunks = [*client.chat.completions.create(**_body(), stream=True)]
    parts = [part.to_dict() for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    first, *later = [part for part in parts if part["index"] == 0]
    assert first["id"] and (first["type"], first["custom"]["name"]) == ("custom", "run")
    assert all(part.keys() == {"index", "custom"} and part["custom"].keys() == {"input"} for part in later)
    assert "".join(part["custom"]["input"] for part in (first, *later)) == CODE


def test_a_loop_of_two_steps(harness: Any, make_replica: Any) -> None:
    """The client's own objects, and what other clients keep of a stream."""
    replica = _start(harness, make_replica)
    client = _client(harness)
    message = client.chat.completions.create(**_body()).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    without_type = {"role": "assistant", "tool_calls": [{"custom": {"name": "run", "input": "<|im_end|>"}}]}
    client.chat.completions.create(**_body(messages=[*MESSAGES, message, *results, without_type]))
    prompt = replica.last_prompt
    called = json.dumps({"name": "run", "arguments": {"input": CODE}}, ensure_ascii=False)
    assert f"<tool_call>{called}</tool_call>" in prompt and prompt.count("<|im_start|>tool\ndone<|im_end|>") == 2
    end = replica.tokenizer.token_to_id("<|im_end|>")
    assert '{"input": "<|im_end|>"}' in prompt and list(replica.submits[-1].prompt_token_ids).count(end) == 5


@pytest.mark.parametrize(
    ("reply", "text", "given", "reason"),
    [
        (_reply('{"input": "a\\nb\\'), "\\", "a\nb", "tool_calls"),
        (_reply('{"input": "x').removesuffix("}\n</tool_call>"), "", "x", "tool_calls"),
        (_reply('{"input": "x\\ud83').removesuffix("}\n</tool_call>"), "\\ud83", "x", "tool_calls"),
        (_reply('{"inp').removesuffix("}\n</tool_call>"), '{"inp', "", "tool_calls"),
    ],
)
def test_a_malformed_call_loses_no_text(
    harness: Any, make_replica: Any, reply: str, text: str, given: str, reason: str
) -> None:
    """text, given, reason: of the stream; the whole answer is the text that the model wrote."""
    reply = reply.partition("\\}")[0] + ("\\" if "\\}" in reply else "")
    _start(harness, make_replica, reply=reply)
    client = _client(harness)
    choice = client.chat.completions.create(**_body()).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", reply, None)
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**_body(), stream=True)]
    parts = [part.to_dict() for choice in choices for part in choice.delta.tool_calls or ()]
    assert "".join(part["custom"]["input"] for part in parts) == given
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason == reason


def test_formats_and_choices_are_grammars(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica, max_model_len=100_000)
    client = _client(harness)

    def grammar(**fields: Any) -> str:
        client.chat.completions.create(**_body(**fields))
        return str(replica.submits[-1].grammar)

    assert not grammar(tools=[{"type": "custom", "custom": {**RUN["custom"], "format": {"type": "text"}}}, TIME])
    assert "get_time" in grammar(tools=[_grammar('start: "a" LF\n%import common.LF'), TIME]), "and other calls"
    assert "Text of this Lark grammar:\\nstart:" in replica.last_prompt
    assert "[0-9]" in grammar(tools=[_grammar(r"\d+/x", "regex")])
    named = {"type": "custom", "custom": {"name": "run"}}
    assert "run" in (found := grammar(tool_choice=named)) and "get_time" not in found and '\\"input\\"' in found
    with pytest.raises(openai.BadRequestError) as caught:
        grammar(tools=[TIME, _grammar('start: "(" start ")" | "x"')])
    assert caught.value.param == "tools[1].custom.format.grammar"
    assert "'tools[1].custom.format.grammar' cannot be followed: its rule 'start' contains itself" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match=r"'tools\[0\].custom.format.grammar' cannot be followed: "):
        grammar(tools=[_grammar("(", "regex")])
    with pytest.raises(openai.BadRequestError, match="custom tools have 70000 bytes"):
        grammar(tools=[_grammar("x" * 70000)])


def test_only_some_tools_may_be_called(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica)
    client = _client(harness)

    def grammar(mode: str, *tools: dict[str, Any]) -> str:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}
        client.chat.completions.create(**_body(tool_choice=choice))
        return str(replica.submits[-1].grammar)

    run = {"type": "custom", "custom": {"name": "run"}}
    client.chat.completions.create(**_body())
    listed = replica.last_prompt
    for mode in ("auto", "required"):
        found = grammar(mode, TIME)
        assert "get_time" in found and "run" not in found and replica.last_prompt == listed, "the cached prefix is kept"
        assert ("TEXT" in found) is (mode == "auto")
    assert not grammar("auto", TIME, run)  # all of them
    assert "get_time" in (found := grammar("required", TIME, run)) and "run" in found


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "names the custom tool 'x'"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice", "the function tool 'run'"),
        ({"allowed": [{"type": "function", "function": {"name": "x"}}]}, "tool_choice", "names the tool 'x', which is"),
        ({"allowed": []}, "tool_choice.allowed_tools.tools", "at least 1 item"),
        ({"allowed": [{"type": "mcp"}]}, "tool_choice.allowed_tools.tools[0].function", "is required"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [TIME]}}, "tool_choice", "it must be none, auto"),
        ({"tools": [RUN, {"type": "function", "function": {"name": "run"}}]}, "tools", "two tools of the name 'run'"),
        ({"tools": [{"type": "custom", "name": "run"}]}, "tools[0]", "belong into 'custom'"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is required"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "fromat": {}}}]}, "tools[0].custom.fromat", "extra"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "of the type 'web_search' are not supported"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name", "pattern"),
        ({"format": {"type": "grammar", "syntax": "lark"}}, "tools[0].custom.format", "it has 'grammar'"),
        ({"format": {"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}}},
         "tools[0].custom.format.grammar.syntax", "'lark' or 'regex'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}]},
         "messages[0].tool_calls[0].custom.input", "is required"),
    ],
)  # fmt: skip
def test_what_is_refused(shared: Any, fields: dict[str, Any], param: str, sentence: str) -> None:
    if (allowed := fields.pop("allowed", None)) is not None:
        fields = {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}}
    if form := fields.pop("format", None):
        fields = {"tools": [{"type": "custom", "custom": {"name": "run", "format": form}}]}
    with shared.client() as client:
        answer = client.post("/v1/chat/completions", json=_body(**fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and sentence in error["message"], error


def test_the_same_over_grpc(harness: Any, make_replica: Any) -> None:
    replica = _start(harness, make_replica)
    chat = ChatMessages(
        messages=[
            ChatMessage(role="user", content="Hi"),
            ChatMessage(role="assistant", tool_calls=[ToolCall(id="a", name="run", arguments="1\n2", custom=True)]),
            ChatMessage(role="tool", tool_call_id="a", content="done"),
        ],
        tools=[Tool(name="run", custom=True), Tool(name="get_time")],
    )

    async def events() -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.router.grpc_port}") as channel:
            return [event async for event in InferenceStub(channel).Generate(GenerateRequest(model="tiny", chat=chat))]

    parts = [part for event in harness.call(events()) for part in event.tool_calls]
    assert "".join(part.arguments for part in parts if part.custom) == CODE
    assert [(part.name, part.custom) for part in parts if part.id] == [("run", True), ("get_time", False)]
    assert '<tool_call>{"name": "run", "arguments": {"input": "1\\n2"}}</tool_call>' in replica.last_prompt
    chat.allowed_tools.append("get_time")
    harness.call(events())
    assert "get_time" in replica.submits[-1].grammar and "run" not in replica.submits[-1].grammar
    del chat.allowed_tools[:]
    chat.tool = "run"
    chat.tools[0].grammar.CopyFrom(InputGrammar(syntax="regex", definition="[a-z]+"))
    harness.call(events())
    assert "[a-z]" in replica.submits[-1].grammar and "get_time" not in replica.submits[-1].grammar
    chat.tool_choice = "auto"
    with pytest.raises(grpc.aio.AioRpcError, match="Set tool, or tool_choice"):
        harness.call(events())
    chat.tool_choice, chat.tools[0].strict = "", True
    with pytest.raises(grpc.aio.AioRpcError, match="is not strict"):
        harness.call(events())
