"""What a step of a chat template takes, in time and memory, is counted, whichever filter, method or operator it is."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headrace_router.text import template_budget
from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError
from support.router.template_probe import probe

TOO_MUCH = "sandbox forbids: it makes too much text of these messages, or takes too many steps"
FORBIDS = "does something that the sandbox forbids, whatever the messages are"
TEXT = "{% set a = 'ab' * 50000 %}{% set b = a ~ '' %}{% set l = [a] * 20 %}{% set m = [b] * 20 %}"
# Each is done sixteen times, within a budget that is too small for that. What it makes is small.
STEPS = [
    "a.isalnum()",
    "a.isprintable()",
    "a.translate({97: none, 98: none})",
    "''.maketrans(a, a)",
    "{}.fromkeys(a)",
    "{1: 1}.keys().isdisjoint(a)",
    "{1: 1}.keys().isdisjoint(range(100000))",
    "{1: 1}.keys() - a",
    "{1: 1}.keys() - range(100000)",
    "range(100000).count('x')",
    "l.count(b)",
    "l.index(b)",
    "(l == m)",
    "[l == m, l in [m]]",
    "('{x}' * 5000).format(x='')",
    "('{{' * 5000).format()",
    "('{0' ~ '.real' * 5000 ~ '}').format(1)",
    "('%(x).0s' * 5000) % {'x': ''}",
    "('%(x).0s' * 5000) | format(x='')",
    "([1] * 100) | map(attribute='real' ~ '.real' * 50) | list | length",
    "('<a>' * 1000) | striptags",
    "('&a' * 2000) | striptags",
    "a | wordcount",
    "('\n' * 3000) | indent(0)",
    "cycler(*a)",
    "cycler(*range(10000))",
]
PAIRS = (  # a value with 2**60 entries, once it is hashed
    "{% set ns = namespace(a=('x',)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
    "{% set s = ns.a %}"
)
HASHED = [
    "{}.keys() - [s]",
    "{}.keys() - ([s] | select)",
    "{1: 1}.items() - ([s] | select)",
    "{}.fromkeys([s] | select)",
    "{1: 1}.keys().isdisjoint([s] | select)",
    "dict([(s, 1)] | select)",
    "namespace([(s, 1)] | select)",
]
MEGA = "{% set a = 'b ' * 1000000 %}{% set e = '\U0001f600' * 2000000 %}{% set ns = namespace(l=[]) %}"
ENDLESS = "{% for i in range(100000) %}{% set ns.l = [ns.l, MADE] %}{% endfor %}"
MACRO = "{% macro m() %}{% for i in range(100000) %}{{ MADE }}{% endfor %}{% endmacro %}{{ m() | length }}"
# What is held counts with all of its memory.
HELD = [
    *(MEGA + ENDLESS.replace("MADE", made) for made in ("e ~ i", "a.split()", "('b ' ~ e).partition(' ')", "e | list")),
    MEGA + ENDLESS.replace("MADE", "e.split('\U0001f600', 1)"),
    MEGA + ENDLESS.replace("MADE", "(e ~ '\n').splitlines()"),
    *(MEGA + MACRO.replace("MADE", made) for made in ("[a]", "a | safe", "e.rsplit('x', 1)")),
    MEGA + "{% autoescape true %}" + MACRO.replace("MADE", "a") + "{% endautoescape %}",
    MEGA + "{% set x %}{% for i in range(100000) %}{{ [a] }}{% endfor %}{% endset %}",
    MEGA + "{{ ([1] * 100000) | tojson(separators=(e, ':')) }}",
    MEGA + "{{ cycler(*(e ~ e)) }}",
    MEGA + "{{ ','.join(e ~ e) | length }}",
    "{{ ('%%' * 4000000) % () }}",
    "{{ ('a ' * 4000000).split() | length }}",
    "{{ ('a ' * 4000000) | title }}",
    "{{ ('a ' * 4000000) | wordcount }}",
    "{{ ('\U0001f600' * 4000000) | urlencode }}",
    "{{ ('\U0001f600' * 4000000) | sort | length }}",
    "{{ ('\U0001f600' * 4000000) | join(',') | length }}",
]
# What a template cannot name.
OMITTED = [
    "'x'.encode('idna')",
    "'x'['encode']()",
    "('x' | attr('encode'))()",
    "(['x'] | map(attribute='encode') | first)()",
    "(5).to_bytes(2, 'big')",
    "(5).from_bytes([1], 'big')",
    "('<x>' | safe).striptags()",
    "('&lt;' | safe).unescape()",
    "[1] | map('counted pass', -100000000) | list",
    "[1] | map('counted pass', 'nan' | float) | list",
    "[1] | map('counted concat') | list",
    "[1] | map(attribute='.' * 1000) | list",
    "[{'a': 1}] | sort(false, false, 'a,' * 1000)",
]


def test_steps_that_make_little_are_counted_by_their_time() -> None:
    repeated = "{% for i in range(16) %}{% set x = STEP %}{% endfor %}ok"
    sources = [TEXT + repeated.replace("STEP", step) for step in STEPS]
    for step, (ended, peak) in zip(STEPS, probe(sources, budget=1 << 20), strict=True):
        assert TOO_MUCH in ended, (step, ended)
        assert peak < 32, (step, peak)


def test_values_that_contain_others_twice_are_not_hashed() -> None:
    sources = [PAIRS + "{{ (" + hashed + ") is defined }}" for hashed in HASHED]
    for source, (ended, _) in zip(sources, probe(sources), strict=True):
        assert TOO_MUCH in ended, (source, ended)


def test_what_one_rendering_holds_is_bounded() -> None:
    for source, (ended, peak) in zip(HELD, probe(HELD), strict=True):
        assert TOO_MUCH in ended, (source, ended)
        assert peak < 448, (source, peak)


@pytest.mark.parametrize("omitted", OMITTED)
def test_what_has_no_bound_does_not_exist(omitted: str) -> None:
    with pytest.raises(ChatTemplateError, match=FORBIDS):
        ChatTemplate("{{ " + omitted + " }}", {}).render([])


@pytest.mark.parametrize("failing", ["1 / 0", "'abcdefghijkl' | truncate(5, end='abcdef')", "(-1) | sum", "'x'.y.z"])
def test_any_error_of_a_template_is_reported_as_its_own(failing: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ " + failing + " }}", {}).render([])


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("failing", ["raise_exception('x')", "1 / 0", "'x' * 99999999", "'x'.y.z", "'x'.encode()"])
def test_what_a_template_made_is_freed_when_it_fails(failing: str) -> None:
    template = ChatTemplate("{% set a = ['x' * 8000000] %}{{ " + failing + " }}", {})
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(ChatTemplateError) as kept:
        template.render([])
    assert tracemalloc.get_traced_memory()[0] - before < 1 << 20, kept


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(a='x' * 8000000) %}{% set ns.b = ns %}",
        "{% set a = 'x' * 8000000 %}{% macro m() %}{{ a | length }}{{ m }}{% endmacro %}",
        "{% macro m() %}{{ 'x' * 8000000 }}{{ 1 / 0 }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_holds_itself_is_freed_after_some_renderings(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "GARBAGE", 1 << 24)
    template = ChatTemplate(source, {})
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(16):
        with suppress(ChatTemplateError):
            template.render([])
    assert tracemalloc.get_traced_memory()[0] - before < 48 << 20
