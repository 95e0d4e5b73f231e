"""The filters of chat templates, with what they read and make counted."""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import pass_context

from headrace_router.text import template_sizes as sizes
from headrace_router.text.template_budget import ENTRY, MANY, allow, spend, spend_parts
from headrace_router.text.template_compare import CountedEntries, check_compared
from headrace_router.text.template_tree import SLICE

# Filters that compare the entries of their input, or hash them; those that read at most one of them.
_COMPARING_FILTERS = ("dictsort", "groupby", "max", "min", "sort", "unique")
_ONE_ENTRY_FILTERS = ("attr", "count", "d", "default", "first", "last", "length", "random", SLICE)
# Filters that read the characters of a text one by one.
_CHARACTER_FILTERS = ("join", "list", "map", "reject", "rejectattr", "select", "selectattr", "sum")
# Where filters take the name of an attribute, beside the keyword.
_ATTRIBUTES = {"groupby": 0, "rejectattr": 0, "selectattr": 0, "sum": 0, "join": 1, "max": 1, "min": 1, "unique": 1}
_ATTRIBUTES["sort"] = 2
# What is of use in web pages only, and has no bound of its own.
_OMITTED_FILTERS = ("batch", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr")


def counted_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The same filters, within the bounds, without those that have none."""
    return {name: _counted(name, function) for name, function in filters.items() if name not in _OMITTED_FILTERS}


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the size of its result checked before and counted afterwards."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    size = sizes.FILTERS.get(name)

    @pass_context
    @wraps(function, updated=())
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _counted_input(name, value)
        _check_attribute(name, args, kwargs)
        if name == "join":
            value, args, kwargs = _parts(context, value, *args, **kwargs)
        elif size is not None:
            allow(size(value, *args, **kwargs))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = [first[passed]] if passed else []
        return spend_parts(value, function(*given, value, *args, **kwargs))

    return counted


def _counted_input(name: str, value: Any) -> Any:
    """The input of a filter, with what the filter reads of it counted."""
    if name in _ONE_ENTRY_FILTERS:
        return value
    if isinstance(value, Iterator):
        value = CountedEntries(value)
    if isinstance(value, str):
        check_compared(value)
        if name in _COMPARING_FILTERS:
            spend(allow(ENTRY * len(value)))
        elif name in _CHARACTER_FILTERS:
            allow(sizes.listed(value))
            spend(ENTRY * len(value))
    elif name in _COMPARING_FILTERS:
        value = list(value) if isinstance(value, Iterator) else value
        check_compared(value)
    elif isinstance(value, MANY):
        spend(ENTRY * len(value))
    return value


def _check_attribute(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """What a filter reads of each entry has a short name. Raises SecurityError."""
    place = _ATTRIBUTES.get(name, len(args))
    for attribute in (kwargs.get("attribute"), *args[place : place + 1]):
        if isinstance(attribute, str):
            sizes.attribute(attribute)


def _parts(
    context: Context, values: Any, d: Any = "", attribute: Any = None
) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """The arguments of the filter `join`, with values that were read once, if their text is not too large."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    parts = list(values)
    allow(sizes.join(d, parts))
    return parts, (d,), {}
