"""What the sandbox does not intercept in a chat template, made into filters that count it.

That is passes of loops, `~`, slices, comparisons, arguments of calls, lists and dicts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, markup_join, str_join
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from headrace_router.text import template_sizes as sizes
from headrace_router.text.template_budget import ENTRY, NODE, PASS, PIECE, allow, spend, spend_value
from headrace_router.text.template_compare import check_compared, compare, read_all

CONCAT, SLICE = "counted concat", "counted slice"
_ENTRIES, _COMPARE, _KEY = "counted entries", "counted comparison", "counted key"
_PASS, _SPREAD = "counted pass", "counted spread"


class CountedTree(NodeTransformer):
    """Inserts the filters."""

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
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        edges = (node.arg.start, node.arg.stop, node.arg.step)
        return self._filter(node.node, SLICE, *(nodes.Const(None) if edge is None else edge for edge in edges))

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._count_spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._count_spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._count_spread(node)

    def _count_spread(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._filter(node.dyn_args, _SPREAD)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = self._filter(node.dyn_kwargs, _SPREAD)
        return node

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


@pass_context
def _spread(context: Context, values: Any) -> Any:
    if not isinstance(values, Mapping):
        return read_all(values)
    spend(ENTRY * len(values))
    return values


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


# Filters that a template cannot name. Those of the first kind are counted as all others are.
INSERTED_PLAIN: dict[str, Callable[..., Any]] = {CONCAT: _concat, SLICE: _slice}
INSERTED: dict[str, Callable[..., Any]] = {
    _ENTRIES: _entries, _COMPARE: compare, _KEY: _key, _PASS: _pass, _SPREAD: _spread
}  # fmt: skip
