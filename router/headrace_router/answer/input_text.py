"""The input of a custom tool's call, and its grammar: free text, the one argument of a function for open models."""

import json
import re
from collections.abc import Iterator
from enum import Enum, auto
from graphlib import CycleError, TopologicalSorter

import regex

_ESCAPED = '"\\\n\r\t\b\f'  # characters of a JSON string that have a short escape sequence
_NEVER = r'"\\\x00-\x1f'  # in a JSON string, in a class of a pattern
_STRING = r'"(?:\\.|[^"\\\n])*"'
_LARK = re.compile(
    rf"""(?P<left>(?:\#|//)[^\n]* | ->\s*\w+)
    | (?P<first>{_STRING})\s*\.\.\s*(?P<last>{_STRING})
    | (?P<text>{_STRING})(?P<case>i?)
    | /(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    | %import\s+common\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?
    | %import\s+common[ \t]*\((?P<many>[\s\w,]*)\)
    | [!?]*(?P<name>_?(?:[a-z][a-z0-9_-]*+|[A-Z][A-Z0-9_-]*+))(?!\[|\.-?\d)(?P<defined>[ \t]*:)?
    | (?P<other>%\w+ | @[\w-]+ | <[^<>\s]+> | ~(?!\s*\d) | ["/] | [A-Za-z_][\w-]*(?:\[|\.-?\d+))""",
    re.VERBOSE | re.DOTALL,
)
_COMMON = {  # the terminals of Lark's library that may match characters which are rewritten
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_PART = regex.compile(
    r"""(?P<set>(?P<class>\[\^?\]?(?:\\.|(?&class)|[^\[\]\\])*+\]) | \\[dDwWsS] | \\[pP](?:\{[^}]*\}|.) | \.)
    | \\(?:x\{(?P<hex>[0-9a-fA-F]+)\} | u\{(?P<hex>[0-9a-fA-F]+)\} | x(?P<hex>[0-9a-fA-F]{2}) | u(?P<hex>[0-9a-fA-F]{4})
        | U(?P<hex>[0-9a-fA-F]{8}))
    | (?P<open>\[) | (?P<syntax>\((?:\?(?:P?<\w+>|[a-zA-Z-]*[:)]|<?[=!]))? | [)*+?|^$] | \{[\d,]*\} | \\[bBAzZG<>])
    | (?P<char>\\.|.)""",
    regex.VERBOSE | regex.DOTALL,
)
_CONTROLS = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\f": "\f", r"\v": "\v", r"\a": "\a"}


def input_grammar(grammar: str, prefix: str, *, quoted: bool) -> tuple[str, str]:
    """The terminal of an input of this Lark grammar, and its definitions. Raises ValueError for what is not supported.

    prefix: of all names. quoted: in a JSON string.
    """
    return f"{prefix}R_START", _Rewriter(prefix, quoted).grammar(grammar)


class _Rewriter:
    def __init__(self, prefix: str, quoted: bool) -> None:
        self._prefix = prefix
        self._quoted = quoted
        self._rule = ""  # that is defined
        self._used: dict[str, set[str]] = {}  # names, by the rule or terminal that contains them

    def grammar(self, text: str) -> str:
        """The rewritten text of a whole grammar. Raises ValueError."""
        rewritten = _LARK.sub(self._token, text)
        for name in ("start", *(name for names in self._used.values() for name in names)):
            if name not in self._used:
                raise ValueError(f"its rule or terminal '{name[:50]}' is not defined")
        try:
            TopologicalSorter(self._used).prepare()
        except CycleError as error:
            raise ValueError(
                f"its rule '{error.args[1][0][:50]}' contains itself, which is not supported in a tool's input"
            ) from None
        return rewritten

    def _token(self, found: re.Match[str]) -> str:
        """A token of Lark's own syntax."""
        if found["left"] is not None:
            return ""
        if found["other"] is not None:
            raise ValueError(f"'{found['other'][:50]}' is not supported in the grammar of a tool's input")
        if found["name"] is not None:
            return self._name(found["name"], found["defined"])
        if found["first"] is not None:
            ends = (_class_char(_text(found[name])) for name in ("first", "last"))
            return f"/{self._pattern('[' + '-'.join(ends) + ']', '')}/"
        if found["pattern"] is not None:
            return f"/{self._pattern(found['pattern'], found['flags'])}/{found['flags']}"
        if found["text"] is not None:
            return self._string(found[0], _text(found["text"]), found["case"])
        if found["one"] is not None:
            return self._import(found["one"], found["alias"] or found["one"])
        return "\n".join(self._import(name, name) for name in re.findall(r"\w+", found["many"]))

    def _name(self, name: str, defined: str | None) -> str:
        """The rewritten name of a rule or a terminal."""
        if defined:
            self._rule = name
            self._used[name] = set()
        else:
            self._used.setdefault(self._rule, set()).add(name)
        return f"{self._prefix}{'T_' if name.isupper() else 'R_'}{name.upper()}{defined or ''}"

    def _import(self, name: str, alias: str) -> str:
        defined = self._name(alias, ":")
        if self._quoted and name in _COMMON:
            return f"{defined} /{self._pattern(_COMMON[name], '')}/"
        return f"%import common.{name} -> {defined[:-1]}"

    def _string(self, written: str, text: str, case: str) -> str:
        """A literal."""
        if not self._quoted or _escaped(text) == text:
            return written
        if case:  # the case of an escape sequence is fixed
            return f"/{self._pattern(''.join(map(_class_char, text)), 'i')}/i"
        return json.dumps(_escaped(text), ensure_ascii=False).replace("\x7f", "\\u007f")

    def _pattern(self, pattern: str, flags: str) -> str:
        """A regular expression. Raises ValueError."""
        if not self._quoted:
            return pattern
        if "x" in flags:
            raise ValueError("the flag x of patterns is not supported in the grammar of a tool's input")
        dots = ["s" in flags]  # for each open group, whether a dot is any character
        found: list[str] = []
        for kind, written, char in _parts(pattern):
            if kind == "syntax":
                _follow_groups(dots, written)
                found.append(written)
            elif kind == "set":
                dot = r"[\s\S]" if dots[-1] else r"[^\n]"
                found.append(_quoted_set(dot if written == "." else written))
            elif _escaped(char) != char:
                found.append(f"(?-i:{literal(_escaped(char))})")
            else:
                found.append(written)
        return "".join(found)


def _quoted_set(written: str) -> str:
    """A pattern of one character of several, in a JSON string."""
    escaped = [literal(_escaped(char)) for char in _matched(written)]
    plain = f"[{written}&&[^{_NEVER}]]"
    return f"(?:{plain}|(?-i:{'|'.join(escaped)}))" if escaped else plain


def _escaped(text: str) -> str:
    """Text as it is written in a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _text(literal: str) -> str:
    """The text of a literal in Lark's syntax. Raises ValueError."""
    plain = re.sub(r"\\(x(?=[0-9a-fA-F]{2})|.)", lambda found: r"\u00" if found[1] == "x" else found[0], literal)
    try:
        return str(json.loads(plain))
    except ValueError:
        raise ValueError(f"{literal[:50]} is no string of a grammar") from None


def _parts(pattern: str) -> Iterator[tuple[str, str, str]]:
    """The kind of each part, the part, and which character it is."""
    for found in _PART.finditer(pattern):
        if found["hex"] is not None:
            number = int(found["hex"], 16)
            if number > 0x10FFFF:
                raise ValueError(f"{found[0][:50]} is no character")
            yield "char", found[0], chr(number)
        elif found["open"] is not None:
            raise ValueError("a class of characters in a pattern has no end")
        elif found["char"] is not None:
            yield "char", found[0], _CONTROLS.get(found[0], found[0][-1])
        else:
            yield ("set" if found["set"] is not None else "syntax"), found[0], ""


def _follow_groups(dots: list[bool], syntax: str) -> None:
    """Updates whether a dot is any character, at the beginning or the end of a group, or at flags."""
    if syntax == ")":
        dots[-1:] = [] if len(dots) > 1 else dots[-1:]
        return
    flags = re.fullmatch(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])", syntax)
    if flags is not None and "x" in flags[1]:
        raise ValueError("the flag x of patterns is not supported in the grammar of a tool's input")
    any_char = dots[-1]
    if flags is not None:
        any_char = "s" not in (flags[2] or "") and ("s" in flags[1] or any_char)
    if flags is not None and flags[3] == ")":
        dots[-1] = any_char
    elif syntax.startswith("("):
        dots.append(any_char)


