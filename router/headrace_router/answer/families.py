"""How models of each family write reasoning and calls of tools: one row each.

Patterns are regular expressions in which ⟦…⟧ surrounds a marker. Where the model's vocabulary has the marker as a token
of its own, only this token matches; else its text does. In the answer such a token is one private character, from
`FIRST_MARKER` on, which no name contains. All repetitions are bounded: text that may become a marker is matched again
with each token. The names of rows are those of vLLM's parsers, so that its users find theirs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import regex

FIRST_MARKER = 0xF0000  # the private character of the first marker
MARKER = regex.compile("⟦(.+?)⟧")
QUOTE = '<|"|>'  # begins and ends a string in ArgumentSyntax.GEMMA


class ArgumentSyntax(Enum):
    """How a call's arguments are written after what begins it."""

    JSON = auto()  # one JSON object: the pattern has the name
    OBJECTS = auto()  # one or several objects that have a name and arguments
    TAGGED = auto()  # each argument between tags
    PYTHON = auto()  # a list of calls in Python's syntax
    GEMMA = auto()  # an object with bare keys, and strings between markers


@dataclass(frozen=True)
class Tags:
    """The tags of ArgumentSyntax.TAGGED.

    key: its groups are `key` and, where the model says it, `kind`: the type of the value.
    before: what is between a key and its value, and belongs to neither.
    """

    key: str
    close: str
    end: str
    before: str = ""


@dataclass(frozen=True)
class ToolFamily:
    """ident: the ids of calls, where the model's template writes them; `{count}` calls were before.

    call: begins a call wherever it is in the text; its group `name` is the tool's. start: begins one at the start of
    an answer, if the name is that of a tool. noise: what belongs to no text. written: how a call is written, for
    grammars: from what begins it to what ends it, with `{name}` and `{args}`; `wrapper` is around all calls, `between`
    is between two. seen: what the chat templates of such models contain.
    """

    names: tuple[str, ...]
    seen: tuple[str, ...]
    form: ArgumentSyntax
    call: str = ""
    start: str = ""
    noise: str = ""
    tags: Tags | None = None
    ends_reasoning: bool = False
    written: str = ""
    wrapper: tuple[str, str] = ("", "")
    between: str = ""
    ident: str = ""
    value: tuple[str, str] = ("", "")  # around a value in ArgumentSyntax.TAGGED; `{key}` is the value's name


@dataclass(frozen=True)
class ReasoningFamily:
    """open, close: around the reasoning. prefix: what a rendered prompt ends with where the answer begins inside of it.
    noise: what belongs to no text. dropped: begins text that is for nobody. written: what is around the reasoning, for
    grammars; answer: what the text of the answer begins with.
    """

    names: tuple[str, ...]
    seen: tuple[str, ...]
    open: str
    close: str
    prefix: str
    written: tuple[str, str]
    noise: str = ""
    dropped: str = ""
    answer: str = ""


_WS = r"\s{0,9}"
_WORD = r"\w{1,64}"
_DSML = r"<⟦｜DSML｜⟧ ?"
_DSML_END = r"</⟦｜DSML｜⟧ ?"
_NAME = r"(?P<name>[^\s<>\[\]{}\"\U000f0000-\U000f00ff]{1,256})"
_CHANNEL = r"(?:⟦<|start|>⟧assistant)?"
_TO = r"\s?to=functions\.(?P<name>[^\s<\U000f0000-\U000f00ff]{1,256})"
_OTHER = r"\s?to=(?!functions\.)[^\s<\U000f0000-\U000f00ff]{1,256}"  # tools of the model's makers
_JSON_TYPE = r"\s{0,9}(?:⟦<|constrain|>⟧)?\s{0,9}(?:json)?\s{0,9}⟦<|message|>⟧"

_FUNCTION_TAGS = Tags(
    r"<parameter=(?P<key>[^>\n]{1,256})>",
    r"\n?</parameter>(?=\s{0,9}(?:<parameter=[^>\n]{1,256}>|</function>))"
    r"|\n(?=<parameter=[^>\n]{1,256}>\n)|\n(?=</function>\s{0,9}(?:⟦</tool_call>⟧|⟦</seed:tool_call>⟧))",
    r"</function>",
    before="\n",
)

