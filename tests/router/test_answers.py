"""Answers as events: calls, reasoning and text of each family of models, however the answer is split."""

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_proto.grammar import compile_grammar, grammar_tokenizer
from headrace_proto.parsers import ReasoningParser, ToolParser
from headrace_router.answer.events import Args, CallEnd, CallStart, Event, Reasoning, Text
from headrace_router.answer.families import (
    MARKER,
    REASONING,
    TOOLS,
    ArgumentSyntax,
    ReasoningFamily,
    ToolFamily,
    markers,
)
from headrace_router.answer.parser import AnswerParser, Syntax, syntax_of
from headrace_router.answer.whole_grammar import (
    OfferedTool,
    UnforceableCallsError,
    whole_grammar,
)
from headrace_router.text.detokenize import TokenTable

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
OFFERED = [OfferedTool("get_weather", SCHEMA, True), OfferedTool("get_time", {}, False)]
FAMILIES = {row.names[0]: row for row in TOOLS}
THOUGHTS = {row.names[0]: row for row in REASONING}


INPUT_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _tokenizer(*, markers_too: bool = True, special: bool = True) -> Tokenizer:
    """Bytes, and all markers as tokens, which are special or not."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = sorted(set(markers())) if markers_too else []
    made.add_special_tokens([AddedToken("<eos>", normalized=False)])
    add = made.add_special_tokens if special else made.add_tokens
    add([AddedToken(name, normalized=False) for name in names])
    return made


TOKENIZER = _tokenizer()
PLAIN_TOKENIZER = _tokenizer(markers_too=False)
TOKENS = {token.content: token_id for token_id, token in TOKENIZER.get_added_tokens_decoder().items()}
TABLE = TokenTable(TOKENIZER, True)


def _syntax(
    tools: ToolFamily | None, reasoning: ReasoningFamily | None, *, as_tokens: bool = True, special: bool = True
) -> Syntax:
    return Syntax(tools, reasoning, TOKENS if as_tokens else {}, set(TOKENS.values()) if special else ())


def _reasoning_of(tools: ToolFamily) -> ReasoningFamily:
    return next((row for row in REASONING if set(row.names) & set(tools.names)), THOUGHTS["think"])


def _events(
    syntax: Syntax, text: str, sizes: list[int], *, thinking: bool = False, tools: Any = None, whole: bool = False
) -> list[Event]:
    """Of an answer that arrives in groups of tokens of these sizes."""
    offered = {tool.name: tool.schema for tool in OFFERED} if tools is None else tools
    parser = AnswerParser(syntax, offered, thinking=thinking, whole=whole)
    if not syntax.chars:
        groups = [[*group] for group in _grouped(text, sizes)]
        found = [event for group in groups for event in parser.push("".join(group))]
    else:
        stream = TABLE.stream((), syntax.chars)
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        found = [event for group in _grouped(ids, sizes) for event in parser.push(stream.push(group))]
    return [*found, *parser.finish()]


def _grouped(items: Any, sizes: list[int]) -> list[Any]:
    groups, place = [], 0
    for size in sizes:
        groups.append(items[place : place + size])
        place += size
    return [*groups, items[place:]]


def _summary(events: list[Event]) -> dict[str, Any]:
    calls: list[Any] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, "", False])
        elif isinstance(event, Args):
            calls[-1][1] += event.text
        elif isinstance(event, CallEnd):
            calls[-1][2] = True
    return {
        "text": "".join(event.text for event in events if isinstance(event, Text)),
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "calls": [(name, json.loads(arguments) if whole else arguments, whole) for name, arguments, whole in calls],
    }


def _spelled(text: str) -> str:
    return MARKER.sub(r"\1", text)


def _written(row: ToolFamily, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as models of this family write them."""
    if row.form is ArgumentSyntax.PYTHON:
        listed = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"[{', '.join(listed)}]"
    if row.form is ArgumentSyntax.GEMMA:
        values = [
            ",".join(
                f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
                for key, value in given.items()
            )
            for _, given in calls
        ]
        return "".join(
            f"<|tool_call>call:{name}{{{value}}}<tool_call|>" for (name, _), value in zip(calls, values, strict=True)
        )
    found = []
    for name, given in calls:
        if row.form is ArgumentSyntax.TAGGED:
            arguments = "".join(
                row.value[0].replace("{key}", key).replace("{string}", str(isinstance(value, str)).lower())
                + str(value)
                + row.value[1]
                for key, value in given.items()
            )
        else:
            arguments = json.dumps(given, ensure_ascii=False)
        found.append(row.written.replace("{name}", name).replace("{args}", arguments))
    return _spelled(row.wrapper[0] + row.between.join(found) + row.wrapper[1])


