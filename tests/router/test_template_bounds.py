"""What a chat template may make of its messages is bounded, and what it makes within the bounds is as before."""

from datetime import datetime
from typing import Any

import pytest

from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError
from headrace_router.text.template_budget import LARGEST_TEXT, TemplateSizeError, render_budget, spend, text_size
from support.router.template_probe import probe

BIG = "500000000"
TOO_MUCH = "sandbox forbids: it makes too much text of these messages, or takes too many steps"
FORBIDS = "does something that the sandbox forbids, whatever the messages are"
DOUBLED = (
    "{% set ns = namespace(a=START) %}{% for i in range(40) %}{% set ns.a = DOUBLE %}{% endfor %}{% set a = ns.a %}"
)
TEXT = DOUBLED.replace("START", "'aaaaaaaaaaaaaaaa'").replace("DOUBLE", "SUM")
LIST = DOUBLED.replace("START", "['a']").replace("DOUBLE", "[ns.a, ns.a]")  # 2**40 entries once it is written
MEGA = "{% set a = 'a\n' * 500000 %}"
HOSTILE = [
    "{{ '%" + BIG + "d' % 1 }}",
    "{{ '%-0" + BIG + "d' % 1 }}",
    "{{ '%." + BIG + "f' % 1 }}",
    "{{ '%*d' % (" + BIG + ", 1) }}",
    "{{ '%(a)" + BIG + "d' % {'a': 1} }}",
    "{{ '%((a))" + BIG + "d' % {'(a)': 1} }}",
    "{{ ('%99999d' * 1000) % ((1,) * 1000) }}",
    "{{ '%" + BIG + "d' | format(1) }}",
    MEGA + "{{ ('%(a)s' * 1000) % {'a': a} }}",
    "{{ 'a'.center(" + BIG + ") }}",
    "{{ 'a'.ljust(" + BIG + ") }}",
    "{{ 'a'.rjust(width=" + BIG + ") }}",
    "{{ '1'.zfill(" + BIG + ") }}",
    "{{ 'a' | center(" + BIG + ") }}",
    "{{ ['a'] | map('center', " + BIG + ") | join }}",
    "{{ '{:>" + BIG + "}'.format('a') }}",
    "{{ '{:.{}f}'.format(1.0, " + BIG + ") }}",
    "{{ '{a:>" + BIG + "}'.format_map({'a': 1}) }}",
    "{{ ('{0:>99999}' * 1000).format('a') }}",
    MEGA + "{{ ('{0}' * 1000).format(a) }}",
    "{{ ('\t' * 1000).expandtabs(" + BIG + ") }}",
    MEGA + "{{ a | indent(500000) }}",
    MEGA + "{{ a | indent('b' * 500000) }}",
    MEGA + "{{ a | replace('a', 'b' * 1000) }}",
    MEGA + "{{ a.replace('', 'b' * 1000) }}",
    MEGA + "{{ a.translate({97: 'b' * 1000}) }}",
    MEGA + "{{ a.join(range(1000) | map('string')) }}",
    MEGA + "{{ range(1000) | map('string') | join(a) }}",
    MEGA + "{{ ([a] * 1000) | join }}",
    MEGA + "{{ [a] * 1000 }}",
    MEGA + "{{ ([a] * 1000) | string }}",
    MEGA + "{{ ([a] * 1000) | tojson | length }}",
    MEGA + "{% for i in range(1000) %}{{ a }}{% endfor %}",
    MEGA + "{% set b %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endset %}",
    MEGA + "{% macro b() %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endmacro %}{{ b() | length }}",
    "{{ messages | tojson(indent=" + BIG + ") }}",
    "{{ 1.5 | round(" + BIG + ", 'ceil') }}",
    "{{ [[1] * 1000] * 1000 | sum(start=[]) }}",
    "{{ ([1] * 500000) * 1000 }}",
    "{{ strftime_now('%Y' * 500000) }}",
    TEXT.replace("SUM", "ns.a ~ ns.a") + "{{ a | length }}",
    TEXT.replace("SUM", "ns.a + ns.a") + "{{ a | length }}",
    TEXT.replace("SUM", "[ns.a, ns.a] | join") + "{{ a | length }}",
    TEXT.replace("SUM", "'%s%s' % (ns.a, ns.a)") + "{{ a | length }}",
    TEXT.replace("SUM", "'{0}{0}'.format(ns.a)") + "{{ a | length }}",
    TEXT.replace("'aaaaaaaaaaaaaaaa'", "[1]").replace("SUM", "ns.a + ns.a") + "{{ a | length }}",
    LIST + "{{ a }}",
    LIST + "{{ a | tojson }}",
    LIST + "{{ a | string }}",
    LIST + "{{ a ~ '' }}",
    LIST + "{{ '%s' % [a] }}",
    LIST + "{{ '{}'.format(a) }}",
    LIST + "{{ '{!r:.1}'.format(a) }}",
    LIST + "{{ [a] | join }}",
    LIST + "{{ {'a': a}.items() }}",
    LIST + "{{ namespace(a=a) }}",
    # Many values, none of which is large by itself.
    MEGA + "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [a ~ i] %}{% endfor %}",
    MEGA + "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [a[1:]] %}{% endfor %}",
]