def _matched(written: str) -> list[str]:
    """Which of the characters with an escape sequence a class matches. Raises ValueError."""
    codes = re.sub(
        r"\\(?:[xuU]\{([0-9a-fA-F]{1,8})\}|.)",
        lambda found: rf"\U{int(found[1], 16):08x}" if found[1] else found[0],
        written,
        flags=re.DOTALL,
    )
    try:
        compiled = regex.compile(codes, regex.VERSION1)
    except (regex.error, OverflowError, ValueError):
        raise ValueError(f"the pattern {written[:50]} is not supported in the grammar of a tool's input") from None
    return [char for char in _ESCAPED if compiled.fullmatch(char)]


def literal(text: str) -> str:
    """A pattern of this text, without slashes."""
    return "".join(char if char.isalnum() else _class_char(char) for char in text)


def _class_char(char: str) -> str:
    """A character in a pattern, also in a class."""
    return rf"\x{{{ord(char):x}}}"


INPUT = "input"  # the argument's name
_OPENED = regex.compile(rf'\{{\s*"{INPUT}"\s*:\s*"')
_SPECIAL = regex.compile(r'[\\"]')
_ESCAPE = regex.compile(r"\\(?:u[0-9a-fA-F]{0,4}|.)", regex.DOTALL)
_HIGH = regex.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = regex.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def opens_input(arguments: str) -> bool:
    """Whether these arguments begin with the string `input`."""
    return _OPENED.match(arguments) is not None


