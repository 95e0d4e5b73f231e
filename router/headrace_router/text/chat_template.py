"""The model's own chat template, rendered as by transformers, in the immutable sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.template_budget import TemplateSizeError, render_budget
from headrace_router.text.template_sandbox import SizedSandbox
from headrace_router.text.traced_text import traced_json

# Of filters, methods and operators.
_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)


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
        except Exception:  # beside jinja2's own errors: deep nesting, numbers of thousands of digits
            self._problem = "This model's chat template is not valid Jinja: use /v1/completions instead."

    def render(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None) -> str:
        """The prompt's text, ready for the assistant's turn. Raises ChatTemplateError with the template's message.

        now: the date that the template may write.
        """
        if self._template is None:
            raise ChatTemplateError(self._problem, param="messages")
        try:
            with render_budget():
                return self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    strftime_now=(now or datetime.now()).strftime,
                    **self._special_tokens,
                )
        except TemplateSizeError as error:
            raise ChatTemplateError(
                "The chat template does something that the sandbox forbids: it makes too much text of these messages, "
                "or takes too many steps. Send fewer or shorter ones; if those fail too, use /v1/completions instead.",
                param="messages",
            ) from _without_frames(error)
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                "The model's chat template does something that the sandbox forbids, whatever the messages are: use "
                "/v1/completions with a prompt in the model's own format.",
                param="messages",
            ) from _without_frames(error)
        except jinja2.TemplateError as error:
            reason = (error.message or "no reason given")[:300]
            raise ChatTemplateError(
                f"The model's chat template rejects these messages: {reason}", param="messages"
            ) from _without_frames(error)
        except _FAILURES as error:
            raise ChatTemplateError(
                "The model's chat template fails on these messages.", param="messages"
            ) from _without_frames(error)


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


def _environment() -> SizedSandbox:
    return SizedSandbox(
        filters={"tojson": _tojson},
        names={"raise_exception": _raise_exception, "namespace": _TemplateNamespace, "dict": _TemplateDict()},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    return traced_json(value, dump)


def _without_frames(error: BaseException) -> BaseException:
    """The error without what the template made, which is freed now, and not when the response was read."""
    part: BaseException | None = error
    while part is not None:
        part.__traceback__ = None
        part = part.__context__
    return error


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("names in a namespace do not begin with an underscore")
