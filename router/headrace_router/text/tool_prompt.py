"""Tools for chat templates that know none: a system text lists them, and calls and results are written as text.

The model is asked to write calls as the family `hermes` does (see `answer/families.py`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can use tools. Here is one JSON object for each tool, with the JSON Schema of its parameters:
<tools>
{tools}
</tools>
To use a tool, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "the name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
You will get its result between <tool_response> and </tool_response>."""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, system: bool
) -> list[dict[str, Any]]:
    """Messages of system, user and assistant alone, which say the same.

    tools: as in OpenAI's API. system: whether the template takes messages of this role; else the first message has the
    text about tools.
    """
    found = [_as_text(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=listed)
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{text}"}
        elif found and not system:
            found[0] = {**found[0], "content": f"{text}\n\n{found[0]['content']}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [f"<tool_call>\n{_written(call['function'])}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *written])}


def _written(function: Mapping[str, Any]) -> str:
    """As the model wrote it: arguments that are no object, of a call that was cut off, are text as it is."""
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {text}}}'
