"""The model's own chat template, rendered as by transformers, in jinja's immutable sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_router.core.errors import InvalidRequestError


class ChatTemplateError(InvalidRequestError, code="chat_template_error"):
    """The model has no usable chat template, or the template rejects these messages."""


class ChatTemplate:
    """A compiled template. Its source comes from the model or its operator, never from a request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._template: jinja2.Template | None = None
        self._problem = ""
        if not source:
            self._problem = (
                "This model has no chat template: use /v1/completions with a prompt in the model's own format."
            )
            return
        try:
            self._template = _environment().from_string(source)
        except Exception:  # beside jinja2's own errors: deep nesting, numbers of thousands of digits
            self._problem = "This model's chat template is not valid Jinja: use /v1/completions instead."

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime, **options: Any) -> str:
        """The prompt's text. Raises ChatTemplateError with the template's message.

        now: the date that the template may write. options: `tools`, `documents`, `add_generation_prompt` (true without
        it), and the template's own.
        """
        if self._template is None:
            raise ChatTemplateError(self._problem, param="messages")
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
