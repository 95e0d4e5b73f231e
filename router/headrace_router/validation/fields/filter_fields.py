"""Reduces a decoded body to its honoured fields, which the pydantic models then check."""

from difflib import get_close_matches
from typing import Any

from headrace_router.core.errors import InvalidRequestError, UnknownParameterError
from headrace_router.validation.fields.field_table import HONOURED, RESTRICTED
from headrace_router.validation.fields.ignored_fields import IgnoredFields
from headrace_router.validation.fields.scope import Scope


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
