"""A field that clients send and this server does not implement."""

from dataclasses import dataclass
from typing import Any

import orjson

from headrace_router.core.errors import InvalidValueError, UnsupportedError
from headrace_router.validation.fields.json_kind import JsonKind, same_json


@dataclass(frozen=True, slots=True)
class RestrictedField:
    """`accepts`: the values that change nothing; None = every value of the kind, () = no value."""

    name: str
    kind: JsonKind
    accepts: tuple[Any, ...] | None
    note: str = ""  # a sentence with the reason, or with what to send instead

    def check(self, value: Any, path: str) -> None:
        """Returns if this value changes nothing. `path` is the field's name in errors.

        Raises UnsupportedError, or InvalidValueError if the value has the wrong type.
        """
        if self.accepts is None:
            if not self.kind.fits(value):
                raise self._wrong_kind(path)
        elif not any(same_json(value, allowed) for allowed in self.accepts):
            if self.accepts and not self.kind.fits(value):
                raise self._wrong_kind(path)
            raise UnsupportedError(self._refusal(path), param=path)

    def _wrong_kind(self, path: str) -> InvalidValueError:
        return InvalidValueError(f"'{path}' is not valid: its type must be {self.kind}.", param=path)

    def _refusal(self, path: str) -> str:
        only = " or ".join(orjson.dumps(value).decode() for value in self.accepts or ())
        sentence = f"'{path}' is not supported by this server" + (f"; it may only be {only}." if only else ".")
        return f"{sentence} {self.note}".rstrip()


def accepted(name: str, kind: JsonKind, note: str) -> RestrictedField:
    """A field of which no value of this kind changes an answer."""
    return RestrictedField(name, kind, None, note)


def accepted_at(name: str, kind: JsonKind, *values: Any, note: str = "") -> RestrictedField:
    """A field of which these values change nothing; any other would, and is refused."""
    return RestrictedField(name, kind, values, note)


def refused(name: str, kind: JsonKind, note: str = "") -> RestrictedField:
    """A field of which every value would change the answer."""
    return RestrictedField(name, kind, (), note)