# The first row that fits a template is taken.
TOOLS: tuple[ToolFamily, ...] = (
    ToolFamily(
        ("openai", "gpt_oss"),
        ("<|channel|>", "commentary"),
        ArgumentSyntax.JSON,
        start=rf"{_TO}⟦<|channel|>⟧{_WORD}{_JSON_TYPE}",
        call=rf"{_CHANNEL}(?:{_TO}⟦<|channel|>⟧{_WORD}|⟦<|channel|>⟧{_WORD}{_TO}){_JSON_TYPE}",
        noise=r"⟦<|call|>⟧",
        written="⟦<|channel|>⟧commentary to=functions.{name} ⟦<|constrain|>⟧json⟦<|message|>⟧{args}",
        between="⟦<|call|>⟧⟦<|start|>⟧assistant",
    ),
    ToolFamily(
        ("kimi_k3",),
        ("<|open|>", "<|sep|>"),
        ArgumentSyntax.TAGGED,
        call=r'⟦<|open|>⟧call tool="(?P<name>[^"]{0,256})"[^<\U000f0000-\U000f00ff]{0,99}⟦<|sep|>⟧',
        tags=Tags(
            r'⟦<|open|>⟧argument key="(?P<key>[^"]{0,256})"(?: type="(?P<kind>\w{1,64})")?⟦<|sep|>⟧',
            r"⟦<|close|>⟧argument⟦<|sep|>⟧(?=⟦<|open|>⟧argument|⟦<|close|>⟧call)",
            r"⟦<|close|>⟧call⟦<|sep|>⟧",
        ),
        noise=r"(?:⟦<|open|>⟧|⟦<|close|>⟧)(?:tools|response|message)[^<\U000f0000-\U000f00ff]{0,99}⟦<|sep|>⟧",
        wrapper=("⟦<|open|>⟧tools⟦<|sep|>⟧", "⟦<|close|>⟧tools⟦<|sep|>⟧"),
        written='⟦<|open|>⟧call tool="{name}"⟦<|sep|>⟧{args}⟦<|close|>⟧call⟦<|sep|>⟧',
        value=('⟦<|open|>⟧argument key="{key}"⟦<|sep|>⟧', "⟦<|close|>⟧argument⟦<|sep|>⟧"),
    ),
    ToolFamily(
        ("kimi_k2",),
        ("<|tool_call_argument_begin|>",),
        ArgumentSyntax.JSON,
        call=r"⟦<|tool_call_begin|>⟧\s{0,9}(?:functions\.)?(?P<name>[^\s:<\U000f0000-\U000f00ff]{1,256})(?::\d{1,9})?\s{0,9}"
        r"⟦<|tool_call_argument_begin|>⟧\s{0,9}(?=\{)",
        noise=r"⟦<|tool_call_end|>⟧|⟦<|tool_calls_section_begin|>⟧|⟦<|tool_calls_section_end|>⟧",
        wrapper=("⟦<|tool_calls_section_begin|>⟧", "⟦<|tool_calls_section_end|>⟧"),
        ident="functions.{name}:{count}",
        written="⟦<|tool_call_begin|>⟧functions.{name}:0⟦<|tool_call_argument_begin|>⟧{args}⟦<|tool_call_end|>⟧",
    ),
    ToolFamily(
        ("deepseek_v32", "deepseek_v4"),
        ("｜DSML｜",),
        ArgumentSyntax.TAGGED,
        call=rf'{_DSML}invoke name="(?P<name>[^"]{{1,256}})"{_WS}(?:>|(?=/>))',
        tags=Tags(
            rf'{_DSML}parameter name="(?P<key>[^"]{{0,256}})"(?: string="(?P<kind>{_WORD})")?>',
            rf"{_DSML_END}parameter>",
            rf"/>|{_DSML_END}invoke>",
        ),
        noise=rf"{_DSML}(?:function_calls|tool_calls|calls)>|{_DSML_END}(?:function_calls|tool_calls|calls)>",
        wrapper=("<⟦｜DSML｜⟧function_calls>\n", "</⟦｜DSML｜⟧function_calls>"),
        written='<⟦｜DSML｜⟧invoke name="{name}">\n{args}</⟦｜DSML｜⟧invoke>\n',
        value=('<⟦｜DSML｜⟧parameter name="{key}" string="{string}">', "</⟦｜DSML｜⟧parameter>\n"),
    ),
    ToolFamily(
        ("deepseek_v3", "deepseek_r1"),
        ("<｜tool▁sep｜>", "```json"),
        ArgumentSyntax.JSON,
        call=r"⟦<｜tool▁call▁begin｜>⟧function⟦<｜tool▁sep｜>⟧(?P<name>[^\n]{1,256})\n```json\n\s{0,9}(?=\{)",
        noise=r"(?:\n```)?⟦<｜tool▁call▁end｜>⟧|⟦<｜tool▁calls▁begin｜>⟧|⟦<｜tool▁calls▁end｜>⟧",
        wrapper=("⟦<｜tool▁calls▁begin｜>⟧", "⟦<｜tool▁calls▁end｜>⟧"),
        written="⟦<｜tool▁call▁begin｜>⟧function⟦<｜tool▁sep｜>⟧{name}\n```json\n{args}\n```⟦<｜tool▁call▁end｜>⟧",
        between="\n",
    ),
    ToolFamily(
        ("deepseek_v31",),
        ("<｜tool▁sep｜>",),
        ArgumentSyntax.JSON,
        call=r"⟦<｜tool▁call▁begin｜>⟧(?P<name>[^\n\U000f0000-\U000f00ff]{1,256}?)⟦<｜tool▁sep｜>⟧\s{0,9}(?=\{)",
        noise=r"⟦<｜tool▁call▁end｜>⟧|⟦<｜tool▁calls▁begin｜>⟧|⟦<｜tool▁calls▁end｜>⟧",
        wrapper=("⟦<｜tool▁calls▁begin｜>⟧", "⟦<｜tool▁calls▁end｜>⟧"),
        written="⟦<｜tool▁call▁begin｜>⟧{name}⟦<｜tool▁sep｜>⟧{args}⟦<｜tool▁call▁end｜>⟧",
    ),
    ToolFamily(
        ("gemma4",),
        ("<|tool_call>", "call:"),
        ArgumentSyntax.GEMMA,
        call=r"⟦<|tool_call>⟧call:(?P<name>[^\s{\U000f0000-\U000f00ff]{1,256})(?=\{)",
        noise=r"⟦<tool_call|>⟧",
    ),
    ToolFamily(
        ("glm45", "glm47"),
        ("<arg_key>",),
        ArgumentSyntax.TAGGED,
        call=r"⟦<tool_call>⟧\s{0,9}(?P<name>[^\s<{\U000f0000-\U000f00ff]{1,256})\s{0,9}(?=⟦<arg_key>⟧|⟦</tool_call>⟧)",
        tags=Tags(
            r"⟦<arg_key>⟧(?P<key>[^<\U000f0000-\U000f00ff]{1,256})⟦</arg_key>⟧\s{0,9}⟦<arg_value>⟧",
            r"⟦</arg_value>⟧(?=\s{0,9}(?:⟦<arg_key>⟧|⟦</tool_call>⟧))",
            r"⟦</tool_call>⟧",
        ),
        written="⟦<tool_call>⟧{name}\n{args}⟦</tool_call>⟧",
        between="\n",
        value=("⟦<arg_key>⟧{key}⟦</arg_key>⟧\n⟦<arg_value>⟧", "⟦</arg_value>⟧\n"),
    ),
    ToolFamily(
        ("seed_oss",),
        ("<seed:tool_call>",),
        ArgumentSyntax.TAGGED,
        call=r"(?:⟦<seed:tool_call>⟧\s{0,9})?<function=(?P<name>[^>\n]{1,256})>",
        tags=_FUNCTION_TAGS,
        noise=r"⟦</seed:tool_call>⟧",
        written="⟦<seed:tool_call>⟧\n<function={name}>\n{args}</function>\n⟦</seed:tool_call>⟧",
        between="\n",
        value=("<parameter={key}>", "</parameter>\n"),
    ),
    ToolFamily(
        ("qwen3_coder", "qwen3_xml"),
        ("<function=", "<parameter="),
        ArgumentSyntax.TAGGED,
        call=r"(?:⟦<tool_call>⟧\s{0,9})?<function=(?P<name>[^>\n]{1,256})>",
        tags=_FUNCTION_TAGS,
        noise=r"⟦</tool_call>⟧",
        ends_reasoning=True,
        written="⟦<tool_call>⟧\n<function={name}>\n{args}</function>\n⟦</tool_call>⟧",
        between="\n",
        value=("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    ToolFamily(
        ("mistral",),
        ("[TOOL_CALLS]",),
        ArgumentSyntax.JSON,
        call=rf"⟦[TOOL_CALLS]⟧(?:{_WS}(?=\[{_WS}\{{)|{_WS}{_NAME}{_WS}(?:⟦[CALL_ID]⟧{_WORD})?(?:⟦[ARGS]⟧)?{_WS}(?=\{{))",
        written="⟦[TOOL_CALLS]⟧{name}⟦[ARGS]⟧{args}",
    ),
    ToolFamily(
        ("granite",),
        ("<|tool_call|>",),
        ArgumentSyntax.OBJECTS,
        call=r"⟦<|tool_call|>⟧\s{0,9}(?=\[|\{)",
        wrapper=("⟦<|tool_call|>⟧[", "]"),
        written='{"name": "{name}", "arguments": {args}}',
        between=", ",
    ),
    ToolFamily(
        ("command",),
        ("<|START_ACTION|>",),
        ArgumentSyntax.OBJECTS,
        call=r"⟦<|START_ACTION|>⟧\s{0,9}(?=\[|\{)",
        noise=r"⟦<|END_ACTION|>⟧",
        wrapper=("⟦<|START_ACTION|>⟧[", "]⟦<|END_ACTION|>⟧"),
        written='{"tool_call_id": "0", "tool_name": "{name}", "parameters": {args}}',
        between=",\n",
    ),
    ToolFamily(
        ("llama4_pythonic", "pythonic"),
        ("<|python_start|>",),
        ArgumentSyntax.PYTHON,
        start=r"\s{0,9}(?:⟦<|python_start|>⟧)?\s{0,9}(?=\[\s{0,9}[A-Za-z_][\w.]{0,256}\()",
        noise=r"⟦<|python_end|>⟧",
    ),
    ToolFamily(
        ("llama3_json",),
        ('"parameters": ', "ipython"),
        ArgumentSyntax.OBJECTS,
        start=r"\s{0,9}(?=\{)",
        call=r"⟦<|python_tag|>⟧\s{0,9}(?=\{)",
        written='{"name": "{name}", "parameters": {args}}',
        between="; ",
    ),
    ToolFamily(
        ("hermes", "qwen"),
        ("<tool_call>",),
        ArgumentSyntax.OBJECTS,
        call=r"⟦<tool_call>⟧\s{0,9}(?=\{|\[)",
        noise=r"⟦</tool_call>⟧",
        written='⟦<tool_call>⟧\n{"name": "{name}", "arguments": {args}}\n⟦</tool_call>⟧',
        between="\n",
    ),
)

REASONING: tuple[ReasoningFamily, ...] = (
    ReasoningFamily(
        ("openai_gptoss", "gpt_oss"),
        ("<|channel|>", "analysis"),
        open=rf"{_CHANNEL}⟦<|channel|>⟧analysis{_WS}⟦<|message|>⟧",
        close=r"⟦<|end|>⟧|⟦<|return|>⟧|⟦<|call|>⟧|(?=⟦<|start|>⟧)",
        prefix="<|channel|>analysis<|message|>",
        written=("⟦<|channel|>⟧analysis⟦<|message|>⟧", "⟦<|end|>⟧⟦<|start|>⟧assistant"),
        answer="⟦<|channel|>⟧final⟦<|message|>⟧",
        noise=rf"{_CHANNEL}⟦<|channel|>⟧(?:final|commentary){_WS}(?:⟦<|constrain|>⟧)?{_WS}(?:json)?{_WS}⟦<|message|>⟧"
        r"|⟦<|end|>⟧|⟦<|return|>⟧|⟦<|call|>⟧",
        dropped=rf"{_CHANNEL}(?:{_OTHER}⟦<|channel|>⟧{_WORD}|⟦<|channel|>⟧{_WORD}{_OTHER}"
        r"|⟦<|channel|>⟧(?!analysis|final|commentary)\w{1,64})"
        r"[^<\U000f0000-\U000f00ff]{0,99}(?:⟦<|constrain|>⟧[^<\U000f0000-\U000f00ff]{0,99})?⟦<|message|>⟧",
    ),
    ReasoningFamily(
        ("kimi_k3",),
        ("<|open|>", "think"),
        open=r"⟦<|open|>⟧think⟦<|sep|>⟧",
        close=r"⟦<|close|>⟧think⟦<|sep|>⟧|(?=⟦<|open|>⟧response)",
        prefix="<|open|>think<|sep|>",
        written=("⟦<|open|>⟧think⟦<|sep|>⟧", "⟦<|close|>⟧think⟦<|sep|>⟧"),
        answer="⟦<|open|>⟧response⟦<|sep|>⟧",
        noise=r"⟦<|open|>⟧(?:response|message)[^<\U000f0000-\U000f00ff]{0,99}⟦<|sep|>⟧|⟦<|close|>⟧(?:response|message)[^<\U000f0000-\U000f00ff]{0,99}⟦<|sep|>⟧",
    ),
    ReasoningFamily(
        ("gemma4",),
        ("<|channel>", "<channel|>"),
        open=r"⟦<|channel>⟧thought\n",
        close=r"⟦<channel|>⟧",
        prefix="<|channel>thought\n",
        written=("⟦<|channel>⟧thought\n", "⟦<channel|>⟧"),
    ),
    ReasoningFamily(
        ("mistral", "magistral"),
        ("[THINK]",),
        open=r"⟦[THINK]⟧",
        close=r"⟦[/THINK]⟧",
        prefix="[THINK]",
        written=("⟦[THINK]⟧", "⟦[/THINK]⟧"),
    ),
    ReasoningFamily(
        ("seed_oss",),
        ("<seed:think>",),
        open=r"⟦<seed:think>⟧",
        close=r"⟦</seed:think>⟧",
        prefix="<seed:think>",
        written=("⟦<seed:think>⟧", "⟦</seed:think>⟧"),
    ),
    ReasoningFamily(
        ("cohere", "command"),
        ("<|START_THINKING|>",),
        open=r"⟦<|START_THINKING|>⟧",
        close=r"⟦<|END_THINKING|>⟧",
        prefix="<|START_THINKING|>",
        written=("⟦<|START_THINKING|>⟧", "⟦<|END_THINKING|>⟧"),
        answer="⟦<|START_RESPONSE|>⟧",
        noise=r"⟦<|START_RESPONSE|>⟧|⟦<|END_RESPONSE|>⟧|⟦<|START_TEXT|>⟧|⟦<|END_TEXT|>⟧",
    ),
    ReasoningFamily(
        ("think", "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax", "granite"),
        ("<think>",),
        open=r"⟦<think>⟧",
        close=r"⟦</think>⟧",
        prefix="<think>",
        written=("⟦<think>⟧", "⟦</think>⟧"),
        noise=r"⟦</think>⟧",
    ),
)


def markers() -> Iterator[str]:
    """All markers of all rows."""
    yield QUOTE
    for row in (*TOOLS, *REASONING):
        for value in vars(row).values():
            patterns = vars(value).values() if isinstance(value, Tags) else (value,)
            for pattern in patterns:
                if isinstance(pattern, str):
                    yield from MARKER.findall(pattern)
