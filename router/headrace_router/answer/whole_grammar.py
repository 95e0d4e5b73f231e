"""One grammar for a whole answer: its reasoning, then calls of tools in the model's own syntax, text, or a constraint.

In the syntax of llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from headrace_router.answer.arguments import referred, value_types
from headrace_router.answer.families import MARKER, ArgumentSyntax
from headrace_router.answer.grammar import ascii_digits, prepared_schema
from headrace_router.answer.input_text import INPUT, input_grammar, literal
from headrace_router.answer.parser import Syntax

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = "/(?s:.*)/"


class UnforceableCallsError(ValueError):
    """The calls of this model cannot be described by a grammar."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool, and whether the arguments of its calls must follow the schema; else they are any object.

    grammar: in Lark's syntax, of the free text that a custom tool takes; empty for any text.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool
    grammar: str = ""


def followed_schemas(syntax: Syntax, tool: OfferedTool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What calls of a strict tool follow, by the path in its schema: all of it, or each value that has a tag."""
    if syntax.tools is None or syntax.tools.form is not ArgumentSyntax.TAGGED:
        yield "", {"type": "object", **tool.schema}
        return
    for key, schema, text in _values(tool.schema):
        if text != _ANY_TEXT:
            yield f".properties.{key}", schema


def followed_input(syntax: Syntax, tool: OfferedTool) -> str:
    """What the input of a tool with a grammar follows, as the model writes it. Raises ValueError."""
    terminal, lines = input_grammar(tool.grammar, "I_", quoted=_is_quoted(syntax))
    return f"start: {terminal}\n{lines}"


def _is_quoted(syntax: Syntax) -> bool:
    """Whether arguments are strings of JSON."""
    return syntax.tools is None or syntax.tools.form is not ArgumentSyntax.TAGGED


def whole_grammar(
    syntax: Syntax,
    tools: Sequence[OfferedTool],
    *,
    constraint: str = "",
    required: bool = False,
    restricted: bool = False,
    one_call: bool = False,
    thinking: bool = False,
    thought_tokens: int | None = None,
) -> str:
    """Empty where an answer may be anything. Raises ValueError for schemas that cannot be followed.

    constraint: the grammar of an answer without a call. required: the answer is a call. restricted: the model knows
    other tools, too, which it may not call. thinking: the answer begins inside of the reasoning. thought_tokens: the
    most tokens of the reasoning, after which the model's own closing marker is forced; for `Syntax.closes_by_token`.
    """
    limited = thought_tokens is not None and syntax.reasoning is not None
    followed = required or restricted or any(tool.strict for tool in tools)
    if not followed and not limited and not (constraint and (tools or syntax.reasoning)):
        return constraint
    rules = _Rules(syntax)
    if not required and not constraint and not rules.head_is_marker:
        followed = False  # text cannot be told from calls: neither `strict` nor `restricted` is enforced
        if not limited:
            return ""
    begin = rules.reasoning(thinking, thought_tokens)
    if not followed and not constraint:
        body = rules.anything()
    elif not tools:
        body = f"{rules.answer} @constraint"
    elif required:
        body = f"{rules.head} {rules.calls(tools, one_call)}"
    elif constraint:
        body = f"({rules.head} {rules.calls(tools, one_call)} | {rules.answer} @constraint)"
    else:
        body = rules.text_or(rules.calls(tools, one_call))
    text = "\n".join([f"start: {begin} {body}", *rules.lines])
    return json.dumps({"grammars": [{"lark_grammar": text}, *(_named(constraint) if "@" in body else [])]})


def _named(grammar: str) -> list[dict[str, Any]]:
    """The grammar under the name `constraint`."""
    if not grammar.startswith("{"):
        return [{"name": "constraint", "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": "constraint"}, *others]


class _Rules:
    """Collects the rules of one grammar. head: the marker that begins the calls; `calls` are what follows it."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._row = syntax.tools
        begin = (self._row.wrapper[0] or self._row.written) if self._row else ""
        found = MARKER.match(begin)
        self._head = found[0] if found else ""
        self.head = self._pieces(self._head)
        self.answer = self._pieces(syntax.reasoning.answer) if syntax.reasoning else ""
        self.lines: list[str] = []

    @property
    def head_is_marker(self) -> bool:
        """Whether a marker begins the calls."""
        return bool(self._head)

    def reasoning(self, thinking: bool, tokens: int | None) -> str:
        """What an answer begins with. tokens: of the reasoning, at most."""
        row = self._syntax.reasoning
        if row is None:
            return ""
        if tokens is None:
            self._until("thought", row.written[1])
        else:
            self._add(f"inside[max_tokens={tokens}]", _ANY_TEXT)
            self._add("thought", f"inside {self._pieces(row.written[1])}")
        self._add("white", r"/\s{0,2}/")
        return "thought white" if thinking else f"({self._pieces(row.written[0])} thought white)?"

    def anything(self) -> str:
        """Any tokens, but for what would begin the reasoning again."""
        row = self._syntax.reasoning
        _, marker, behind, *_ = MARKER.split(row.written[0]) if row is not None else ("", "", "")
        token_id = self._syntax.tokens.get(marker)
        if token_id is None:
            return "<[*]>*"
        if not behind:
            return f"<[^{token_id}]>*"
        self._add("TEXT", _ANY_TEXT)
        self._add("OTHER", rf"{_ANY_TEXT} & ~/{regex.escape(behind.strip())}(?s:.*)/")
        others = ",".join(str(other) for other in self._syntax.added if other != token_id)
        return f"TEXT (<[{others}]> TEXT | <[{token_id}]> OTHER)*"

    def calls(self, tools: Sequence[OfferedTool], one_call: bool) -> str:
        """The rule of one or several calls without the head."""
        row = self._row
        if row is None or not row.written:
            raise UnforceableCallsError
        self._add("body", " | ".join(self._call(place, tool) for place, tool in enumerate(tools)))
        opened, closed = row.wrapper
        first = f"{self._pieces(opened.removeprefix(self._head))} body" if opened else "body"
        again = "body" if opened else f"{self.head} body"
        more = "" if one_call else f"({self._pieces(row.between)} {again})*"
        self._add("calls", f"{first} {more} {self._pieces(closed)}")
        return "calls"

    def text_or(self, calls: str) -> str:
        """Text, with calls after it or without."""
        marker = self._head[1:-1]
        if marker in self._syntax.special or (self.answer and marker in self._syntax.tokens):
            self._add("TEXT", _ANY_TEXT)
            if self.answer:
                return f"({self.answer} TEXT | {self.head} {calls})"
            return f"TEXT ({self.head} {calls})?"
        literal = regex.escape(marker).replace("/", r"\/")
        self._add("TEXT", rf"{_ANY_TEXT} & ~/(?s:.*){literal}(?s:.*)/")
        self._until("before", self._head)
        return f"(TEXT | before {calls})"

    def _until(self, name: str, end: str, text: str = _ANY_TEXT) -> None:
        """Adds the rule of text up to this end, which belongs to it. text: its terminal."""
        found = MARKER.search(end)
        if found is not None and found[1] in self._syntax.tokens:
            before = self._pieces(end[: found.start()])
            self._add(name.upper(), f"{text} {before}")
            self._add(name, f"{name.upper()} {self._pieces(end[found.start() :])}")
        else:
            plain = MARKER.sub(r"\1", end)
            self._add(f"{name}[suffix={json.dumps(plain, ensure_ascii=False)}]", text)

    def _call(self, place: int, tool: OfferedTool) -> str:
        row = self._row
        assert row is not None
        before, after = row.written.split("{args}")
        if not row.wrapper[0]:
            before = before.removeprefix(self._head)
        before = before.replace("{name}", tool.name)
        if tool.grammar:
            arguments = self._input(place, tool)
        elif row.form is ArgumentSyntax.TAGGED:
            arguments = self._tagged(place, tool.schema) if tool.strict else self._any_tagged(place)
        else:
            arguments = f"args_{place}"
            schema = {"type": "object", **tool.schema} if tool.strict else _ANY_OBJECT
            self._add(arguments, f"%json {json.dumps(prepared_schema(schema))}")
        self._add(f"call_{place}", f"{self._pieces(before)} {arguments} {self._pieces(after)}")
        return f"call_{place}"

    def _input(self, place: int, tool: OfferedTool) -> str:
        """The one argument of a custom tool with a grammar."""
        row = self._row
        assert row is not None
        name, quoted = f"input_{place}", _is_quoted(self._syntax)
        terminal, lines = input_grammar(tool.grammar, f"I{place}_", quoted=quoted)
        self.lines.append(lines)
        if quoted:
            opened, closed = self._pieces(f'{{"{INPUT}": "'), self._pieces('"}')
            return f"{opened} {terminal} {closed}"
        before, after = (part.replace("{key}", INPUT).replace("{string}", "true") for part in row.value)
        self._until(name, after, terminal)
        return f"{self._pieces(before)} {name}"

    def _tagged(self, place: int, schema: Mapping[str, Any]) -> str:
        """The arguments in the order of the schema; those that are not required may be left out."""
        row = self._row
        assert row is not None
        parts: list[str] = []
        required = schema.get("required")
        for number, (key, value, text) in enumerate(_values(schema)):
            name = f"value_{place}_{number}"
            before, after = (
                part.replace("{key}", key).replace("{string}", "true" if text else "false") for part in row.value
            )
            if text:
                self._until(name, after, text)
                part = f"{self._pieces(before)} {name}"
            else:
                self._add(name, f"%json {json.dumps(prepared_schema(value))}")
                part = f"{self._pieces(before)} {name} {self._pieces(after)}"
            parts.append(part if isinstance(required, list) and key in required else f"({part})?")
        return " ".join(parts)

    def _any_tagged(self, place: int) -> str:
        """Arguments of any name, whose values end where their tags do."""
        row = self._row
        assert row is not None
        opened, closed = row.value[0].split("{key}")
        before, marked, behind = closed.partition("{string}")
        kind = '("true" | "false")' if marked else ""
        self._until(f"value_{place}", row.value[1])
        key = rf'{self._pieces(opened)} /[^"<>\n]{{1,256}}/ {self._pieces(before)} {kind} {self._pieces(behind)}'
        return f"({key} value_{place})*"

    def _pieces(self, text: str) -> str:
        """A row's text as tokens and literals.

        A marker that is a token is only this token, whether the tokenizer calls it special or not: the parser reads no
        other spelling of it, and the library takes tokens such as <think> for special ones by their names.
        """
        found: list[str] = []
        for place, piece in enumerate(MARKER.split(text)):
            if place % 2 and piece in self._syntax.tokens:
                found.append(f"<[{self._syntax.tokens[piece]}]>")
            elif piece:
                found.append(json.dumps(piece, ensure_ascii=False))
        return " ".join(found)

    def _add(self, name: str, rule: str) -> None:
        self.lines.append(f"{name}: {rule}")


def _values(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The name and the schema of each property, and the terminal of its tagged value: empty for one written as JSON."""
    properties = schema.get("properties")
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        inner = dict(value) if isinstance(value, Mapping) else {}
        text = _text_terminal(inner, schema) if value_types(inner, schema) == {"string"} else ""
        yield key, {**definitions(schema), **inner}, text


def _text_terminal(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The terminal of a string without quotes. Length and format are not enforced. Raises ValueError for a pattern."""
    while "$ref" in schema:  # `value_types` has followed it to a string
        schema = referred(schema["$ref"], root)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        pattern = "|".join(literal(choice) for choice in choices if isinstance(choice, str))
    elif isinstance(schema.get("pattern"), str):
        pattern = ascii_digits(schema["pattern"])
        begin, pattern = ("", pattern[1:]) if pattern.startswith("^") else ("(?s:.*)", pattern)
        is_end = pattern.endswith("$") and not pattern.endswith(r"\$")
        pattern = f"{begin}(?:{pattern[:-1]})" if is_end else f"{begin}(?:{pattern})(?s:.*)"
    else:
        return _ANY_TEXT
    return (
        "/"
        + regex.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=regex.DOTALL)
        + "/"
    )


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a part of the schema may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}
