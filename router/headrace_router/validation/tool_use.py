"""The tools of a chat: what the template gets, and what its answer may call."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_router.answer.whole_grammar import OfferedTool
from headrace_router.core.errors import InvalidRequestError
from headrace_router.validation.bodies import ChatBody, ChatMessage, ToolChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """listed: for the template, as in OpenAI's API. offered: of these the answer may call."""

    listed: list[dict[str, Any]]
    offered: tuple[OfferedTool, ...]
    required: bool
    one_call: bool

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the parameters of each tool."""
        return {tool.name: tool.schema for tool in self.offered}


def tools_of(body: ChatBody) -> ToolUse | None:
    """None where no tool may be called. Raises InvalidRequestError."""
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
    if not tools or choice == "none":
        return None
    functions = [tool.function for tool in tools]
    required = bool(named) or choice == "required"
    return ToolUse(
        listed=[
            {"type": "function", "function": function.model_dump(exclude={"strict"}, exclude_none=True)}
            for function in functions
        ],
        offered=tuple(
            OfferedTool(function.name, function.parameters or {}, required or bool(function.strict))
            for function in functions
            if not named or function.name == named
        ),
        required=required,
        one_call=body.parallel_tool_calls is False or bool(named),
    )


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As templates see it: text parts are joined by newlines, and arguments of calls are objects.

    Raises InvalidRequestError.
    """
    found = message.model_dump(exclude_none=True, exclude={"reasoning"})
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if message.reasoning and not message.reasoning_content:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "The 'arguments' of a call in 'messages' are no JSON object, as text.", param="messages"
        )
    return value
