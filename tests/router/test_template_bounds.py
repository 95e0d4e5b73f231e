"""What a chat template may make of its messages is bounded, and what it makes within the bounds is as before."""

from datetime import datetime
from typing import Any

import pytest

from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError
from headrace_router.text.template_budget import LARGEST_TEXT, TemplateSizeError, render_budget, spend, text_size
from support.router.template_probe import probe

BIG = "500000000"
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
    "{{ 'a'.encode().center(" + BIG + ") }}",
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
    "{{ (1).to_bytes(" + BIG + ") }}",
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


def test_what_a_template_makes_is_bounded() -> None:
    for source, (ended, peak) in zip(HOSTILE, probe(HOSTILE), strict=True):
        assert "sandbox forbids: of these messages it makes too much text" in ended, (source, ended)
        assert peak < 256, source


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
    "{{ 'abc' | attr('upper') is callable }}{{ 'a' in 'abc' }}{{ 'x-y'.split('-') }}{{ 'x'.encode().decode() }}{{ (5).to_bytes(2, 'big') }}",  # noqa: E501
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