TWO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_weather", {"city": "Zürich </tool_call> 日本", "n": 3}),
    ("get_time", {}),
)
PLAIN: tuple[tuple[str, dict[str, Any]], ...] = (("get_weather", {"city": "Zürich", "n": 3}), ("get_time", {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_family_however_the_answer_is_split(name: str) -> None:
    row = FAMILIES[name]
    calls = PLAIN if name in ("glm45", "qwen3_coder") else TWO
    text = _written(row, *calls)
    expected = [(tool, given, True) for tool, given in calls]
    chance = random.Random(name)
    for as_tokens in (True, False):
        syntax = _syntax(row, None, as_tokens=as_tokens)
        for sizes in ([], [1] * 2000, *([chance.randint(1, 9) for _ in range(500)] for _ in range(5))):
            found = _summary(_events(syntax, text, sizes))
            assert found == {"text": "", "reasoning": "", "calls": expected}, (as_tokens, sizes[:5])


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.call and name != "llama3_json"])
def test_reasoning_and_text_before_calls(name: str) -> None:
    row = FAMILIES[name]
    thought = _reasoning_of(row)
    begin = _spelled(f"{thought.written[0]}I think <b>.{thought.written[1]}{thought.answer}") + "Let me see: 1 < 2."
    after = {"openai": "<|end|><|start|>assistant", "kimi_k3": "<|close|>response<|sep|>"}.get(name, "\n")
    text = begin + after + _written(row, *PLAIN)
    chance = random.Random(name)
    for sizes in ([], [1] * 2000, *([chance.randint(1, 9) for _ in range(500)] for _ in range(5))):
        found = _summary(_events(_syntax(row, thought), text, sizes))
        assert found == {
            "text": "Let me see: 1 < 2.",
            "reasoning": "I think <b>.",
            "calls": [(tool, given, True) for tool, given in PLAIN],
        }


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", THOUGHTS)
def test_tokens_of_the_reasoning_are_counted(name: str, as_tokens: bool) -> None:
    """One letter is one token here. Other tokens without a text, such as <eos>, count where they are."""
    row = THOUGHTS[name]
    opening, closing = map(_spelled, row.written)
    thought = "\nI thínk <b> </thin" + ("<eos><eos>" if as_tokens else "") + "\n"
    text = f"{opening}{thought}{closing}{_spelled(row.answer)}<eos>Hello. {opening}{thought}"
    syntax = _syntax(None, row, as_tokens=as_tokens)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids if as_tokens else list(text)
    inside = len(TOKENIZER.encode(thought, add_special_tokens=False).ids if as_tokens else thought)
    chance = random.Random(name)
    for most in (1, 1, 3, 9):  # tokens whose text is held back for a stop string
        parser, stream, held, place = AnswerParser(syntax, None, thinking=False), TABLE.stream((), syntax.chars), "", 0
        for token_id in ids:
            piece = stream.push([token_id]) if isinstance(token_id, int) else token_id
            place += len(piece)
            held += piece
            parser.end_token(place)
            if chance.randrange(most) == 0:
                parser.push(held)
                held = ""
        parser.push(held)
        parser.finish()
        assert parser.reasoning_tokens == 2 * inside, most


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_off_is_text_where_it_was_not_sent(name: str) -> None:
    row, given = FAMILIES[name], {"city": "Zürich", "n": 3}
    text, syntax = _written(row, ("get_weather", given)), _syntax(row, None, as_tokens=False)
    noise = _spelled(row.wrapper[0]).strip() if row.noise else ""
    for cut in (text[:end] for end in range(1, len(text))):
        streamed, found = (_summary(_events(syntax, cut, [1] * 500, whole=whole)) for whole in (False, True))
        assert all(ended == (arguments == given) for _, arguments, ended in streamed["calls"])
        if found["calls"]:
            assert streamed["calls"] == found["calls"] == [("get_weather", given, True)]
        elif streamed["calls"]:
            assert cut in (found["text"], noise + found["text"])
        else:
            assert streamed == found and found["text"] in cut


SECOND = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "broken", "after", "sent", "unsent"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>', SECOND, '{"a": 1\n', ""),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1\n', "", '{"a": 1\n', ""),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": 5}\n</tool_call>', SECOND, None, ""),
        (
            "kimi_k2",
            '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1<|tool_call_end|>',
            "Bye.",
            '{"a": 1',
            "",
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1}', "", '{"a": [1}', ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1,}', "", '{"a": 1,}', ""),
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"a": Z}}\n</tool_call>',
            "",
            '{"a": Z}',
            "}",
        ),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": [1]', "", '{"a": [1]', ""),
        ("gemma4", "<|tool_call>call:f{a:[1,2", "", '{"a":[1,', "2"),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\nBye.", "", '{"a": ', "\n1\n</parameter>\nBye."),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "", '{"a": ', "1</arg_value>"),
        ("llama4_pythonic", "[f(a=[1)]", "", None, ""),
        ("llama3_json", '{"name": "f", "parameters": {"a": ', "", '{"a": ', ""),
    ],
)
def test_no_text_of_a_call_that_cannot_be_read_is_lost(
    name: str, broken: str, after: str, sent: str | None, unsent: str
) -> None:
    """sent: the arguments that a stream had when the call broke off; None = it was text from the beginning."""
    syntax, tools = _syntax(FAMILIES[name], None), {tool: dict[str, Any]() for tool in "fg"}
    following: list[Any] = [("g", {}, True)] if after == SECOND else []
    text = "" if after == SECOND else after
    for sizes in ([], [1] * 500):
        whole = _summary(_events(syntax, broken + after, sizes, tools=tools, whole=True))
        assert whole == {"text": broken + text, "reasoning": "", "calls": following}
        streamed = _summary(_events(syntax, broken + after, sizes, tools=tools))
        if sent is None:
            assert streamed == whole
        else:
            assert streamed == {"text": unsent + text, "reasoning": "", "calls": [("f", sent, False), *following]}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_that_the_prompt_began(name: str) -> None:
    row = THOUGHTS[name]
    syntax = _syntax(None, row)
    assert syntax.begins_in_reasoning(f"… {row.prefix}\n") and not syntax.begins_in_reasoning("… assistant\n")
    text = _spelled(f"hm{row.written[1]}{row.answer}") + "\n\nHello  world\n"
    for sizes in ([], [1] * 500):
        found = _summary(_events(syntax, text, sizes, thinking=True, tools={}))
        assert found == {"text": "Hello  world\n", "reasoning": "hm", "calls": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a < b",
        "<tool",
        "<tool_call",
        "{",
        '{"a": 1} is JSON',
        "[1, 2]",
        "\n\nHello\n",
        "``` <think ```",
        "x\n\n\n",
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "llama4_pythonic", "qwen3_coder", "mistral"])
def test_text_stays_as_it_is(name: str, text: str) -> None:
    for as_tokens in (True, False):
        for sizes in ([], [1] * 100):
            events = _events(_syntax(FAMILIES[name], THOUGHTS["think"], as_tokens=as_tokens), text, sizes)
            assert _summary(events) == {"text": text, "reasoning": "", "calls": []}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "string"}, '"007"'),
        ({"type": "integer"}, '"007"'),
        ({}, '"007"'),
        ({"type": ["integer", "null"]}, '"007"'),
    ],
)
def test_a_tagged_value_has_the_type_that_the_schema_says(given: dict[str, Any], expected: str) -> None:
    tools = {"f": {"type": "object", "properties": {"v": given}}}

    def value(text: str) -> Any:
        answer = f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"
        events = _events(_syntax(FAMILIES["qwen3_coder"], None), answer, [1] * 500, tools=tools)
        return json.dumps(_summary(events)["calls"][0][1]["v"], ensure_ascii=False)

    assert value("007") == expected
    text = given.get("type") == "string"
    assert value("12") == ('"12"' if text else "12")
    assert value("1e20") == ('"1e20"' if text else "1e+20")
    assert value("None") == ('"None"' if text or given.get("type") == "integer" else "null")
    assert value("  two\n") == '"  two\\n"'


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    parser = AnswerParser(_syntax(FAMILIES["llama3_json"], None), {"get_weather": {}}, thinking=False)
    assert parser.push('{"capital"') == [Text('{"capital"')]
    assert parser.push(': "Paris"}') == [Text(': "Paris"}')] and parser.finish() == []


