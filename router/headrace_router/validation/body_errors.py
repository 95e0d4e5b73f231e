"""Bodies to models: unsupported fields are refused by name, and each error is one sentence."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace_router.core.errors import (
    ForeignFieldError,
    InvalidRequestError,
    InvalidValueError,
    MissingParameterError,
    UnknownParameterError,
    UnsupportedError,
)
from headrace_router.core.limits import Limits
from headrace_router.validation.bodies import ChatBody, CompletionBody
from headrace_router.validation.field_table import HONOURED, RESTRICTED, Scope

HEADER = b"x-headrace-ignored-fields"
MAX_NAMES = 16
MAX_NAME_CHARS = 64

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class IgnoredFields:
    """Collects names for the header: bounded in number and length, and reduced to plain characters."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._more = False

    def add(self, name: str) -> None:
        if self._more:
            return
        shown = _NOT_PLAIN.sub("_", name[:MAX_NAME_CHARS])
        if shown in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[shown] = None
        else:
            self._more = True

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header, or an empty list if nothing was ignored. `...` replaces the names beyond the limit."""
        if not self._names:
            return []
        return [(HEADER, ", ".join([*self._names, *(["..."] if self._more else [])]).encode())]


def filter_fields(body: dict[str, Any], scope: Scope, ignored: IgnoredFields | None) -> dict[str, Any]:
    """The body without fields that are null or accepted, and without unknown ones if these are ignored.

    ignored: collects the names of unknown fields; None = they are refused.
    Raises UnsupportedError or InvalidRequestError with `param` set.
    """
    kept = _filter(body, scope, "", ignored)
    if isinstance(options := kept.get("stream_options"), dict):
        kept["stream_options"] = _filter(options, Scope.STREAM_OPTIONS, "stream_options.", ignored)
    if scope is Scope.CHAT and isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]
    return kept


def _message(message: Any, path: str, ignored: IgnoredFields | None) -> Any:
    if not isinstance(message, dict):
        return message
    kept = _filter(message, Scope.MESSAGE, path + ".", ignored)
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [
            _filter(part, Scope.PART, f"{path}.content[{i}].", ignored) if _is_text(part) else part
            for i, part in enumerate(content)
        ]
    return kept


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _filter(fields: dict[str, Any], scope: Scope, before: str, ignored: IgnoredFields | None) -> dict[str, Any]:
    if len(fields) > scope.max_fields:
        what = f"'{before[:-1]}'" if before else "The body"
        raise InvalidRequestError(
            f"{what} has {len(fields)} fields; the limit is {scope.max_fields}.", param=before[:-1] or None
        )
    honoured, restricted = HONOURED[scope], RESTRICTED[scope]
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in honoured:
            kept[name] = value
        elif row := restricted.get(name):
            row.check(value, before + name)
        elif ignored is not None:
            ignored.add(name if not before else f"{scope.value}.{name}")
        else:
            path = (before + name)[:100]
            near = get_close_matches(name[:40], [*honoured, *restricted], n=1)
            hint = f": did you mean '{before}{near[0]}'?" if near else "."
            raise UnknownParameterError(f"Unknown field '{path}'{hint}", param=path)
    return kept


_LABELS = ("user", "safety_identifier", "prompt_cache_key", "session_id", "metadata", "stream_options")


def refuse_chat_fields(value: Mapping[str, Any], fields: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuses fields of chats that another API does not have, and that would change the answer.

    fields: of that API. instead: its own names, by those of chats. Raises ForeignFieldError.
    """
    foreign = HONOURED[Scope.CHAT] - {*fields, *_LABELS}
    for name, entry in value.items():
        if name in foreign and entry not in (None, False, []):
            hint = f"; send '{instead[name]}'" if name in instead else ""
            raise ForeignFieldError(f"'{name}' is no field of this API{hint}.", param=name)


Body = TypeVar("Body", ChatBody, CompletionBody)

UNSUPPORTED_ROLES = ("function",)
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")  # pydantic's types of errors
_OBJECT = "it must be an object"
# Types of content parts in OpenAI's API, its Responses API, vLLM and transformers.
PART_KINDS = (
    *("image_url", "image", "input_image", "input_audio", "audio_url", "audio", "video_url", "video"),
    *("file", "input_file", "refusal"),
)


def parse_body(kind: type[Body], value: Any, limits: Limits, ignored: IgnoredFields | None = None) -> Body:
    """Checks a decoded JSON value. Raises InvalidRequestError or UnsupportedError with `param` set.

    ignored: collects the names of unknown fields; None = they are refused.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    _check_sizes(value, max(limits.logit_bias_entries, limits.metadata_entries))
    if kind is ChatBody and isinstance(messages := value.get("messages"), list):
        _check_counts(messages, limits)
        for index, message in enumerate(messages):
            _check_message(message, index)
    given = filter_fields(value, Scope.CHAT if kind is ChatBody else Scope.COMPLETIONS, ignored)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise as_api_error(error) from None


def _check_sizes(value: dict[str, Any], limit: int) -> None:
    """Bounds the number of errors that the check can find. `filter_fields` counts the fields themselves."""
    for name, entry in value.items():
        if isinstance(entry, dict) and len(entry) > limit:
            raise InvalidRequestError(
                f"'{name[:100]}' has {len(entry)} entries; the limit is {limit}.", param=name[:100]
            )


def _check_counts(messages: list[Any], limits: Limits) -> None:
    """Bounds the work on messages before the first is checked."""
    if len(messages) > limits.messages:
        raise InvalidRequestError(
            f"'messages' has {len(messages)} messages; the limit is {limits.messages}.", param="messages"
        )
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > limits.content_parts:
        raise InvalidRequestError(
            f"'messages' has {parts} content parts; the limit is {limits.content_parts}.", param="messages"
        )


def _check_message(message: Any, index: int) -> None:
    """Refuses messages of functions, and content that is not text."""
    if not isinstance(message, dict):
        return
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str) and role in UNSUPPORTED_ROLES:
        raise UnsupportedError(
            f"Messages of role '{role}' are not supported by this server.", param=f"messages[{index}].role"
        )
    for part_index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PART_KINDS:
            raise UnsupportedError(
                f"Content parts of type '{part['type']}' are not supported: this server reads and answers text only.",
                param=f"messages[{index}].content[{part_index}].type",
            )


def as_api_error(error: ValidationError) -> InvalidRequestError:
    """The first error, preferring one that all forms of a field have in common; never the client's own text."""
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = errors[0]
    same_field = [entry for entry in errors if entry["loc"][:1] == first["loc"][:1]]
    # The error with the longest path is that of the form that the client intended, where a field has several forms.
    first = max(same_field, key=lambda entry: len(_path(entry["loc"])))
    param = _path(first["loc"])
    if first["type"] == "missing":
        return MissingParameterError(f"'{param}' is required.", param=param)
    text = _OBJECT if first["type"] in _NO_OBJECT else first["msg"].removeprefix("Value error, ")[:300]
    return InvalidValueError(f"'{param[:100]}' is not valid: {text[:1].lower()}{text[1:]}.", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """A location as clients write it, without the names that pydantic gives to a union's forms."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not ("[" in step or "(" in step or step in ("str", "int", "constrained-int", "strict-str", "float")):
            path += f".{step}" if path else step
    return path
