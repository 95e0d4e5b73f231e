"""The model's own chat template, rendered as by transformers, in jinja's immutable sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.tool_prompt import with_tools


class ChatTemplateError(InvalidRequestError, code="chat_template_error"):
    """The model has no usable chat template, or the template rejects these messages."""


class ChatTemplate:
    """A compiled template. Its source comes from the model or its operator, never from a request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_tools = False
        self._template: jinja2.Template | None = None
        self._problem = ""
        if not source:
            self._problem = (
                "This model has no chat template: use /v1/completions with a prompt in the model's own format."
            )
            return
        try:
            self._template = _environment().from_string(source)
            self.knows_tools = "tools" in find_undeclared_variables(_environment().parse(source))
        except Exception:  # beside jinja2's own errors: deep nesting, numbers of thousands of digits
            self._problem = "This model's chat template is not valid Jinja: use /v1/completions instead."

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime, **options: Any) -> str:
        """The prompt's text. Raises ChatTemplateError with the template's message.

        messages: the arguments of calls are objects. now: the date that the template may write. options: `tools`,
        `documents`, `add_generation_prompt` (true without it), and the template's own.
        """
        if self._template is None:
            raise ChatTemplateError(self._problem, param="messages")
        if not self.knows_tools:
            messages = with_tools(messages, options.pop("tools", None))
        elif self._takes_text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **options}
        try:
            return self._template.render(messages=messages, strftime_now=now.strftime, **given)
        except jinja2.exceptions.SecurityError:
            raise ChatTemplateError(
                "The model's chat template does something that the sandbox forbids, whatever the messages are: use "
                "/v1/completions with a prompt in the model's own format.",
                param="messages",
            ) from None
        except jinja2.TemplateError as error:
            reason = (error.message or "no reason given")[:300]
            raise ChatTemplateError(
                f"The model's chat template rejects these messages: {reason}", param="messages"
            ) from None
        except Exception:  # of filters, methods and operators
            raise ChatTemplateError("The model's chat template fails on these messages.", param="messages") from None

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether it fails on the arguments of a call unless they are JSON text, as some templates do."""
        call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {"b": "c"}}}
        probe: list[Mapping[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "d", "tool_call_id": "call00000", "name": "a"},
        ]
        tools = [{"type": "function", "function": {"name": "a", "description": "", "parameters": {"type": "object"}}}]
        given = {"tools": tools, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        assert self._template is not None
        for messages, takes in ((probe, False), ([_with_text_arguments(message) for message in probe], True)):
            try:
                self._template.render(messages=messages, strftime_now=datetime.now().strftime, **given)
            except Exception:  # of templates, filters and operators
                continue
            return takes
        return False


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _tojson(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))
