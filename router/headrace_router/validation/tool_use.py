"""The tools of a chat: what the template gets, and what its answer may call."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_router.answer.grammar import choice_grammar, regex_grammar, regex_lark, schema_grammar, text_grammar
from headrace_router.answer.input_text import INPUT
from headrace_router.answer.whole_grammar import OfferedTool
from headrace_router.core.errors import InvalidRequestError
from headrace_router.validation.bodies import (
    AllowedChoice,
    ChatBody,
    ChatMessage,
    Custom,
    CustomCall,
    CustomTool,
    FunctionCall,
    FunctionTool,
    NamedCustom,
    NamedFunction,
    RequestOptions,
)


def grammar_of(body: RequestOptions, most: int) -> tuple[str, str]:
    """The grammar that the answer must follow and the field that asks for it; empty without one.

    most: bytes of the constraint. Raises InvalidRequestError.
    """
    given = {name: value for name, value in _constraints(body).items() if value is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequestError(
            f"'{first}' and '{second}' both constrain the answer: send one of them.", param=second
        )
    for field, (make, value) in given.items():
        size = len(value.encode() if isinstance(value, str) else json.dumps(value).encode())
        if size > most:
            raise InvalidRequestError(f"'{field}' has {size} bytes; this server accepts {most}.", param=field)
        try:
            return make(value), field
        except ValueError as error:
            raise InvalidRequestError(f"'{field}' is not valid: {str(error)[:200]}.", param=field) from None
    return "", ""


def _constraints(body: RequestOptions) -> dict[str, tuple[Callable[[Any], str], Any] | None]:
    """By the name of the field: how its grammar is made, and its value."""
    found: dict[str, tuple[Callable[[Any], str], Any] | None] = {}
    response = body.response_format
    schema = None
    if response is not None:
        schema = response.schema_ if response.json_schema is None else response.json_schema.schema_
    if response is not None and response.json_schema is not None and response.type != "json_schema":
        raise InvalidRequestError(
            "'response_format.json_schema' needs 'response_format.type' to be json_schema.",
            param="response_format.type",
        )
    if response is not None and response.type == "json_object":
        found["response_format"] = schema_grammar, {"type": "object"} if schema is None else schema
    elif response is not None and response.type == "json_schema":
        if schema is None:
            raise InvalidRequestError(
                "'response_format.json_schema.schema' is missing: it is the JSON Schema of the answer.",
                param="response_format.json_schema",
            )
        found["response_format"] = schema_grammar, schema
    wanted = body.structured_outputs
    if wanted is not None:
        members: dict[str, tuple[Callable[[Any], str], Any] | None] = {
            "structured_outputs.json": (schema_grammar, wanted.json_) if wanted.json_ is not None else None,
            "structured_outputs.json_object": (schema_grammar, {"type": "object"}) if wanted.json_object else None,
            "structured_outputs.regex": (regex_grammar, wanted.regex) if wanted.regex is not None else None,
            "structured_outputs.choice": (choice_grammar, wanted.choice) if wanted.choice is not None else None,
            "structured_outputs.grammar": (text_grammar, wanted.grammar) if wanted.grammar is not None else None,
        }
        if not any(members.values()):
            raise InvalidRequestError(
                "'structured_outputs' is empty: send json, json_object, regex, choice or grammar in it.",
                param="structured_outputs",
            )
        found |= members
    makers: dict[str, Callable[[Any], str]] = {
        "json": schema_grammar,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": text_grammar,
    }
    for name, make in makers.items():
        value = getattr(body, f"guided_{name}")
        found[f"guided_{name}"] = (make, value) if value is not None else None
    return found


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_FIELD = {"function": "function.parameters", "custom": "custom.format.grammar"}
_SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """listed: for the template, as in OpenAI's API; custom tools are functions with one argument. offered: of these the
    answer may call. custom: names of custom tools. strict: names of those whose schema, or format, the request wants to
    be followed. restricted: others are listed, too. fields: of the request, with the schema or the format of each.
    """

    listed: list[dict[str, Any]]
    offered: tuple[OfferedTool, ...]
    custom: frozenset[str]
    strict: frozenset[str]
    required: bool
    restricted: bool
    one_call: bool
    fields: Mapping[str, str]

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schema of the parameters of each tool, by the tool's name."""
        return {tool.name: tool.schema for tool in self.offered}

    def loosened(self, names: Collection[str]) -> "ToolUse":
        """With any object as arguments of these tools."""
        offered = (replace(tool, strict=tool.strict and tool.name not in names) for tool in self.offered)
        return replace(self, offered=tuple(offered))


