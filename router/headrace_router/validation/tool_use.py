"""The tools of a chat: what the template gets, and what its answer may call."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_router.answer.whole_grammar import OfferedTool
from headrace_router.core.errors import InvalidRequestError
from headrace_router.validation.bodies import CalledFunction, ChatBody, ChatMessage, ToolChoice

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """listed: for the template, as in OpenAI's API. offered: of these the answer may call. strict: names of those whose
    schema the request wants to be followed.
    """

    listed: list[dict[str, Any]]
    offered: tuple[OfferedTool, ...]
    strict: frozenset[str]
    required: bool
    one_call: bool

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the parameters of each tool."""
        return {tool.name: tool.schema for tool in self.offered}

    @property
    def fields(self) -> Mapping[str, str]:
        """The field of the request that has the schema of each tool."""
        names = (tool["function"]["name"] for tool in self.listed)
        return {name: f"tools[{place}].function.parameters" for place, name in enumerate(names)}

    def loosened(self, names: Collection[str]) -> "ToolUse":
        """With any object as arguments of these tools."""
        offered = (replace(tool, strict=tool.strict and tool.name not in names) for tool in self.offered)
        return replace(self, offered=tuple(offered))


def tools_of(body: ChatBody) -> ToolUse | None:
    """None without tools; with `tool_choice` none, none of them is offered. Raises InvalidRequestError."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if repeated := next((name for place, name in enumerate(names) if name in names[:place]), ""):
        raise InvalidRequestError(f"'tools' has two tools of the name '{repeated}'.", param="tools")
    named = choice.function.name if isinstance(choice, ToolChoice) else ""
    if named and named not in names:
        raise InvalidRequestError(
            f"'tool_choice' names the tool '{named}', which is not in 'tools'.", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequestError("'tool_choice' is required, and there are no 'tools'.", param="tool_choice")
    if not tools:
        return None
    functions = [tool.function for tool in tools]
    for place, function in enumerate(functions):
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequestError(
                f"'tools[{place}].function.parameters' is not valid: its 'type' must be object.",
                param=f"tools[{place}].function.parameters",
            )
    required = bool(named) or choice == "required"
    return ToolUse(
        listed=[
            {"type": "function", "function": function.model_dump(exclude={"strict"}, exclude_none=True)}
            for function in functions
        ],
        offered=tuple(
            OfferedTool(function.name, function.parameters or _NO_PARAMETERS, required or bool(function.strict))
            for function in functions
            if choice != "none" and named in ("", function.name)
        ),
        strict=frozenset(function.name for function in functions if function.strict),
        required=required,
        one_call=body.parallel_tool_calls is False or bool(named),
    )


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As templates see it: text parts are joined by newlines, and arguments of calls are objects where they can be."""
    found = message.model_dump(exclude_none=True, exclude={"reasoning", "tool_calls"})
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if message.reasoning and not message.reasoning_content:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id or "", "type": "function", "function": _function(call.function)}
            for call in message.tool_calls
        ]
    return found


def _function(called: CalledFunction) -> dict[str, Any]:
    """Arguments that are no object stay text: a call that was cut off, which a client has read from a stream."""
    try:
        arguments = json.loads(called.arguments or "null")
    except (ValueError, RecursionError):
        arguments = called.arguments
    if arguments is None:
        arguments = {}
    return {"name": called.name, "arguments": arguments if isinstance(arguments, dict) else called.arguments}
