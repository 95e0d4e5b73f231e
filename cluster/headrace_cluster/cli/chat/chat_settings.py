"""The settings of /set: fields of the requests, and whether statistics are shown. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from headrace_proto.errors import HeadraceError

# Fields of POST /v1/chat/completions, which defines their types and ranges.
FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
STATS = "stats"
NAMES = (*FIELDS, STATS)
DEFAULT = "default"
_SENT_AS = {"max_tokens": "max_completion_tokens"}
_NAMED = {sent: name for name, sent in _SENT_AS.items()}


class ChatSettingError(HeadraceError):
    """A setting does not exist, or cannot have this value."""


class ChatSettings:
    """Settings of one chat. The server chooses the value of a field that is not set."""

    def __init__(self, *, stats: bool = False) -> None:
        self._values: dict[str, Any] = {}
        self.stats = stats

    def request_fields(self) -> dict[str, Any]:
        """The fields that are set, as they are sent in a request."""
        return {_SENT_AS.get(name, name): value for name, value in self._values.items()}

    def set(self, name: str, text: str) -> None:
        """Sets a value as it was typed; 'default' unsets the field. Raises ChatSettingError."""
        if name == STATS:
            self.stats = _parse_switch(text)
            return
        value = None if text == DEFAULT else _parse_value(text)
        self.replace_fields(self._values | {name: value})

    def replace_fields(self, fields: dict[str, Any]) -> None:
        """Replaces all fields by those of a request. Raises ChatSettingError and changes nothing."""
        named = {_NAMED.get(name, name): value for name, value in fields.items()}
        checked = {name: check_value(name, value) for name, value in named.items()}
        self._values = {name: value for name, value in checked.items() if value is not None}

    def rows(self, defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Each name with its current value. defaults: the server's, if known."""
        fields = [
            (name, _shown(self._values[name]) if name in self._values else _default(defaults.get(name)))
            for name in FIELDS
        ]
        return [*fields, (STATS, "on" if self.stats else "off")]


def check_value(name: str, value: Any) -> Any:
    """The value if the API accepts it for this field; None = absent. Raises ChatSettingError."""
    if name not in FIELDS:
        raise ChatSettingError(f"there is no setting {name[:40]}; there are: {', '.join(NAMES)}")
    from pydantic import TypeAdapter, ValidationError

    from headrace_router.validation.bodies import ChatBody

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(ChatBody.model_fields[name].rebuild_annotation())
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].replace("Input should be", "it must be")
        raise ChatSettingError(f"{name} cannot be {_shown(value)[:40]}: {reason}") from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parse_switch(text: str) -> bool:
    if text not in ("on", "off", DEFAULT):
        raise ChatSettingError(f"{STATS} is on or off, not {text[:40]}")
    return text == "on"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _default(value: Any) -> str:
    return DEFAULT if value is None else f"{DEFAULT} ({_shown(value)})"
