"""Comparisons of a chat template, counted before they are done: they hold the interpreter lock until they end.

A list that contains another one twice is compared with both, so a small value may take very long.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2.runtime import Context
from jinja2.utils import pass_context

from headrace_router.text.template_budget import CALL, ENTRY, MANY, PASS, allow, spend, text_size
from headrace_router.text.template_sizes import check_numbers

SEARCHED = 16  # characters that are compared or searched in the time in which one is made

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


@pass_context
def compare(context: Context, left: Any, *rest: Any) -> Any:
    """A chain of comparisons. rest: operator and operand in turn, all of which are computed, unlike in Python."""
    result = True
    for name, right in zip(rest[::2], rest[1::2], strict=True):
        if name in {"in", "notin"}:
            right = check_searched(left, right)
        else:
            _check_pair(left, right)
        result = _OPERATORS[name](left, right)
        if not result:
            break
        left = right
    return result


def check_compared(*values: Any) -> None:
    """Counts values that are compared with others, hashed or searched. Raises TemplateSizeError."""
    for value in values:
        if isinstance(value, str):
            spend(len(value) // SEARCHED)
        elif isinstance(value, range):
            spend(len(value))
        elif isinstance(value, MANY):
            spend(allow(text_size(value)) // SEARCHED)


def check_searched(value: Any, values: Any) -> Any:
    """Counts a search of one value in others, and returns them. Raises TemplateSizeError."""
    spend(CALL)
    if isinstance(values, Iterator):
        values = read_all(values)
    if isinstance(value, MANY) and not isinstance(value, str):
        check_compared(value, values)
    elif isinstance(values, str):
        check_compared(values)
    elif isinstance(values, MANY):
        spend(len(values) * (1 + len(value) // SEARCHED if isinstance(value, str) else 1))
    return values


def counted_tests(tests: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Tests that compare, search, divide or write their operand, with that counted."""
    checks = {
        **{name: _check_pair for name, test in tests.items() if test in _OPERATORS.values()},
        **dict.fromkeys(("lower", "upper"), check_compared),
        **dict.fromkeys(("divisibleby", "even", "odd"), _check_division),
    }
    return {"in": _in, **{name: _checked(tests[name], check) for name, check in checks.items()}}


class CountedEntries(Iterator[Any]):
    """The same values, each of which is counted when it is read.

    It is no generator: CPython frees generators that read from each other by recursion, without a bound, while it
    frees a chain in which each other one is an object with bounded recursion.
    """

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values

    def __next__(self) -> Any:
        spend(PASS)
        return next(self._values)


def read_all(values: Any) -> Any:
    """The arguments that a call is given as one value, or the parts that a text joins."""
    if isinstance(values, str):
        allow(ENTRY // 4 * len(values))
    return list(CountedEntries(iter(values)))


def read_once(values: Any) -> Any:
    """The same values, read if they are read once only, so that what is made of them can be counted before."""
    return read_all(values) if isinstance(values, Iterator) else values


@pass_context
def _in(context: Context, value: Any, values: Any) -> bool:
    return value in check_searched(value, values)


def _check_pair(left: Any, right: Any) -> None:
    spend(CALL)
    if isinstance(left, str) and isinstance(right, str):
        spend(min(len(left), len(right)) // SEARCHED)
    elif isinstance(left, MANY) and isinstance(right, MANY):
        check_compared(left, right)


def _check_division(value: Any, divisor: int = 2) -> None:
    check_numbers("%", value, divisor)


def _checked(test: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    @wraps(test, updated=())
    def checked(context: Context, *args: Any) -> Any:
        check(*args)
        return test(*args)

    return checked
