"""The command-line flag and the environment variable of a setting, as the spec's fields declare them.

A field with `json_schema_extra=flag("--max-model-len")` (headrace_base.settings) has that flag, the variable
HEADRACE_MAX_MODEL_LEN and a line of `--help` made of its description and default; no other file names it. `{pool}` in a
flag stands for the name of the section that holds the field.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

PREFIX = "HEADRACE_"
POOL = "{pool}"  # in flags and help: the name of the section that holds the field
ARGUMENT = "MODEL"  # the one setting that is an argument without a flag
_NUMBERS = (bool, int, float, Path)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with a flag. `path` is its place in the spec; 'models': of the only model."""

    flag: str
    path: tuple[str, ...]
    kind: type  # bool, int, float, Path or str: what the flag's text is read as
    help: str
    values: str
    short: str

    @property
    def name(self) -> str:
        """As an argument of Python functions."""
        return self.flag.lower().removeprefix("--").replace("-", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and its short form if it has one."""
        return (self.flag, self.short) if self.short else (self.flag,)

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def settings_of(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """The settings of a section of the spec and of the sections within, as declared; inherited ones come last."""
    for name in sorted(section.model_fields, key=lambda name: name not in section.__annotations__):
        field = section.model_fields[name]
        extra = field.json_schema_extra
        inner = _section(field.annotation)
        if isinstance(extra, dict) and "flag" in extra:
            yield _setting(field, {key: str(value) for key, value in extra.items()}, (*path, name))
        elif inner is not None:
            yield from settings_of(inner, (*path, name))


def _setting(field: FieldInfo, extra: dict[str, str], path: tuple[str, ...]) -> Setting:
    choices = _choices(field.annotation)
    values = extra.get("values", "|".join(choices))
    pool = path[-2] if len(path) > 1 else ""
    text = (extra.get("help") or field.description or "").replace(POOL, pool)
    default = "on" if field.default is True and values else field.default
    # 0 is a default like any other; False and "" are those of flags that are not given.
    has_default = isinstance(default, int | float | str) and default is not False and default != ""
    if has_default and POOL not in extra["flag"]:
        text += f" [default: {default}]"
    return Setting(
        flag=extra["flag"].replace(POOL, pool),
        path=path,
        kind=str if values else _kind(field.annotation),
        help=text,
        values=values,
        short=extra.get("short", ""),
    )


def _kind(annotation: Any) -> type:
    """What the flag's text is read as; what has a notation of its own stays text, which the spec parses."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _kind(next(part for part in get_args(annotation) if part is not type(None)))
    if origin is Annotated:
        inner, *rules = get_args(annotation)
        return str if any(type(rule).__name__ == "BeforeValidator" for rule in rules) else _kind(inner)
    return annotation if annotation in _NUMBERS else str


def _choices(annotation: Any) -> tuple[str, ...]:
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, optional, or a tuple of such."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None