def test_without_tools_nothing_of_a_call_is_lost() -> None:
    syntax = _syntax(FAMILIES["hermes"], THOUGHTS["think"], as_tokens=False)
    parser = AnswerParser(syntax, None, thinking=False)
    text = '<tool_call>\n{"name": "a"}\n</tool_call>\ntail'
    assert _summary(parser.push("<think>b</think>" + text) + parser.finish())["text"] == text


def test_stop_strings_are_found_where_markers_are_tokens() -> None:
    syntax = _syntax(FAMILIES["hermes"], THOUGHTS["think"])
    assert set(syntax.stops(["</tool_call>", "END"])) == {"</tool_call>", "END", syntax.chars[TOKENS["</tool_call>"]]}


def test_the_rows_have_the_names_that_operators_choose() -> None:
    assert {name for row in TOOLS for name in row.names} | {"auto", "none"} == set(ToolParser.__args__)  # type: ignore[attr-defined]
    assert {name for row in REASONING for name in row.names} | {"auto", "none"} == set(ReasoningParser.__args__)  # type: ignore[attr-defined]


def test_a_model_has_the_rows_of_its_template_or_those_that_were_chosen() -> None:
    def names(template: str, tools: str = "", reasoning: str = "") -> tuple[str, str]:
        found = syntax_of(template, tools, reasoning, {}, ())
        return (found.tools.names[0] if found.tools else ""), (found.reasoning.names[0] if found.reasoning else "")

    assert names("{{ tools }}") == ("", "")  # how it writes calls is not known
    assert syntax_of("{{ messages }}", "", "", {}, (), knows_tools=False).tools is FAMILIES["hermes"]  # our own text
    assert names("<tool_call> <function= <parameter= <think>") == ("qwen3_coder", "think")
    assert names("<tool_call> <think>", "kimi_k2", "none") == ("kimi_k2", "")
    assert names("<tool_call>", "none", "deepseek_r1") == ("", "think")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.written])
