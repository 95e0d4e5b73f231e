"""The grammar that an answer follows, of a constraint and of calls of tools; checked before a replica gets it."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_router.access.auth import Tenant
from headrace_router.answer.grammar import schema_grammar
from headrace_router.answer.whole_grammar import (
    OfferedTool,
    UnforceableCallsError,
    definitions,
    followed_input,
    followed_schemas,
    whole_grammar,
)
from headrace_router.core.errors import InvalidRequestError, UnsupportedError
from headrace_router.core.limits import Limits
from headrace_router.text.model_card import ChatForm, ModelCard
from headrace_router.text.tokenizer_pool import LARGE, TokenizerPool
from headrace_router.validation.tool_use import ToolUse

SEARCH = 4  # times `grammar_seconds`, in which the tools are found whose schemas cannot be followed


class AnswerGrammars:
    """Makes the grammars that replicas get; one per router."""

    def __init__(self, limits: Limits, pool: TokenizerPool) -> None:
        self._limits = limits
        self._pool = pool

    async def checked(self, card: ModelCard, tenant: Tenant, grammar: str, field: str) -> str:
        """What replicas get for a grammar; empty for an empty one. field: of the request, that asks for it.

        Raises InvalidRequestError.
        """
        size, limit = len(grammar.encode()), self._limits.grammar_bytes * 4
        if size > limit:
            raise InvalidRequestError(f"'{field}' has {size} bytes as a grammar; the limit is {limit}.", param=field)
        known, seconds = card.grammars.known(grammar), self._limits.grammar_seconds
        if known or not grammar:
            return known
        return await self._pool.run(lambda: card.grammars.check(grammar, field, seconds), tenant.name, LARGE)

    async def of_chat(
        self,
        card: ModelCard,
        form: ChatForm,
        tenant: Tenant,
        used: ToolUse | None,
        constraint: str,
        field: str,
        *,
        thinking: bool,
        thought_tokens: int | None,
    ) -> str:
        """The grammar of the whole answer; empty where the answer may be anything.

        thinking: the answer begins inside of the reasoning. thought_tokens: the most tokens of the reasoning.

        Where the schema of a tool cannot be followed, and the tool is not strict, its arguments are any object. Raises
        InvalidRequestError.
        """
        size = sum(len(tool.grammar.encode()) for tool in used.offered) if used is not None else 0
        if size > self._limits.grammar_bytes:
            raise InvalidRequestError(
                f"The grammars of custom tools have {size} bytes; this server accepts {self._limits.grammar_bytes}.",
                param="tools",
            )

        async def whole(used: ToolUse | None) -> str:
            def make() -> str:
                return _whole(form, used, constraint, thinking, thought_tokens)

            grammar = await self._pool.run(make, tenant.name, LARGE) if size else make()
            return await self.checked(card, tenant, grammar, field or ("tools" if used else "max_reasoning_tokens"))

        try:
            return await whole(used)
        except UnsupportedError:
            raise
        except InvalidRequestError as error:
            if used is None:
                raise
            problem, tools = error, used
        faulty = await self._pool.run(lambda: self._faulty(card, form, tools), tenant.name, LARGE)
        optional = {tool.name for tool in tools.offered if tool.strict} - tools.strict
        for names in filter(None, (faulty, optional)):  # all of them: together they are too much
            try:
                return await whole(tools.loosened(names))
            except InvalidRequestError as error:
                problem = error
        raise problem

    def _faulty(self, card: ModelCard, form: ChatForm, used: ToolUse) -> set[str]:
        """Names of tools whose schema cannot be followed. Slow: call off the event loop.

        Raises InvalidRequestError for one that is strict.
        """
        end = time.monotonic() + SEARCH * self._limits.grammar_seconds

        def problem(schema: Mapping[str, Any], path: str) -> str:
            """Why it cannot be followed; empty where it can, and after the end of the time."""
            if time.monotonic() >= end:
                return ""
            try:
                grammar = schema_grammar(schema)
                if not card.grammars.known(grammar):
                    card.grammars.check(grammar, path, self._limits.grammar_seconds)
            except InvalidRequestError as error:
                return error.message
            except ValueError as error:
                return f"'{path}' cannot be followed: {str(error)[:200]}."
            return ""

        def innermost(schema: Mapping[str, Any], path: str) -> str:
            """The problem of the innermost part that has one."""
            sentence, found = "", problem(schema, path)
            while found:
                sentence, found = found, ""
                for inner, part in _parts(schema, path):
                    if found := problem(part, inner):
                        schema, path = part, inner
                        break
            return sentence

        names: set[str] = set()
        fields = used.fields
        for tool in (tool for tool in used.offered if tool.strict):
            field = fields[tool.name]
            if tool.grammar:
                self._check_input(card, form, tool, field)
                continue
            for path, schema in followed_schemas(form.syntax, tool):
                if tool.name not in used.strict:
                    names |= {tool.name} if problem(schema, f"{field}{path}") else set()
                elif sentence := innermost(schema, f"{field}{path}"):
                    raise InvalidRequestError(f"The tool '{tool.name}' is strict, and {sentence}", param=field)
        return names

    def _check_input(self, card: ModelCard, form: ChatForm, tool: OfferedTool, field: str) -> None:
        """Raises InvalidRequestError if the grammar of its input cannot be followed."""
        try:
            grammar = json.dumps({"grammars": [{"lark_grammar": followed_input(form.syntax, tool)}]})
        except ValueError as error:
            raise InvalidRequestError(f"'{field}' cannot be followed: {error}.", param=field) from None
        if not card.grammars.known(grammar):
            card.grammars.check(grammar, field, self._limits.grammar_seconds)


def _parts(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas of an object's properties and of a list's items, by their paths."""
    properties = schema.get("properties")
    inner = {f".properties.{key}": part for key, part in (properties.items() if isinstance(properties, dict) else ())}
    for name, part in {**inner, ".items": schema.get("items")}.items():
        if isinstance(part, dict):
            yield f"{path}{name}", {**definitions(schema), **part}


def _whole(form: ChatForm, used: ToolUse | None, constraint: str, thinking: bool, thought_tokens: int | None) -> str:
    """The grammar, not checked. Raises InvalidRequestError."""
    try:
        return whole_grammar(
            form.syntax,
            used.offered if used is not None else (),
            constraint=constraint,
            required=used is not None and used.required,
            restricted=used is not None and used.restricted,
            one_call=used is not None and (used.one_call or not form.template.takes_several_calls),
            thinking=thinking,
            thought_tokens=thought_tokens,
        )
    except UnforceableCallsError:
        if form.syntax.tools is None:
            raise UnsupportedError(
                "How this model writes calls of tools is not known: its operator can name it by --tool-parser.",
                param="tools",
            ) from None
        raise UnsupportedError(
            "This model's calls of tools cannot be forced: send 'tool_choice' as auto, and no 'response_format'.",
            param="tools",
        ) from None
    except ValueError as error:
        raise InvalidRequestError(
            f"The schema of a tool cannot be followed: {str(error)[:200]}.", param="tools"
        ) from None
