"""The immutable sandbox of chat templates, in which the size of what they make is bounded.

Each operation that enlarges text or lists is checked before it is done; calls and output are counted. Loops and all
that the sandbox does not intercept: `template_tree.py`; filters: `template_filters.py`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import pass_context
from markupsafe import Markup, escape

from headrace_router.text import template_sizes as sizes
from headrace_router.text.template_budget import (
    ENTRY,
    MANY,
    PASS,
    PIECE,
    allow,
    spend,
    spend_parts,
    spend_value,
    text_size,
)
from headrace_router.text.template_compare import check_compared, check_searched, counted_tests, read_all, read_once
from headrace_router.text.template_filters import counted_filters
from headrace_router.text.template_tree import INSERTED, INSERTED_PLAIN, CountedTree

# Methods that read the characters of their arguments one by one.
_CHARACTER_METHODS = ("fromkeys", "isdisjoint", "maketrans")
# What makes bytes or integers of any size, for which templates have no use; codecs may take minutes, and are kept.
# Beside them, methods of Markup that copy a text for each tag in it.
_OMITTED_METHODS = ("encode", "from_bytes", "striptags", "to_bytes", "unescape")


class SizedSandbox(ImmutableSandboxedEnvironment):
    """Raises TemplateSizeError, within `render_budget`. Nothing is computed when a template is compiled."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], names: Mapping[str, Any], **options: Any) -> None:
        """names: those that every template knows, beside jinja2's own."""
        super().__init__(optimized=False, finalize=_finalize, **options)
        self.filters = {**counted_filters({**self.filters, **filters, **INSERTED_PLAIN}), **INSERTED}
        self.tests = {**self.tests, **counted_tests(self.tests)}
        del self.globals["lipsum"]
        self.globals.update(names)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes.check_numbers(operator, left, right)
        if operator == "+":
            allow(sizes.total(left, right))
        elif operator == "*":
            allow(sizes.product(left, right))
        elif operator == "-" and not isinstance(right, (int, float)):
            right = read_once(right)  # of sets, which are made of the keys of dicts
            check_compared(left, right)
            spend(allow(sizes.listed(right)))
        elif operator == "%" and isinstance(left, str):
            allow(sizes.printf(left, *(right if isinstance(right, tuple) else (right,))))
        return spend_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        spend(PASS)
        if name == "join" and isinstance(owner, str):
            args = tuple(map(read_all, args))  # an iterator is read once only
        if name in _CHARACTER_METHODS or __obj in (__self.globals["dict"], __self.globals["namespace"]):
            args = tuple(map(read_once, args))
        if name in sizes.METHODS and isinstance(owner, (str, date)):
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # others are jinja2's own
            allow(sizes.METHODS[name](owner, *args, **named))
        elif name in {"count", "index"} and isinstance(owner, MANY):
            check_searched(args[0] if args else None, owner)
        if not isinstance(__obj, Macro):
            check_compared(owner if isinstance(owner, str) else "", *args, *kwargs.values())
            read = sum(len(value) for value in (*args, *kwargs.values()) if isinstance(value, str))
            spend(allow(ENTRY // 4 * read) if name in _CHARACTER_METHODS else read)
        return spend_parts(owner, super().call(__context, __obj, *args, **kwargs))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A filter that another one calls."""
        if name in INSERTED or name in INSERTED_PLAIN:
            raise SecurityError("no template can name this filter")
        return super().call_filter(name, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _OMITTED_METHODS and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        spend(ENTRY)
        check_compared(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        spend(PIECE)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            sizes.fields(text)
            formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
            if is_map:
                (kwargs,), args = args, ()
            made: str = type(text)(formatter.vformat(text, args, kwargs))
            return made

        return format_text

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what the template, a macro or a block has written."""
        made, size = [], 0
        for part in parts:
            size = allow(size + len(part))
            made.append(part)
        text: str = spend_value("".join(made))
        return text

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raises the error that is handled. jinja2 rewrites its traceback, and so keeps what the template made."""
        raise

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(CountedTree(self).visit(source), *args, **kwargs)


class _SizedFields:
    """Formats the fields of a text within the largest size, all together."""

    _size = 0

    def format_field(self, value: Any, spec: str) -> Any:
        numbers = [int(number[:12]) for number in re.findall(r"\d+", spec)]
        self._size = allow(self._size + text_size(value) + sum(numbers))
        return super().format_field(value, spec)  # type: ignore[misc]

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        allow(text_size(value))
        return super().convert_field(value, conversion)  # type: ignore[misc]


class _Formatter(_SizedFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_SizedFields, SandboxedEscapeFormatter):
    pass


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What is written; never when the template is compiled, since it needs a context.

    A macro holds all that it writes until its end, so each copy is counted.
    """
    text = sizes.as_text(value)
    written = escape(text) if context.eval_ctx.autoescape else str(text)
    return value if written is value else spend_value(written)