# Lists that are written in the template.
HOSTILE += [
    "{% set ns = namespace(a=0) %}{% for i in range(20000) %}{% set ns.a = [ns.a" + ", 0" * 5000 + "] %}{% endfor %}",
    "{% set ns = namespace(a=0) %}{% for i in range(20000) %}{% set ns.a = (ns.a" + ", 0" * 5000 + ") %}{% endfor %}",
    "{% set ns = namespace(a=0) %}{% for i in range(20000) %}{% set ns.a = {0: ns.a"
    + "".join(f", {key}: 0" for key in range(1, 2000))
    + "} %}{% endfor %}",
]
SHARED = (  # two values with 2**27 entries each, once they are compared
    "{% set ns = namespace(a=('x',), b=('x',)) %}{% for i in range(27) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}{% set a = ns.a %}{% set b = ns.b %}"
)
ENDLESS = (
    "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% for j in range(100000) %}BODY{% endfor %}{% endfor %}"
)
# As many steps as there are, beyond a budget that is small, so that the test takes little time.
STEPS = [
    ENDLESS.replace("BODY", "{% set ns.l = [ns.l] %}"),
    ENDLESS.replace("BODY", ""),
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for i in [0] recursive %}{{ loop(range(100000)) if loop.depth < 4 }}{% endfor %}",
    "{% for i in [0] recursive %}{% if loop.depth < 4 %}{% set x = loop(range(100000)) %}{% endif %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(100000) %}{% set x = range(100000) | sum %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | select('undefined') | list %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = 'x' in range(100000) | map(attribute='real') %}{% endfor %}",
    MEGA + "{% for i in range(100000) %}{% set x = 'b' in a %}{% endfor %}",
    MEGA + "{% for i in range(100000) %}{% set x = a.find('b') %}{% endfor %}",
    *(
        SHARED + "{{ " + compared + " }}"
        for compared in (
            "a == b",
            "a != b",
            "a < b",
            "1 < 2 != 3 != a >= b",
            "a in [b]",
            "a not in {b: 1}",
            "a is eq(b)",
            "a is in([b])",
            "[a] | select('equalto', b) | list",
            "[a] | reject('in', [b]) | list",
            "(a | list) in ([b] | map('list'))",
            "(a | list) is in([b] | map('list'))",
            "a is lower",
            "{a: 1} | length",
            "{}[a]",
            "{} | attr('get')(a)",
            "{}.get(a)",
            "[a].count(b)",
            "[a].index(b)",
            "dict([(a, 1)]) | length",
            "[a, b] | unique | list | length",
            "[a, b] | sort | length",
            "[a, b] | map('list') | max | length",
            "[a, b] | min | length",
            "{1: a, 2: b} | dictsort(by='value') | length",
            "[{'k': a}, {'k': b}] | groupby('k') | length",
        )
    ),
    SHARED + "{% for i in [a, b] %}{{ loop.changed(i) }}{% endfor %}",
    SHARED + "{{ raise_exception([a]) }}",
]
# Numbers, which no message makes smaller.
FORBIDDEN = [
    "{{ 'a' * " + BIG + " }}",
    "{{ 'a' | center(" + BIG + ") }}",
    "{{ '%" + BIG + "d' % 1 }}",
    "{{ 1.5 | round(" + BIG + ") }}",
    "{{ messages | sum(start=[]) }}",
    "{{ 10 ** 10000 }}",
    "{{ ('a' * 8000000).strip('b' * 4000000 ~ 'a') }}",
    "{{ ('a' * 8000000) | trim('b' * 4000000 ~ 'a') }}",
    "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 8000000).rsplit(sep='ab' ~ 'a' * 4000000) | length }}",
    "{{ (('f' * 1600000) | int(base=16)) % (('f' * 800001) | int(base=16)) }}",
    *(
        "{% set a = ('f' * 4000) | int(base=16) %}{{ (" + made + ") is undefined }}"
        for made in ("a % (a + 1)", "a // 3", "a / 3", "3 - a", "a + 1", "a * a", "a ** 2", "a is divisibleby(3)")
    ),
]