class _Position(Enum):
    BEFORE = auto()  # the string
    INSIDE = auto()
    AFTER = auto()
    NONE = auto()  # there is no such string


class InputText:
    """Reads the input from the JSON of a call's arguments, which arrives in pieces.

    Arguments that do not begin with the string `input` are the input as they are; members after it are left out.
    """

    def __init__(self) -> None:
        self._place = _Position.BEFORE
        self.held = ""  # JSON of which it is not certain yet what it is

    def add(self, arguments: str) -> str:
        """The part of the input that these arguments complete."""
        self.held += arguments
        if self._place is _Position.BEFORE:
            found = _OPENED.match(self.held, partial=True)
            if found is not None and found.partial:
                return ""
            self._place = _Position.NONE if found is None else _Position.INSIDE
            self.held = self.held[found.end() :] if found is not None else self.held
        if self._place is _Position.INSIDE:
            return self._string()
        text, self.held = self.held, ""
        return text if self._place is _Position.NONE else ""

    def finish(self) -> str:
        """The rest of the input of a complete call."""
        return self.held

    def _string(self) -> str:
        found: list[str] = []
        start = 0
        while special := _SPECIAL.search(self.held, start):
            found.append(self.held[start : special.start()])
            start = special.start()
            if special[0] == '"':
                self._place, start = _Position.AFTER, len(self.held)
                break
            escape = _ESCAPE.match(self.held, start)
            end = escape.end() if escape is not None else len(self.held)
            if escape is None or (end == len(self.held) and escape[0].startswith("\\u") and len(escape[0]) < 6):
                break
            if _HIGH.match(self.held, start) and (low := _LOW.match(self.held, end, partial=True)):
                if low.partial:
                    break
                end = low.end()
            found.append(_unescaped(self.held[start:end]))
            start = end
        else:
            found.append(self.held[start:])
            start = len(self.held)
        self.held = self.held[start:]
        return "".join(found)


def _unescaped(escape: str) -> str:
    """What JSON has no escape sequence for stays; half a surrogate pair is no text."""
    try:
        text = str(json.loads(f'"{escape}"', strict=False))
    except ValueError:
        return escape
    return text if len(text) != 1 or not "\ud800" <= text <= "\udfff" else "\ufffd"
