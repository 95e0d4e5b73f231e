"""The body of Anthropic's Messages API, and the chat that it asks for: the rest of the router knows chats alone."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from headrace_router.core.errors import InvalidRequestError, UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.core.sampling_options import Number, TokenCount, TopK
from headrace_router.validation.bodies import ChatBody
from headrace_router.validation.body_errors import IgnoredFields, as_api_error, parse_body, refuse_chat_fields

_NO_TEXT = ("image", "document", "file", "audio", "video", "container_upload", "search_result")


class _Open(BaseModel):
    """Members that are not declared change nothing (cache_control, citations, signature)."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class MessagesTool(_Open):
    """A tool with a schema; a tool that Anthropic's servers run has a type of its own, and is left out."""

    type: StrictStr | None = None
    name: StrictStr = Field(min_length=1, max_length=128)
    description: StrictStr | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None


class MessagesToolChoice(_Open):
    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(_Open):
    """Whether the model reasons, with how many tokens at most, and whether the answer shows it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Open):
    """What the text of the answer must be."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True, populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Open):
    """effort: for the chat template."""

    format: OutputFormat | None = None
    effort: StrictStr | None = None


class Diagnostics(_Open):
    """Asks why the cache did not have more of the prompt. previous_message_id: of the answer before."""

    previous_message_id: StrictStr | None = None


class Message(_Open):
    role: Literal["user", "assistant", "system"]
    content: StrictStr | list[dict[str, Any]]


class MessagesBody(_Open):
    """POST /v1/messages. Fields that are not declared change nothing; a response header names them."""

    model: StrictStr = Field(min_length=1, max_length=512)
    messages: list[Message] = Field(min_length=1)
    max_tokens: TokenCount | None = None
    system: StrictStr | list[dict[str, Any]] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    stop_sequences: list[StrictStr] | None = None
    stream: StrictBool | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="as output_config.format")
    diagnostics: Diagnostics | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None


_INSTEAD = {"stop": "stop_sequences", "response_format": "output_config.format", "max_completion_tokens": "max_tokens"}
_REFUSED = {"container": "containers", "mcp_servers": "MCP servers"}


def parse_messages(
    value: Any, limits: Limits, ignored: IgnoredFields, *, counting: bool = False
) -> tuple[ChatBody, str | None]:
    """The chat that a body of the Messages API asks for, and the id of an earlier answer if its diagnostics name one.

    counting: only its tokens are wanted. ignored: collects what was left out. Raises InvalidRequestError or
    UnsupportedError with `param` set.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    for name in value:
        if name in _REFUSED and value[name]:
            raise UnsupportedError(f"'{name}' is not supported: this server runs no {_REFUSED[name]}.", param=name)
        if name not in MessagesBody.model_fields and value[name] is not None:
            ignored.add(name)
    refuse_chat_fields(value, MessagesBody.model_fields, _INSTEAD)
    try:
        body = MessagesBody.model_validate({name: entry for name, entry in value.items() if entry is not None})
    except ValidationError as error:
        raise as_api_error(error) from None
    if body.max_tokens is None and not counting:
        raise InvalidRequestError("'max_tokens' is required.", param="max_tokens")
    chat = parse_body(ChatBody, {name: entry for name, entry in _chat(body, ignored) if entry is not None}, limits)
    return chat, body.diagnostics.previous_message_id if body.diagnostics is not None else None


def _chat(body: MessagesBody, ignored: IgnoredFields) -> Iterator[tuple[str, Any]]:
    """The fields of the chat."""
    messages = [*_system(body.system, "system")]
    known: set[str] = set()  # ids of calls so far
    for index, message in enumerate(body.messages):
        messages += _message(message, f"messages[{index}]", known, ignored)
    yield "model", body.model
    yield "messages", messages
    yield "max_tokens", body.max_tokens
    for name in ("temperature", "top_p", "top_k", "stream"):
        yield name, getattr(body, name)
    yield "stop", body.stop_sequences or None
    if body.messages[-1].role == "assistant":
        yield "continue_final_message", True
    thinking = body.thinking
    reasons = thinking is not None and thinking.type != "disabled"
    if thinking is not None and reasons:
        yield "max_reasoning_tokens", thinking.budget_tokens
    yield "chat_template_kwargs", {"enable_thinking": reasons}
    yield "include_reasoning", reasons and thinking is not None and thinking.display != "omitted"
    output = body.output_config or OutputConfig()
    yield "reasoning_effort", output.effort
    if (wanted := output.format or body.output_format) is not None:
        yield "response_format", {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    tools = [tool for index, tool in enumerate(body.tools or ()) if _is_ours(tool, index, ignored)]
    if body.tool_choice is not None and body.tool_choice.type in ("any", "tool") and not tools:
        raise InvalidRequestError("'tool_choice' needs a tool in 'tools' that the client runs.", param="tool_choice")
    yield "tools", [_tool(tool) for tool in tools] or None
    if body.tool_choice is not None:
        yield "tool_choice", _choice(body.tool_choice) if tools else None
        yield "parallel_tool_calls", False if body.tool_choice.disable_parallel_tool_use and tools else None


def _is_ours(tool: MessagesTool, index: int, ignored: IgnoredFields) -> bool:
    """Whether the client runs the tool and says how it is called; other tools are named in the response header."""
    if tool.type in (None, "custom", "function"):
        return True
    ignored.add(f"tools[{index}].{tool.type}")
    return False


def _tool(tool: MessagesTool) -> dict[str, Any]:
    given = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    function = {"name": tool.name, **{key: value for key, value in given.items() if value is not None}}
    return {"type": "function", "function": function}


def _choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if not choice.name:
        raise InvalidRequestError("'tool_choice.name' is required with the type tool.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _system(system: str | list[dict[str, Any]] | None, path: str) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else [*_texts(system, path)]
    return [{"role": "system", "content": text}]


def _texts(blocks: list[dict[str, Any]], path: str) -> Iterator[dict[str, str]]:
    """Blocks of text as parts of a chat's message. Raises UnsupportedError, InvalidRequestError."""
    for index, block in enumerate(blocks):
        _check(block, f"{path}[{index}]")
        if block["type"] != "text":
            raise InvalidRequestError(
                f"'{path}[{index}]' has the type '{str(block['type'])[:50]}'; only text belongs there.",
                param=f"{path}[{index}].type",
            )
        yield {"type": "text", "text": block["text"]}