def test_what_a_template_makes_is_bounded() -> None:
    for source, (ended, peak) in zip(HOSTILE, probe(HOSTILE), strict=True):
        assert TOO_MUCH in ended or FORBIDS in ended, (source[:999], ended)
        assert peak < 256, source[:999]


def test_the_steps_of_a_template_are_bounded() -> None:
    for source, (ended, peak) in zip(STEPS, probe(STEPS, budget=1 << 20), strict=True):
        assert TOO_MUCH in ended, (source, ended)
        assert peak < 64, source


def test_messages_are_not_named_as_the_cause_of_large_numbers() -> None:
    for source, (ended, peak) in zip(FORBIDDEN, probe(FORBIDDEN), strict=True):
        assert FORBIDS in ended, (source[:999], ended)
        assert peak < 16, source[:999]


def test_nothing_is_computed_when_a_template_is_compiled() -> None:
    sources = [f"{{% if false %}}{source}{{% endif %}}y" for source in HOSTILE if "{% macro" not in source]
    sources += [
        f"{{% if false %}}{{% autoescape 'a'.center({BIG}) == 'a' | center({BIG}) %}}{{% endautoescape %}}{{% endif %}}y"  # noqa: E501
    ]
    for source, (ended, peak) in zip(sources, probe(sources), strict=True):
        assert ended == "y" and peak < 16, source