def tools_of(body: ChatBody) -> ToolUse | None:
    """None without tools; with `tool_choice` none, none of them is offered. Raises InvalidRequestError."""
    tools, choice = body.tools or [], body.tool_choice
    names = [_named(tool)[1] for tool in tools]
    if repeated := next((name for place, name in enumerate(names) if name in names[:place]), ""):
        raise InvalidRequestError(f"'tools' has two tools of the name '{repeated}'.", param="tools")
    chosen = _chosen(body, names)
    if choice == "required" and not tools:
        raise InvalidRequestError("'tool_choice' is required, and there are no 'tools'.", param="tool_choice")
    if not tools:
        return None
    must_call_one = isinstance(choice, NamedFunction | NamedCustom)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    required = must_call_one or mode == "required"
    offered = tuple(_offered(tool, place, required) for place, tool in enumerate(tools))
    return ToolUse(
        listed=[_listed(tool) for tool in tools],
        offered=tuple(tool for tool in offered if tool.name in chosen),
        custom=frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool)),
        strict=frozenset(tool.name for tool in offered if tool.grammar)
        | {tool.function.name for tool in tools if isinstance(tool, FunctionTool) and tool.function.strict},
        required=required,
        restricted=0 < len(chosen) < len(tools),
        one_call=body.parallel_tool_calls is False or must_call_one,
        fields={name: f"tools[{place}].{_FIELD[tools[place].type]}" for place, name in enumerate(names)},
    )


def _named(tool: FunctionTool | CustomTool | NamedFunction | NamedCustom) -> tuple[str, str]:
    """Its type and its name."""
    if isinstance(tool, FunctionTool | NamedFunction):
        return tool.type, tool.function.name
    return tool.type, tool.custom.name


def _chosen(body: ChatBody, names: list[str]) -> Collection[str]:
    """Names of the tools that may be called. Raises InvalidRequestError."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return () if choice == "none" else names
    given = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else [choice]
    known = {_named(tool) for tool in body.tools or ()}
    for kind, name in map(_named, given):
        if (kind, name) not in known:
            what = "the tool" if kind == "function" and name not in names else f"the {kind} tool"
            raise InvalidRequestError(
                f"'tool_choice' names {what} '{name}', which is not in 'tools'.", param="tool_choice"
            )
    return {name for _, name in map(_named, given)}


def _listed(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        function = tool.function.model_dump(exclude={"strict"}, exclude_none=True)
    else:
        function = tool.custom.model_dump(include={"name", "description"}, exclude_none=True)
        function["parameters"] = _input_schema(tool.custom)
    return {"type": "function", "function": function}


def _offered(tool: FunctionTool | CustomTool, place: int, required: bool) -> OfferedTool:
    if isinstance(tool, CustomTool):
        grammar = _input_grammar(tool.custom)
        return OfferedTool(tool.custom.name, _input_schema(tool.custom), required or bool(grammar), grammar)
    function = tool.function
    if (function.parameters or {}).get("type", "object") != "object":
        raise InvalidRequestError(
            f"'tools[{place}].function.parameters' is not valid: its 'type' must be object.",
            param=f"tools[{place}].function.parameters",
        )
    return OfferedTool(function.name, function.parameters or _NO_PARAMETERS, required or bool(function.strict))


def _input_schema(custom: Custom) -> dict[str, Any]:
    """The schema of the one argument that models know; the argument's description has the grammar."""
    wanted = custom.format.grammar if custom.format is not None else None
    text: dict[str, Any] = {"type": "string"}
    if wanted is not None:
        text["description"] = f"Text of this {_SYNTAX[wanted.syntax]}:\n{wanted.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _input_grammar(custom: Custom) -> str:
    wanted = custom.format.grammar if custom.format is not None else None
    if wanted is None:
        return ""
    return wanted.definition if wanted.syntax == "lark" else regex_lark(wanted.definition)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As templates see it: text parts are joined by newlines, and arguments of calls are objects where they can be."""
    found = message.model_dump(exclude_none=True, exclude={"reasoning", "tool_calls"})
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if message.reasoning and not message.reasoning_content:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id or "", "type": "function", "function": _function(call)} for call in message.tool_calls
        ]
    return found


# What agents put at the start of a system prompt that changes with each request, and says nothing to the model.
VOLATILE = (
    # Claude Code; its hash is of the whole request: https://github.com/anthropics/claude-code/issues/24168
    re.compile(r"x-anthropic-billing-header:[^\n]*\n?"),
)


def without_volatile(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a template without blocks of `VOLATILE`; a system prompt that is nothing else is left out."""
    found = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            text = message["content"]
            for block in VOLATILE:
                if matched := block.match(text):
                    text = text[matched.end() :]
            if message["content"] and not text:
                continue
            message = {**message, "content": text}
        found.append(message)
    return found


def _function(call: FunctionCall | CustomCall) -> dict[str, Any]:
    """The call of a custom tool is one of its function."""
    if isinstance(call, CustomCall):
        return {"name": call.custom.name, "arguments": template_arguments(call.custom.input, custom=True)}
    return {"name": call.function.name, "arguments": template_arguments(call.function.arguments, custom=False)}


def template_arguments(given: str, *, custom: bool) -> Any:
    """The arguments of a call as templates get them. given: as clients do; custom: the free text of a custom tool.

    What is no object stays text: a call that was cut off, which a client has read from a stream.
    """
    if custom:
        return {INPUT: given}
    try:
        arguments = json.loads(given or "null")
    except (ValueError, RecursionError):
        arguments = given
    if arguments is None:
        arguments = {}
    return arguments if isinstance(arguments, dict) else given
