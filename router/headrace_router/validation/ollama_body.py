"""The bodies of Ollama's API, and the chat or completion that they ask for: for editors that speak nothing else."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from headrace_router.core.errors import InvalidRequestError, UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.body_errors import IgnoredFields, as_api_error, parse_body

# Options by their names in Ollama's API. Others change nothing here, and a response header names them.
_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
_REFUSED = {
    "images": "this server reads and answers text only",
    "suffix": "this server does not fill gaps in texts",
    "template": "the model's own template is used",
    "context": "send the conversation to /api/chat",
}


class _Open(BaseModel):
    """Members that are not declared change nothing."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class OllamaFunction(_Open):
    name: StrictStr = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] | None = None


class OllamaCall(_Open):
    id: StrictStr | None = Field(default=None, max_length=256)
    function: OllamaFunction


class OllamaMessage(_Open):
    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_call_id: StrictStr | None = None
    tool_name: StrictStr | None = None


class OllamaBody(_Open):
    """POST /api/chat or /api/generate. Without messages, or a prompt, the answer says that the model is loaded."""

    model: StrictStr = Field(min_length=1, max_length=512)
    messages: list[OllamaMessage] | None = Field(default=None, description="of /api/chat")
    tools: list[dict[str, Any]] | None = Field(default=None, description="of /api/chat")
    prompt: StrictStr | None = Field(default=None, description="of /api/generate")
    system: StrictStr | None = Field(default=None, description="of /api/generate")
    raw: StrictBool | None = Field(default=None, description="of /api/generate: the prompt without the template")
    stream: StrictBool = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(default=None, description="json, or a JSON Schema")
    options: dict[str, Any] | None = None
    think: StrictBool | Annotated[StrictStr, Field(max_length=64)] | None = None
    keep_alive: StrictStr | float | None = Field(default=None, description="the model stays loaded")


def parse_ollama(value: Any, limits: Limits, ignored: IgnoredFields) -> ChatBody | CompletionBody | str:
    """What the body asks for; the model's name where it only asks to load the model.

    ignored: collects what was left out. Raises InvalidRequestError or UnsupportedError with `param` set.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    for name, entry in value.items():
        if name in _REFUSED and entry:
            raise UnsupportedError(f"'{name}' is not supported: {_REFUSED[name]}.", param=name)
        if name not in OllamaBody.model_fields and name not in _REFUSED:
            ignored.add(name)
    try:
        body = OllamaBody.model_validate({name: entry for name, entry in value.items() if entry is not None})
    except ValidationError as error:
        raise as_api_error(error) from None
    if not body.messages and not body.prompt:
        return body.model
    fields = {"model": body.model, "stream": body.stream, **_options(body, ignored)}
    if body.format:
        fields["response_format"] = _constraint(body.format)
    if body.raw and body.prompt:
        fields.setdefault("max_tokens", limits.output_tokens)  # as many as fit, as in Ollama
        return parse_body(CompletionBody, {**fields, "prompt": body.prompt}, limits)
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields |= {"chat_template_kwargs": {"enable_thinking": body.think}, "include_reasoning": body.think}
    if body.tools:
        fields["tools"] = body.tools
    return parse_body(ChatBody, {**fields, "messages": [*_messages(body)]}, limits)


def model_name(value: Any) -> str:
    """The model that /api/show is asked for, as `model` or, by older clients, `name`. Raises InvalidRequestError."""
    found = value.get("model") or value.get("name") if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise InvalidRequestError("'model' is required, as a string.", param="model")
    return found


def _options(body: OllamaBody, ignored: IgnoredFields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (body.options or {}).items():
        if name not in _OPTIONS:
            ignored.add(f"options.{name}")
        elif value is not None and not (name == "num_predict" and value in (-1, -2, 0)):  # as many as fit
            found[_OPTIONS[name]] = value
    return found


def _constraint(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": given}}


def _messages(body: OllamaBody) -> Iterator[dict[str, Any]]:
    """Calls have no ids in this API: results belong to them in their order, or by the name of the tool."""
    if not body.messages:
        yield from [{"role": "system", "content": body.system}] if body.system else []
        yield {"role": "user", "content": body.prompt}
        return
    count = 0
    waiting: dict[str, str] = {}  # names of the tools of calls without a result, by the call's id
    for index, message in enumerate(body.messages):
        if message.images:
            raise UnsupportedError(
                f"'messages[{index}].images' is not supported: {_REFUSED['images']}.", param=f"messages[{index}].images"
            )
        found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                ident = call.id or f"call_{count}"
                waiting[ident] = call.function.name
                arguments = orjson.dumps(call.function.arguments or {}).decode()
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": ident, "type": "function", "function": function})
                count += 1
            found["tool_calls"] = calls
        if message.role == "tool":
            found["tool_call_id"] = _answered(message, waiting)
        if message.thinking and message.role == "assistant":
            found["reasoning_content"] = message.thinking
        yield found


def _answered(message: OllamaMessage, waiting: dict[str, str]) -> str:
    """The call whose result this is; one that clients have cut out of the conversation has its id or name."""
    named = message.tool_call_id or message.tool_name
    ident = next((ident for ident, tool in waiting.items() if named in (None, "", ident, tool)), None)
    if ident is None:
        return named or "call"
    del waiting[ident]
    return ident
