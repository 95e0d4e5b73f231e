"""The largest size of what each filter, string method and operator that enlarges its input makes of its arguments.

Each function takes the arguments of what it is named after, and returns a number of characters. Raises SecurityError
for numbers that are too large whatever the messages are.
"""

import re
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from jinja2.exceptions import SecurityError

from headrace_router.text.template_budget import ENTRY, PASS, PIECE, allow, refuse_number, spend, text_size

_LARGEST_NUMBER_BITS = 1 << 12
_LARGEST_PRECISION = 300
_LARGEST_DIGITS = 8
_LONGEST_ATTRIBUTE = 256
_LONGEST_PATTERN = 64  # of what is searched for from the end, or removed from the ends
# Key, width and precision of a printf-style conversion.
_CONVERSION = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")
_NESTED_KEY = re.compile(r"%\([^()]*\(")


def as_text(value: Any) -> Any:
    """The value, written as text if it is none. Raises TemplateSizeError."""
    allow(text_size(value))
    return value if isinstance(value, str) else str(value)


def check_numbers(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if an integer, or the result of the operator, has too many digits."""
    if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
        return
    bits = [side.bit_length() if isinstance(side, int) else 0 for side in (left, right)]
    made = {"*": sum(bits), "**": bits[0] * abs(right)}.get(operator, max(bits))
    if max(made, *bits) > _LARGEST_NUMBER_BITS:
        raise SecurityError("a number is too large")


def product(left: Any, right: Any) -> int:
    """Of `*`."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return 0
    sizes = [refuse_number(side) if isinstance(side, (int, float)) else _size(side) for side in (left, right)]
    return abs(sizes[0] * sizes[1])


def total(left: Any, right: Any) -> int:
    """Of `+`."""
    return 0 if isinstance(left, (int, float)) else _size(left) + _size(right)


def printf(text: Any, *args: Any, **kwargs: Any) -> int:
    """Of `%` and the filter `format`: each conversion may write the largest value, in the largest width."""
    plain = str(text)
    spend(len(plain) + allow(ENTRY * plain.count("%")))
    if _NESTED_KEY.search(plain):
        raise SecurityError("the key of a conversion has parentheses")
    widths = [number for conversion in _CONVERSION.findall(plain) for number in conversion if number]
    stars = [abs(value) for value in args if isinstance(value, int)] if "*" in widths else []
    if any(len(number) > _LARGEST_DIGITS for number in widths):
        raise SecurityError("a width is too large")
    width = sum(int(number) for number in widths if number != "*") + widths.count("*") * max(stars, default=0)
    values = [*args, *(entry for value in args if isinstance(value, Mapping) for entry in value.values())]
    largest = max(map(text_size, [*values, *kwargs.values()]), default=0)
    return len(plain) + refuse_number(width) + plain.count("%") * largest


def padded(text: Any, width: int = 80, fill: Any = " ") -> int:
    """Of `center`, `ljust`, `rjust` and `zfill`."""
    return max(text_size(text), refuse_number(width))


def expandtabs(text: Any, tabsize: int = 8) -> int:
    return len(text) * max(8, refuse_number(tabsize))


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> int:
    found: int = as_text(text).count(as_text(old))
    times = found if count is None or count < 0 else min(found, count)
    return text_size(text) + times * text_size(new)


def join(separator: Any, parts: list[Any]) -> int:
    size = len(parts) * text_size(separator)
    for part in parts:
        size = allow(size + text_size(part))
    return size


def translate(text: Any, table: Any) -> int:
    spend(len(text))
    return len(text) * max(map(text_size, dict(table).values()), default=1)


def strftime(day: date, written: str) -> int:
    """The C library writes at most so much."""
    return 256 * len(written)


def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    lines = len(as_text(text).splitlines())
    spend(ENTRY * lines)
    return text_size(text) + (lines + 1) * (len(width) if isinstance(width, str) else refuse_number(width))


def tojson(value: Any, ensure_ascii: bool = False, indent: int | str | None = None, **options: Any) -> int:
    between = len(indent) if isinstance(indent, str) else refuse_number(indent or 0)
    return text_size(value, between + text_size(options.get("separators") or ""))


def rounded(value: Any, precision: int = 0, method: str = "common") -> int:
    if abs(precision) > _LARGEST_PRECISION:
        raise SecurityError("a precision is too large")
    return 0


def summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    """Numbers only: sums of lists copy each list many times."""
    if not isinstance(start, (int, float)):
        raise SecurityError("a sum of lists")
    return 0


def integer(value: Any, default: Any = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > _LARGEST_NUMBER_BITS:
        raise SecurityError("a number is too large")
    return 0


def listed(values: Any) -> int:
    return ENTRY // 4 * len(values) if hasattr(values, "__len__") else 0


def written(value: Any, *args: Any, **kwargs: Any) -> int:
    """Of a filter whose result is about as long as its first argument, written as text."""
    return text_size(value)


def words(value: Any) -> int:
    """Of filters that make a list of the words, which takes more memory than the text."""
    size = text_size(value)
    spend(PIECE * size)
    return PIECE // 2 * size


def url(value: Any) -> int:
    """Of the filter `urlencode`: three characters for each byte, of which a character has up to four."""
    return 3 * text_size(value) * (1 if isinstance(value, str) and value.isascii() else 4)


def without_tags(value: Any) -> int:
    """Of the filter `striptags`, which copies the text for each tag."""
    text = as_text(value)
    spend(text.count("<") * (PASS + len(text) // PASS) + text.count("&") * PASS)
    return len(text)


def classified(text: str) -> int:
    """Of methods that look at each character, and make nothing."""
    spend(len(text))
    return 0


def fields(text: str) -> None:
    """Counts the steps of `format`: each field, and each attribute of one."""
    spend(PASS * sum(map(text.count, "{}.[")))


def divided(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    """Of the methods that make a list of a text."""
    parts = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    return ENTRY // 4 * (parts if maxsplit < 0 else min(parts, maxsplit))


def divided_from_end(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    searched(text, sep)
    return divided(text, sep, maxsplit)


def lines(text: str, keepends: bool = False) -> int:
    return divided(text)


def attribute(name: str) -> None:
    """What a filter reads of each entry. Raises SecurityError."""
    if len(name) > _LONGEST_ATTRIBUTE:
        raise SecurityError("the name of an attribute is too long")


def searched(text: Any, pattern: Any = None, *args: Any, sep: Any = None, **kwargs: Any) -> int:
    """Of methods whose time grows with the product of both lengths: CPython searches from the end without an index."""
    if any(isinstance(each, str) and len(each) > _LONGEST_PATTERN for each in (pattern, sep)):
        raise SecurityError("a text that is searched for is too long")
    return len(text)


def trimmed(value: Any, chars: Any = None) -> int:
    """Of the filter `trim`."""
    searched("", chars)
    return text_size(value)


METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), padded),
    "expandtabs": expandtabs, "replace": replace, "join": join, "translate": translate, "strftime": strftime,
    "split": divided, "rsplit": divided_from_end, "splitlines": lines,
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), searched),
    **dict.fromkeys((name for name in dir(str) if name.startswith("is")), classified),
}  # fmt: skip
FILTERS: dict[str, Callable[..., int]] = {
    "center": padded, "replace": replace, "format": printf, "indent": indent, "tojson": tojson, "round": rounded,
    "sum": summed, "int": integer, "list": listed, "trim": trimmed, "urlencode": url, "striptags": without_tags,
    **dict.fromkeys(("e", "escape", "forceescape", "safe", "string", "truncate"), written),
    **dict.fromkeys(("capitalize", "lower", "upper"), written),
    **dict.fromkeys(("title", "wordcount"), words),
}  # fmt: skip


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else ENTRY // 4 * len(value)
