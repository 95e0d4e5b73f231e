"""The model's own chat template, rendered as transformers renders it, in the immutable sandbox (RELIABILITY R7)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace_router.core.errors import InvalidRequestError


class ChatTemplateError(InvalidRequestError, code="chat_template_error"):
    """The model has no usable chat template, or the template rejects these messages."""


class ChatTemplate:
    """A compiled template. Its source comes from the model, never from a request."""

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
        except jinja2.TemplateError:
            self._problem = "This model's chat template is not valid Jinja: use /v1/completions instead."

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, ready for the assistant's turn. Raises ChatTemplateError with the template's message."""
        if self._template is None:
            raise ChatTemplateError(self._problem, param="messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                "The chat template does something that the sandbox forbids.", param="messages"
            ) from error
        except jinja2.TemplateError as error:
            reason = (error.message or "no reason given")[:300]
            raise ChatTemplateError(
                f"The model's chat template rejects these messages: {reason}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ChatTemplateError("The model's chat template fails on these messages.", param="messages") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """A namespace that refuses names with a leading underscore, which can be used to escape the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """`dict(...)` inside a template, without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _TemplateNamespace
    environment.globals["dict"] = _TemplateDict()
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


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("names in a namespace do not begin with an underscore")
