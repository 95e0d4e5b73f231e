"""The body of OpenAI's Responses API, without state, and the chat that it asks for."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from headrace_router.core.errors import InvalidRequestError, UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.core.sampling_options import Number, TokenCount
from headrace_router.validation.bodies import ChatBody
from headrace_router.validation.body_errors import IgnoredFields, as_api_error, parse_body, refuse_chat_fields

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_STATELESS = "this server keeps no answers: send the whole conversation as 'input'."


class _Open(BaseModel):
    """Members that are not declared change nothing."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class ResponsesText(_Open):
    format: dict[str, Any] | None = Field(default=None, description="text, json_object or json_schema")
    verbosity: StrictStr | None = None


class ResponsesReasoning(_Open):
    effort: StrictStr | None = None
    summary: StrictStr | None = None


class ResponsesBody(_Open):
    """POST /v1/responses. Fields that are not declared change nothing; a response header names them."""

    model: StrictStr = Field(min_length=1, max_length=512)
    input: StrictStr | list[dict[str, Any]]
    instructions: StrictStr | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: StrictBool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    metadata: dict[str, StrictStr] | None = None
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    truncation: Literal["disabled", "auto"] | None = None
    store: StrictBool | None = None


_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "answers are sent on the connection that asks for them.",
    "prompt": "this server keeps no prompts: send 'input' and 'instructions'.",
}
_INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_SAME = ("model", "temperature", "top_p", "stream", "metadata", "user", "safety_identifier", "prompt_cache_key")
_SEAL = "headrace:"
_SEPARATOR = "__"
# Items of answers of OpenAI's own servers, in conversations that began there.
_HOSTED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "compaction"),
    *("computer_call", "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request"),
    "mcp_approval_response",
)
_SILENT = ("include", "stream_options", "service_tier")  # no answer depends on them, but for parts of `include`
_ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Echo:
    """What an answer takes from its request. fields: that it repeats. encrypts: its reasoning comes sealed, too."""

    fields: dict[str, Any]
    encrypts: bool


def parse_responses(value: Any, limits: Limits, ignored: IgnoredFields) -> tuple[ChatBody, Echo]:
    """The chat that a body of the Responses API asks for, and what its answer takes from it.

    ignored: collects what was left out. Raises InvalidRequestError or UnsupportedError with `param` set.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    for name, sentence in _REFUSED.items():
        if value.get(name):
            raise UnsupportedError(f"'{name}' is not supported: {sentence}", param=name)
    if value.get("store"):
        raise UnsupportedError(f"'store' may only be false: {_STATELESS}", param="store")
    refuse_chat_fields(value, {*ResponsesBody.model_fields, *_SILENT, "n"}, _INSTEAD)
    for name, entry in value.items():
        known = name in ResponsesBody.model_fields or name in _REFUSED or name in _SILENT
        if not known and entry not in (None, False, 0):
            ignored.add(name)
    try:
        body = ResponsesBody.model_validate({name: entry for name, entry in value.items() if entry is not None})
    except ValidationError as error:
        raise as_api_error(error) from None
    _name_ignored(value, body, ignored)
    kept = [tool for index, tool in enumerate(body.tools or ()) if _is_ours(tool, index, ignored)]
    tools = [tool for given in kept for tool in _flat(given)]
    fields = {name: entry for name, entry in _chat(body, tools, ignored) if entry is not None}
    encrypts = isinstance(value.get("include"), list) and _ENCRYPTED in value["include"]
    return parse_body(ChatBody, fields, limits), Echo(_repeated(body, kept), encrypts)


def _chat(body: ResponsesBody, tools: list[dict[str, Any]], ignored: IgnoredFields) -> Iterator[tuple[str, Any]]:
    """The fields of the chat."""
    given = body.input
    if not given:
        raise InvalidRequestError("'input' is empty.", param="input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _Items(ignored).messages(given)
    yield "messages", _with_instructions(body.instructions, messages)
    yield "max_tokens", body.max_output_tokens
    for name in _SAME:
        yield name, getattr(body, name)
    yield "tools", [_tool(tool) for tool in tools] or None
    if tools:
        yield "tool_choice", _choice(body.tool_choice)
        yield "parallel_tool_calls", body.parallel_tool_calls
    elif body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError("'tool_choice' needs a tool in 'tools' that the client runs.", param="tool_choice")
    if body.reasoning is not None:
        yield "reasoning_effort", body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        yield "response_format", _format(body.text.format)


def _name_ignored(value: dict[str, Any], body: ResponsesBody, ignored: IgnoredFields) -> None:
    """Names what is known, asks for something, and changes nothing here."""
    if body.truncation == "auto":
        ignored.add("truncation")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        ignored.add("text.verbosity")
    if isinstance(wanted := value.get("include"), list) and any(entry != _ENCRYPTED for entry in wanted):
        ignored.add("include")


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message first: most templates take no second one."""
    texts = [instructions] if instructions else []
    while len(messages) > 1 and messages[0]["role"] in ("system", "developer"):
        texts.append(messages[0]["content"])
        messages = messages[1:]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages] if texts else messages