def _check(block: dict[str, Any], path: str) -> None:
    kind = block.get("type")
    if isinstance(kind, str) and kind in _NO_TEXT:
        raise UnsupportedError(
            f"Content blocks of type '{kind}' are not supported: this server reads and answers text only.",
            param=f"{path}.type",
        )
    if not isinstance(kind, str):
        raise InvalidRequestError(f"'{path}.type' is required.", param=f"{path}.type")
    if kind == "text" and not isinstance(block.get("text"), str):
        raise InvalidRequestError(f"'{path}.text' is required, as a string.", param=f"{path}.text")


def _message(message: Message, path: str, known: set[str], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """One message as the messages of a chat: results of tools are messages of their own, in order."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "system":
        return _system(message.content, f"{path}.content")
    read = _assistant if message.role == "assistant" else _user
    return read(message.content, path, known, ignored)


def _user(blocks: list[dict[str, Any]], path: str, known: set[str], ignored: IgnoredFields) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{path}.content[{index}]"
        _check(block, where)
        if block["type"] == "text":
            part = {"type": "text", "text": block["text"]}
            if found and found[-1]["role"] == "user":
                found[-1]["content"].append(part)
            else:
                found.append({"role": "user", "content": [part]})
        elif block["type"] == "tool_result":
            call = block.get("tool_use_id")
            if not isinstance(call, str) or call not in known:
                raise InvalidRequestError(
                    f"'{where}.tool_use_id' names no 'tool_use' of an earlier message.", param=f"{where}.tool_use_id"
                )
            content = block.get("content") or ""
            if not isinstance(content, (str, list)):
                raise InvalidRequestError(f"'{where}.content' must be text or blocks.", param=f"{where}.content")
            text = content if isinstance(content, str) else [*_result(content, f"{where}.content", ignored)] or ""
            found.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            raise InvalidRequestError(
                f"'{where}' has the type '{block['type'][:50]}': a user's message has text and tool_result.",
                param=f"{where}.type",
            )
    return found


def _result(blocks: list[dict[str, Any]], path: str, ignored: IgnoredFields) -> Iterator[dict[str, str]]:
    """What a tool returned. An image stays in the conversation, so it is not refused: the model is told of it."""
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind in ("image", "document"):
            ignored.add(f"{path}[{index}].{kind}")
            yield {"type": "text", "text": f"[{kind}: only text can be read here]"}
        else:
            yield from _texts([block], path)


# Parts of answers of Anthropic's own servers, in conversations that began there.
_HOSTED = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "redacted_thinking")


def _assistant(
    blocks: list[dict[str, Any]], path: str, known: set[str], ignored: IgnoredFields
) -> list[dict[str, Any]]:
    texts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{path}.content[{index}]"
        _check(block, where)
        if block["type"] == "text":
            texts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif block["type"] == "tool_use":
            ident, name, given = block.get("id"), block.get("name"), block.get("input")
            if not isinstance(ident, str) or not isinstance(name, str) or not isinstance(given, dict):
                raise InvalidRequestError(f"'{where}' needs 'id', 'name' and 'input', an object.", param=where)
            known.add(ident)
            arguments = orjson.dumps(given).decode()
            calls.append({"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif block["type"] in _HOSTED or block["type"].endswith("_tool_result"):
            ignored.add(f"{where}.{block['type']}")
        else:
            raise InvalidRequestError(
                f"'{where}' has the type '{block['type'][:50]}': an assistant's message has text, thinking and "
                "tool_use.",
                param=f"{where}.type",
            )
    message: dict[str, Any] = {"role": "assistant", "content": texts or None}
    if calls:
        message["tool_calls"] = calls
    if any(reasoning):
        message["reasoning_content"] = "\n".join(reasoning)
    return [message]