def test_a_grammar_accepts_what_the_parser_reads(name: str, special: bool) -> None:
    """Also where the markers are tokens that are not special, as those of Qwen3."""
    row = FAMILIES[name]
    thought = _reasoning_of(row)
    syntax = _syntax(row, thought, special=special)
    tokenizer = _tokenizer(special=special)
    compiler = grammar_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [TOKENS["<eos>"]])

    def accepts(text: str, **options: Any) -> bool:
        matcher = compile_grammar(compiler, whole_grammar(syntax, OFFERED, **options))
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    two, one = _written(row, *PLAIN), _written(row, PLAIN[0])
    wrong = two.replace("3", '"x"')
    thinking = _spelled(f"hm{thought.written[1]}")
    text = _spelled(thought.answer) + "Hi there."
    assert accepts(two, required=True) and accepts(one, required=True, one_call=True)
    assert accepts(_spelled(thought.written[0]) + thinking + two, required=True)
    assert accepts(thinking + two, required=True, thinking=True)
    assert not accepts(text, required=True) and not accepts(wrong, required=True)
    assert not accepts(two, required=True, one_call=True)
    number = _spelled(thought.answer) + "12"
    assert accepts(number, constraint="start: /[0-9]+/") and accepts(two, constraint="start: /[0-9]+/")
    assert not accepts(text, constraint="start: /[0-9]+/")
    if name in ("llama3_json", "deepseek_v32"):
        assert not whole_grammar(syntax, OFFERED)  # `strict` beside text is not enforced
    else:
        assert accepts(text) and accepts(two) and not accepts(wrong)


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.written])
def test_a_tool_that_is_not_strict_is_called_with_any_object(name: str) -> None:
    """Also by families that tag each value, and where the schema names no properties."""
    row = FAMILIES[name]
    tools = [OfferedTool("get_weather", {"anyOf": []}, False)]
    compiler = grammar_tokenizer(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [TOKENS["<eos>"]])
    matcher = compile_grammar(compiler, whole_grammar(_syntax(row, None), tools, required=True, one_call=True))
    ids = TOKENIZER.encode(_written(row, PLAIN[0]), add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        ({"enum": ["a/b", "c d\n<e>"]}, ["a/b", "c d\n<e>"], ['"a/b"', "a", "a/bc"]),
        ({"type": "string", "const": "$x"}, ["$x"], ["x", '"$x"']),
        ({"$ref": "#/$defs/unit"}, ["C", "F"], ["K", '"C"']),
        ({"type": "string", "pattern": r"^\d+/\d+$"}, ["12/3"], ["1/", "x1/2", '"1/2"']),
        (
            {"type": "string", "pattern": "[xy]"},
            ["a\nx", "y"],
            ["ab", '"'],
        ),
        ({"type": "string", "pattern": r"^\$"}, ["$", "$5"], ["5$"]),
    ],
)
def test_a_strict_text_between_tags_has_no_quotes(value: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    """For families that tag each value: `enum`, `const` and `pattern` bound the text itself."""
    schema = {"properties": {"u": value}, "required": ["u"], "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}}}
    compiler = grammar_tokenizer(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [TOKENS["<eos>"]])
    for name, row in FAMILIES.items():
        if row.form is not ArgumentSyntax.TAGGED or not row.written:
            continue
        grammar = whole_grammar(_syntax(row, None), [OfferedTool("f", schema, True)], required=True, one_call=True)
        for text in (*right, *wrong):
            written = _written(row, ("f", {"u": text}))
            ids = TOKENIZER.encode(written, add_special_tokens=False).ids
            matcher = compile_grammar(compiler, grammar)
            accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert accepted is (text in right), (name, written)


def test_grammars_of_answers_without_tools() -> None:
    think = _syntax(None, THOUGHTS["think"])
    compiler = grammar_tokenizer(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [TOKENS["<eos>"]])
    matcher = compile_grammar(compiler, whole_grammar(think, [], constraint="start: /[0-9]+/", thinking=True))
    ids = TOKENIZER.encode("one, two</think>\n12", add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert whole_grammar(_syntax(None, None), [], constraint="start: /a/") == "start: /a/"
    assert whole_grammar(think, [OfferedTool("f", {}, False)]) == ""


@pytest.mark.parametrize(
    ("name", "special"),
    [(name, special) for name in THOUGHTS for special in (True, False) if name != "mistral" or special],
)
def test_reasoning_of_at_most_so_many_tokens_is_ended_by_its_own_marker(name: str, special: bool) -> None:
    row = THOUGHTS[name]
    tools = FAMILIES["hermes"]
    syntax = _syntax(tools, row, special=special)
    tokenizer = _tokenizer(special=special)
    compiler = grammar_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [TOKENS["<eos>"]])

    def allowed(text: str, **options: Any) -> set[int] | None:
        """The tokens that may follow; None where the text is not allowed."""
        matcher = compile_grammar(compiler, whole_grammar(syntax, thought_tokens=3, **options))
        ids = tokenizer.encode(_spelled(text), add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) != len(ids):
            return None
        mask = matcher.compute_bitmask()
        return {token for token in TOKENS.values() if mask[token // 8] >> token % 8 & 1}

    closing = {TOKENS[MARKER.findall(row.written[1])[0]]}
    loose = [OfferedTool("get_time", {}, False)]
    for options in ({"tools": ()}, {"tools": loose}, {"tools": OFFERED}, {"tools": (), "constraint": "start: /1+/"}):
        assert closing <= (allowed("hm", thinking=True, **options) or set())
        assert allowed("hm?", thinking=True, **options) == closing
        assert allowed("hm??", thinking=True, **options) is None
        assert allowed(f"{row.written[0]}hm?", **options) == closing
        assert allowed(f"hm?{row.written[1]}", thinking=True, **options) not in (None, closing)
    answer = _written(tools, PLAIN[0])
    after = allowed(f"hm?{row.written[1]}{answer}Hi.", thinking=True, tools=loose)
    assert after is not None and TOKENS["<eos>"] in after and TOKENS["<tool_call>"] in after
    again = f"hm?{row.written[1]}Hi.{row.written[0]}hm"
    assert allowed(again, thinking=True, tools=loose) is None, "the reasoning does not begin again"
    assert whole_grammar(_syntax(tools, None), loose, thought_tokens=3) == "", "a model without reasoning"
    assert syntax.closes_by_token and not _syntax(tools, row, as_tokens=False).closes_by_token


def test_calls_that_no_grammar_describes() -> None:
    for name in ("gemma4", "llama4_pythonic"):
        with pytest.raises(UnforceableCallsError):
            whole_grammar(_syntax(FAMILIES[name], None), OFFERED, required=True)


PATCH = r"""start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF change+ // the lines
change: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
EDIT = '*** Begin Patch\n*** Update File: a.py\n-    x = "a\\t"\n+\ty < 1  # Zürich </b>\n*** End Patch'
RUN = OfferedTool("run", INPUT_SCHEMA, True, PATCH)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_input_of_a_custom_tool_however_the_answer_is_split(name: str) -> None:
    syntax = _syntax(FAMILIES[name], None)
    written = _written(FAMILIES[name], ("run", {"input": EDIT}), ("get_time", {}))
    for size in (1, 3, 1000):
        parser = AnswerParser(syntax, {"run": INPUT_SCHEMA, "get_time": {}}, custom={"run"}, thinking=False)
        stream = TABLE.stream((), syntax.chars)
        ids = TOKENIZER.encode(written, add_special_tokens=False).ids
        groups = _grouped(ids, [size] * (len(ids) // size))
        events = [event for group in groups for event in parser.push(stream.push(group))] + parser.finish()
        starts = [event for event in events if isinstance(event, CallStart)]
        assert starts == [CallStart("run", custom=True), CallStart("get_time")]
        parts = [event.text for event in events[: events.index(starts[1])] if isinstance(event, Args)]
        assert "".join(parts) == EDIT and sum(isinstance(event, CallEnd) for event in events) == 2
        assert size > 1 or len(parts) > 9 or name == "llama4_pythonic", "the input arrives as it is written"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('"print(1)"', "print(1)"), ('"{\\"input\\": \\"x\\"}"', "x"), ('"{\\"a\\": 1}"', '{"a": 1}'), ('"[1"', "[1")],
)
def test_a_string_as_arguments_is_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    syntax = _syntax(FAMILIES["hermes"], None)
    written = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
    for size in (1, 1000):
        parser = AnswerParser(syntax, {"run": INPUT_SCHEMA}, custom={"run"}, thinking=False)
        stream = TABLE.stream((), syntax.chars)
        ids = TOKENIZER.encode(written, add_special_tokens=False).ids
        groups = _grouped(ids, [size] * (len(ids) // size))
        events = [event for group in groups for event in parser.push(stream.push(group))] + parser.finish()
        assert events == [CallStart("run", custom=True), Args(text), CallEnd()]


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.written])
def test_the_input_of_a_custom_tool_follows_its_grammar(name: str, as_tokens: bool) -> None:
    """In the JSON of arguments, and between tags that are tokens or text. Not only where the call is required."""
    row = FAMILIES[name]
    syntax = _syntax(row, None, as_tokens=as_tokens)
    tokenizer = TOKENIZER if as_tokens else PLAIN_TOKENIZER
    eos = tokenizer.encode("<eos>").ids[0]
    compiler = grammar_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [eos])

    def accepts(text: str, **options: Any) -> bool:
        matcher = compile_grammar(compiler, whole_grammar(syntax, [RUN, *OFFERED[1:]], **options))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    assert accepts(_written(row, ("run", {"input": EDIT}), ("get_time", {})), required=True)
    assert not accepts(_written(row, ("run", {"input": EDIT.replace("+", "*")})), required=True)
    if name not in ("llama3_json", "deepseek_v32"):
        assert accepts("Hi.") and accepts(_written(row, ("run", {"input": EDIT})))
        assert not accepts(_written(row, ("run", {"input": "any text"})))


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.written])
def test_only_some_tools_may_be_called(name: str) -> None:
    row = FAMILIES[name]
    syntax = _syntax(row, None)
    grammar = whole_grammar(syntax, OFFERED[1:], restricted=True)
    if name in ("llama3_json", "deepseek_v32"):
        assert not grammar  # calls beside text are not constrained
        return
    compiler = grammar_tokenizer(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [TOKENS["<eos>"]])
    for text, allowed in (("Hi.", True), (_written(row, PLAIN[1]), True), (_written(row, PLAIN[0]), False)):
        matcher = compile_grammar(compiler, grammar)
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())) is allowed, text
