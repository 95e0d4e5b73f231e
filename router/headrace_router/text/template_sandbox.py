"""The immutable sandbox of chat templates, in which the size of what they make is bounded (docs/reliability.md R7).

Each operation that enlarges text or lists is checked before it is done; loops, calls and output are counted.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from headrace_router.text import template_sizes as sizes
from headrace_router.text.template_budget import ENTRY, MANY, NODE, PASS, PIECE, allow, spend, spend_value, text_size
from headrace_router.text.template_compare import check_compared, compare, counted_entries, counted_tests

# Names that no template can write: filters that `_CountedTree` inserts.
_CONCAT, _SLICE, _ENTRIES = "counted concat", "counted slice", "counted entries"
_COMPARE, _KEY, _PASS = "counted comparison", "counted key", "counted pass"
# Filters that compare the entries of their input, or hash them; those that read at most one of them.
_COMPARING_FILTERS = ("dictsort", "groupby", "max", "min", "sort", "unique")
_ONE_ENTRY_FILTERS = ("attr", "count", "d", "default", "first", "last", "length", "random", _SLICE)
# What is of use in web pages only, and has no bound of its own.
_OMITTED_FILTERS = ("batch", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr")


class SizedSandbox(ImmutableSandboxedEnvironment):
    """Raises TemplateSizeError, within `render_budget`. Nothing is computed when a template is compiled."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], names: Mapping[str, Any], **options: Any) -> None:
        """names: those that every template knows, beside jinja2's own."""
        super().__init__(optimized=False, finalize=_finalize, **options)
        known = {**self.filters, **filters, _CONCAT: _concat, _SLICE: _slice}
        self.filters = {name: _counted(name, known[name]) for name in known if name not in _OMITTED_FILTERS}
        self.filters |= {_COMPARE: compare, _ENTRIES: _entries, _KEY: _key, _PASS: _pass}
        self.tests = {**self.tests, **counted_tests(self.tests)}
        del self.globals["lipsum"]
        self.globals.update(names)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes.check_numbers(operator, left, right)
        if operator == "+":
            allow(sizes.total(left, right))
        elif operator == "*":
            allow(sizes.product(left, right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            allow(sizes.printf(left, *(right if isinstance(right, tuple) else (right,))))
        return spend_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if name in sizes.METHODS and isinstance(owner, (str, bytes, int, date)):
            if name == "join":
                args = tuple(map(list, args))  # an iterator is read once only
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # others are jinja2's own
            allow(sizes.METHODS[name](owner, *args, **named))
        if not isinstance(__obj, Macro):
            check_compared(owner if isinstance(owner, (str, bytes)) else "", *args, *kwargs.values())
        return spend_value(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_compared(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
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
        spend(size)
        return "".join(made)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_CountedTree(self).visit(source), *args, **kwargs)


class _CountedTree(NodeTransformer):
    """What the sandbox does not intercept becomes a filter: passes, `~`, slices, comparisons, lists and dicts."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count_body(node)
        if node.test is not None:
            node.test = self._filter(node.test, _PASS, nodes.Const(PASS))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._count_body(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node.expr, _COMPARE, *(arg for op in node.ops for arg in (nodes.Const(op.op), op.expr)))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, _ENTRIES)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, _ENTRIES) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._filter(pair.key, _KEY)
        return self._filter(node, _ENTRIES)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        edges = (node.arg.start, node.arg.stop, node.arg.step)
        return self._filter(node.node, _SLICE, *(nodes.Const(None) if edge is None else edge for edge in edges))

    def _count_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        written = sum(len(output.nodes) for output in node.find_all(nodes.Output))
        cost = max(PASS, NODE * sum(1 for _ in node.find_all(nodes.Node))) + PIECE * written
        self.generic_visit(node)
        counted = self._filter(nodes.Const(None, lineno=node.lineno), _PASS, nodes.Const(cost))
        node.body.insert(0, nodes.ExprStmt(counted, lineno=node.lineno))
        return node

    def _filter(self, value: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        made.set_environment(self._environment)
        return made


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
    """What is written; never when the template is compiled, since it needs a context."""
    return value if isinstance(value, str) else sizes.as_text(value)


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    allow(sizes.join("", parts))
    return markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)


@pass_context
def _entries(context: Context, made: Any) -> Any:
    return spend_value(made)


@pass_context
def _key(context: Context, value: Any) -> Any:
    check_compared(value)
    return value


@pass_context
def _pass(context: Context, value: Any, cost: int) -> Any:
    spend(cost)
    return value


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the size of its result checked before and counted afterwards."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    size = sizes.FILTERS.get(name)

    @pass_context
    @wraps(function, updated=())
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _counted_input(name, value)
        if name == "join":
            value, args, kwargs = _parts(context, value, *args, **kwargs)
        elif size is not None:
            allow(size(value, *args, **kwargs))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = [first[passed]] if passed else []
        return spend_value(function(*given, value, *args, **kwargs))

    return counted


def _counted_input(name: str, value: Any) -> Any:
    """The input of a filter, with what the filter reads of it counted."""
    if name in _ONE_ENTRY_FILTERS:
        return value
    if isinstance(value, Iterator):
        value = counted_entries(value)
    if name in _COMPARING_FILTERS:
        value = list(value) if isinstance(value, Iterator) else value
        check_compared(value)
    elif isinstance(value, MANY):
        check_compared(value) if isinstance(value, (str, bytes)) else spend(ENTRY * len(value))
    return value


def _parts(
    context: Context, values: Any, d: Any = "", attribute: Any = None
) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """The arguments of the filter `join`, with values that were read once, if their text is not too large."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    parts = list(values)
    allow(sizes.join(d, parts))
    return parts, (d,), {}
