"""Bodies to models: what is not supported is refused by name, and what is wrong is said in one sentence."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace_router.bodies import ChatBody, CompletionBody
from headrace_router.errors import InvalidRequestError, UnsupportedError

Body = TypeVar("Body", ChatBody, CompletionBody)

REFUSED_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "audio", "refusal", "reasoning_content")
UNSUPPORTED_ROLES = ("tool", "function")
MAX_FIELDS = 100
MAX_ENTRIES = 65536
PART_KINDS = ("image_url", "input_audio", "file", "video_url", "refusal")


def parse_body(kind: type[Body], value: Any) -> Body:
    """Checks a decoded JSON value. Raises InvalidRequestError or UnsupportedError with `param` set."""
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    _check_sizes(value)
    given = {name: entry for name, entry in value.items() if entry is not None}
    for name, harmless in kind.refused.items():
        if name in given:
            entry = given.pop(name)
            if not any(type(entry) is type(allowed) and entry == allowed for allowed in harmless):
                raise UnsupportedError(f"'{name}' is not supported by this server.", param=name)
    messages = given.get("messages")
    if kind is ChatBody and isinstance(messages, list):
        given["messages"] = [_without_refused(message, place) for place, message in enumerate(messages)]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error, kind) from None


def _check_sizes(value: dict[str, Any]) -> None:
    """Bounds the number of errors that checking can find."""
    if len(value) > MAX_FIELDS:
        raise InvalidRequestError(f"The body has {len(value)} fields; no request has more than {MAX_FIELDS}.")
    for name, entry in value.items():
        if isinstance(entry, dict) and len(entry) > MAX_ENTRIES:
            raise InvalidRequestError(
                f"'{name[:100]}' has {len(entry)} entries; the limit is {MAX_ENTRIES}.", param=name
            )


def _without_refused(message: Any, place: int) -> Any:
    """A message without null fields; refuses what only tools, audio and images need."""
    if not isinstance(message, dict):
        return message
    for name in REFUSED_IN_MESSAGES:
        if message.get(name) not in (None, []):
            raise UnsupportedError(
                f"'{name}' in messages is not supported by this server.", param=f"messages[{place}].{name}"
            )
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str) and role in UNSUPPORTED_ROLES:
        raise UnsupportedError(
            f"Messages of role '{role}' are not supported by this server.", param=f"messages[{place}].role"
        )
    for part_place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PART_KINDS:
            raise UnsupportedError(
                f"Content parts of type '{part['type']}' are not supported by this server: it reads text only.",
                param=f"messages[{place}].content[{part_place}].type",
            )
    return {name: entry for name, entry in message.items() if entry is not None and name not in REFUSED_IN_MESSAGES}


def _as_api_error(error: ValidationError, kind: type[BaseModel]) -> InvalidRequestError:
    """The first error, preferring what every form of a field agrees on; never the client's own text."""
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = errors[0]
    same_field = [entry for entry in errors if entry["loc"][:1] == first["loc"][:1]]
    # Of a field with several forms, the error that lies deepest belongs to the form that was meant.
    first = max(same_field, key=lambda entry: len(_path(entry["loc"])))
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unknown field '{param[:100]}'.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return InvalidRequestError(f"'{param}' is required.", param=param, code="missing_required_parameter")
    text = first["msg"][:300]
    return InvalidRequestError(
        f"'{param[:100]}' is not valid: {text[:1].lower()}{text[1:]}.", param=param, code="invalid_value"
    )


def _path(location: tuple[int | str, ...]) -> str:
    """A location as clients write it, without the names that pydantic gives to a union's forms."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not ("[" in step or "(" in step or step in ("str", "int", "constrained-int", "strict-str", "float")):
            path += f".{step}" if path else step
    return path