def _repeated(body: ResponsesBody, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What an answer says of its request. A tool that was left out is not in it."""
    reasoning, text = body.reasoning or ResponsesReasoning(), body.text or ResponsesText()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _is_ours(tool: dict[str, Any], index: int, ignored: IgnoredFields) -> bool:
    """Whether the client runs the tool; a tool that OpenAI's servers run is named in the response header."""
    kind = tool.get("type")
    if kind in ("function", "custom") or (kind == "namespace" and isinstance(tool.get("tools"), list)):
        return True
    if not isinstance(kind, str):
        raise InvalidRequestError(f"'tools[{index}].type' is required.", param=f"tools[{index}].type")
    ignored.add(f"tools[{index}].{kind}")
    return False


def in_namespace(namespace: str, name: str) -> str:
    """The name of a tool of a namespace, for the model: Codex groups those of a server of MCP so."""
    return f"{namespace}{_SEPARATOR}{name}"


def without_namespace(name: str, tools: Iterable[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The name as the client has it, and its namespace. tools: of the request."""
    spaces = [str(tool.get("name")) for tool in tools if tool.get("type") == "namespace"]
    own = max((space for space in spaces if name.startswith(in_namespace(space, ""))), key=len, default=None)
    return (name, None) if own is None else (name.removeprefix(in_namespace(own, "")), own)


def _flat(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tool, or those of a namespace."""
    if tool["type"] != "namespace":
        yield tool
        return
    for inner in tool["tools"]:
        if isinstance(inner, dict) and inner.get("type") in ("function", "custom"):
            yield {**inner, "name": in_namespace(str(tool.get("name")), str(inner.get("name")))}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool["type"]
    inner = {name: value for name, value in tool.items() if name != "type" and value is not None}
    given = inner.get("format")
    if kind == "custom" and isinstance(given, dict) and given.get("type") == "grammar" and "grammar" not in given:
        grammar = {name: value for name, value in given.items() if name != "type"}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: inner}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        name, space = choice.get("name"), choice.get("namespace")
        return {"type": kind, kind: {"name": in_namespace(str(space), str(name)) if space else name}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        named = [_choice(tool) for tool in choice["tools"]]
        return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": named}}
    raise InvalidRequestError("'tool_choice' names no tool that this server offers.", param="tool_choice")


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def sealed(reasoning: str) -> str:
    """The reasoning in a form that clients give back as it is; nothing of it is secret."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def opened(given: Any) -> str:
    """The reasoning that `sealed` wrote; empty for anything else, such as that of another server."""
    if not isinstance(given, str) or not given.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


class _Items:
    """Reads the items of an input in order: what an assistant thinks, says and calls in one turn is one message."""

    def __init__(self, ignored: IgnoredFields) -> None:
        """ignored: collects items that were left out."""
        self._ignored = ignored
        self._found: list[dict[str, Any]] = []
        self._calls: set[str] = set()

    def messages(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, item in enumerate(items):
            self._read(item, f"input[{index}]")
        return self._found

    def _read(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            text = _text(item.get("content") or item.get("summary") or [], f"{path}.content")
            text = text or opened(item.get("encrypted_content"))
            if text:
                self._assistant("content", "tool_calls", "reasoning_content")["reasoning_content"] = text
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, path, custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call = item.get("call_id")
            if not isinstance(call, str) or call not in self._calls:
                raise InvalidRequestError(
                    f"'{path}.call_id' names no call of an earlier item.", param=f"{path}.call_id"
                )
            text = _text(item.get("output") or "", f"{path}.output")
            self._found.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "item_reference":
            raise UnsupportedError(
                f"'{path}' refers to an item of an earlier answer, and this server keeps none: have the client send "
                "the whole conversation ('store': false; in the AI SDK providerOptions.openai.store = false).",
                param=path,
            )
        elif kind in _HOSTED:
            self._ignored.add(f"{path}.{kind}")
        else:
            raise UnsupportedError(
                f"'{path}' has the type '{str(kind)[:50]}', which is not supported; send messages, reasoning, calls of "
                "functions and custom tools, and their outputs.",
                param=f"{path}.type",
            )

    def _message(self, item: dict[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequestError(
                f"'{path}.role' must be user, assistant, system or developer.", param=f"{path}.role"
            )
        text = _text(item.get("content") or "", f"{path}.content")
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = text
        else:
            self._found.append({"role": role, "content": text})

    def _call(self, item: dict[str, Any], path: str, *, custom: bool) -> None:
        ident, name, given = item.get("call_id"), item.get("name"), item.get("input" if custom else "arguments")
        if not (isinstance(ident, str) and isinstance(name, str) and isinstance(given, str)):
            member = "input" if custom else "arguments"
            raise InvalidRequestError(f"'{path}' needs 'call_id', 'name' and '{member}', as strings.", param=path)
        self._calls.add(ident)
        if isinstance(item.get("namespace"), str):
            name = in_namespace(item["namespace"], name)
        kind = "custom" if custom else "function"
        call = {"id": ident, "type": kind, kind: {"name": name, "input" if custom else "arguments": given}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self, *without: str) -> dict[str, Any]:
        """The assistant's message of this turn; a new one after another's, or where it has any of these members."""
        last = self._found[-1] if self._found else {"role": ""}
        if last["role"] != "assistant" or any(member in last for member in without):
            last = {"role": "assistant"}
            self._found.append(last)
        return last


def _text(content: Any, path: str) -> str:
    """The text of a string, or of parts. Raises UnsupportedError for images, audio and files."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{path}' must be text or a list of parts.", param=path)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise UnsupportedError(
                f"'{path}[{index}]' has the type '{str(kind)[:50]}': this server reads and answers text only.",
                param=f"{path}[{index}].type",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"'{path}[{index}].text' is required, as a string.", param=f"{path}[{index}]")
        texts.append(text)
    return "\n".join(texts)
