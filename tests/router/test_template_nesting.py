"""What a chat template nests deeply ends with an error, and is freed: neither ends the process."""

from support.router.template_probe import probe

FAILS = "fails on these messages"
FORBIDS = "sandbox forbids: it makes too much text of these messages, or takes too many steps"
NESTED = (
    "{% set ns = namespace(t=['a'], u=()) %}{% for i in range(10) %}{% for j in range(2000) %}"
    "{% set ns.t = NEXT %}{% endfor %}{% endfor %}{% set t = ns.t %}{% set ns.t = none %}"
)
LAZY = ["t | map('upper')", "t | select", "t | reject('none')", "t | selectattr('upper')", "t | rejectattr('x')"]
LAZY += ["{'a': ns.t} | items", "t | map('string') | select"]
# Each of these holds the one before it.
HOLDERS = [
    "[ns.t]",
    "(ns.t,)",
    "{1: ns.t}",
    "{1: ns.t}.items()",
    "{1: ns.t}.values",
    "namespace(t=ns.t)",
    "[ns.t].index",
]
HOLDERS += ["(ns.t,).count", "cycler(ns.t)", "cycler(ns.t).next", "joiner(ns.t)", "[ns.t] | attr('index')"]
HOLDERS += ["[ns.t] | reverse", "[[ns.t].x]", "dict(a=ns.t).get"]
LOOPS = [
    NESTED.replace("{% set ns.t = NEXT %}", "{% for x in [ns.t] if true %}{% set ns.t = loop %}{% endfor %}"),
    NESTED.replace("{% set ns.t = NEXT %}", "{% for x in ns.t if true %}{% set ns.t = loop %}{% endfor %}"),
    "{% macro make(f) %}{% macro inner() %}{{ f() }}{% endmacro %}{% set ns.t = inner %}{% endmacro %}"
    + NESTED.replace("{% set ns.t = NEXT %}", "{{ make(ns.t) }}"),
    "{% macro keep() %}{% set ns.t = caller %}{% endmacro %}"
    + NESTED.replace("{% set ns.t = NEXT %}", "{% call keep() %}{{ ns.t() }}{% endcall %}"),
]
DEEP = "{% set ns = namespace(t=()) %}" + (
    "{% for i in range(10) %}{% for j in range(400) %}{% set ns.t = (ns.t,) %}{% endfor %}{% endfor %}"
)


def test_filters_that_read_from_each_other_end_with_an_error() -> None:
    sources = [NESTED.replace("NEXT", f"ns.{lazy}".replace("ns.{", "{")) + "{{ t | list | length }}" for lazy in LAZY]
    for source, (ended, _) in zip(sources, probe(sources), strict=True):
        assert ended == "1" if "items" in source else FAILS in ended, source


def test_deep_values_are_freed() -> None:
    sources = [f"{NESTED.replace('NEXT', holder)}ok" for holder in HOLDERS] + [f"{source}ok" for source in LOOPS]
    for source, (ended, _) in zip(sources, probe(sources), strict=True):
        assert ended == "ok", source


USES = [
    "{{ {ns.t: 1} | length }}",
    "{{ {}[ns.t] }}",
    "{{ {}.get(ns.t) }}",
    "{{ ns.t == (ns.t,) }}",
    "{{ ns.t in [ns.t] }}",
    "{{ ns.t }}",
    "{{ ns.t | tojson }}",
    "{{ [ns.t] | unique | list | length }}",
    "{{ {}.keys() - [ns.t] }}",
    "{{ {1: ns.t}.items() - [] }}",
]


def test_values_with_many_levels_are_neither_written_nor_compared() -> None:
    for used, (ended, _) in zip(USES, probe([DEEP + used for used in USES]), strict=True):
        assert FORBIDS in ended, used