@pytest.mark.parametrize("name", ["batch(2)", "pprint", "slice(2)", "urlize", "wordwrap", "xmlattr", "filesizeformat"])
def test_filters_for_web_pages_do_not_exist(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatTemplate("{{ messages | " + name + " }}", {}).render([])


LOOP = "{% for m in messages %}{{ %s }};{% else %}none{% endfor %}"
SAME = [  # each line is one template
    *(
        LOOP.replace("%s", part)
        for part in (
            "loop.length",
            "loop.last",
            "loop.previtem is defined",
            "loop.nextitem is defined",
            "loop.revindex0",
            "loop",
        )
    ),
    LOOP.replace("messages", "messages if m.role == 'user'").replace("%s", "loop.index"),
    LOOP.replace("messages", "nothing").replace("%s", "m"),
    "{% for a, b in {'x': 1, 'y': [2]}.items() %}{{ loop.cycle('o', 'e') }}{{ a }}{{ b }}{{ loop.changed(a) }}{% endfor %}",  # noqa: E501
    "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{{ loop.depth }}{% endfor %}",
    "{% for m in messages[::-1] %}{% for c in m.content[1:] %}{{ c }}{% if loop.first %}{% break %}{% endif %}{% endfor %}{% endfor %}",  # noqa: E501
    "{{ messages[1:] | length }}{{ messages[0].content[:2] ~ messages[0].content[-1:] }}{{ 'abc'[::2] }}{{ (1, 2)[1:] }}",  # noqa: E501
    "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 < 5 }}{{ 'a' not in ['b'] }}{{ [1] == [1] != [2] }}{{ 3 >= 2 }}{{ 'a' <= 'b' }}",
    "{{ 2 is in([1, 2]) }}{{ 4 is divisibleby(2) }}{{ 3 is odd }}{{ 'a' is lower }}{{ [1, 3] | select('gt', 2) | list }}",  # noqa: E501
    "{{ {'a': 1}['a'] }}{{ {(1, 2): 3}[(1, 2)] }}{{ '7f' | int(base=16) }}{{ 7 / 2 }}{{ 7 // 2.0 }}{{ 7 - 2 }}{{ 2 ** -1 }}",  # noqa: E501
    "{% for i in range(5) if i is odd %}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for i in [1, [2, 3]] recursive %}{{ i if i is number else loop(i) }}{% else %}x{% endfor %}{{ (1, 2) ~ {} }}",
    "{{ [(2, 'b'), (1, 'a')] | sort }}{{ ['b', 'a'] | unique | list }}{{ [[2], [1]] | max }}{{ range(4) | reverse | list }}",  # noqa: E501
    "{{ 1 ~ none ~ true ~ [1, 'a'] ~ {'b': 1.5} ~ nothing }}",
    "{% autoescape true %}{{ messages[0].content ~ '>' | safe }}{{ '<a>' }}{% endautoescape %}{{ '<' ~ '>' }}",
    "{{ '%s-%5d|%-5s|%05.2f|%(x)s' | replace('%(x)s', '') | format('a', 3, 'b', 1.5) }}{{ '%(x)s %%' % {'x': 1} }}{{ 7 % 4 }}",  # noqa: E501
    "{{ '{:>8}|{!r}|{a[0]}|{b.c}'.format('x', 'y', a=[1], b={'c': 2}) }}{{ '{x}'.format_map({'x': 3}) }}",
    "{{ 'a' | center(9) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}|{{ 'a\tb'.expandtabs(2) }}|{{ 'ab'.translate({97: 'x'}) }}",  # noqa: E501
    "{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('> ', first=true) }}{{ 'aXbX' | replace('X', '-', 1) }}{{ 'aa'.replace('a', 'b') }}",  # noqa: E501
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | join(',', attribute='role') }}{{ ', '.join(['a', 'b']) }}",  # noqa: E501
    "{{ [1, 2] + [3] }}{{ [0] * 3 }}{{ (1,) + (2,) }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 1 + 1.5 }}{{ -3 // 2 }}",
    "{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ 'a b' | title }}{{ 'A' | lower }}{{ ' a ' | trim }}{{ 1.25 | round(1) }}",  # noqa: E501
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'abc' | list }}{{ 'abc' | reverse }}{{ [1, 1] | unique | list }}",  # noqa: E501
    "{{ messages | groupby('role') }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}{{ 'x' | default('y') }}",  # noqa: E501
    "{{ messages | tojson(indent=4) }}{{ [1, {'a': none}] | tojson(indent='\t') }}{{ 'é<' | tojson }}{{ messages | string }}",  # noqa: E501
    "{% macro f(x, y=2) %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ f(1) }}{% call f(3) %}c{% endcall %}{% set z %}{{ f(4) }}{% endset %}{{ z ~ z }}",  # noqa: E501
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% block b %}x{{ super is defined }}{% endblock %}{{ self.b() }}",
    "{{ namespace(a=[1]) }}{{ range(3) }}{{ range(3) | list }}{{ joiner(',')() }}{{ cycler(1, 2).next() }}{{ messages[0].get('x', 'd') }}",  # noqa: E501
    "{{ '<' | e }}{{ '<b>x</b>' | striptags }}{{ 'a b' | urlencode }}{{ 'a b c' | wordcount }}{{ 'abcdefghijk' | truncate(5, leeway=0) }}",  # noqa: E501
    "{{ 'abc' | attr('upper') is callable }}{{ 'a' in 'abc' }}{{ 'x-y'.split('-') }}",
]


@pytest.mark.parametrize("source", SAME)
def test_other_templates_render_as_transformers_renders_them(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "a<b> & 'ü'"}, {"role": "assistant", "content": "no"}]
    expected, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, tools=None, documents=None
    )
    assert ChatTemplate(source, {}).render(messages) == expected[0]


def test_messages_of_the_largest_request_are_rendered() -> None:
    """Also by a template that builds its text piece by piece, or compares each message with all later ones."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "ab c\n" * 97}] * 2048
    for source in (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}",
        "{{ messages | tojson }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% for o in messages[loop.index :] %}"
        "{% if o.role == 'assistant' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{% endfor %}{{ ns.n }}",
    ):
        assert ChatTemplate(source, {}).render(messages, datetime(2026, 1, 1))
    one = ChatTemplate(
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{% endfor %}{{ ns.t }}",
        {},
    )
    assert len(one.render([{"role": "user", "content": "\0" * 10_000}] * 100)) == 1_000_000


def test_a_value_that_contains_another_one_twice_counts_it_twice() -> None:
    value: Any = "x" * 1000
    for _ in range(10):
        value = {"a": value, "b": [value]}
    with render_budget():
        assert text_size(value) > 1000 * 2**10
        for _ in range(40):
            value = [value, value]
        assert text_size(value) > LARGEST_TEXT


def test_each_rendering_has_a_budget_of_its_own() -> None:
    for _ in range(3):
        with render_budget():
            spend(1 << 28)
            with pytest.raises(TemplateSizeError):
                spend(1)
