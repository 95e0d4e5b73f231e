"""The model's own chat template, rendered as by transformers, in jinja's immutable sandbox."""

import hashlib
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

_INTRODUCTION = """You can use tools. Here is one JSON object for each tool, with the JSON Schema of its parameters:
<tools>
{tools}
</tools>
To use a tool, write its name and its arguments as a JSON object between tags:
<tool_call>
{{"name": "the name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
You will get its result between <tool_response> and </tool_response>."""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, system: bool
) -> list[dict[str, Any]]:
    """Messages of system, user and assistant alone, which say the same.

    tools: as in OpenAI's API. system: whether the template takes messages of this role; else the first message has the
    text about tools.
    """
    found = [_as_text(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=listed)
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{text}"}
        elif found and not system:
            found[0] = {**found[0], "content": f"{text}\n\n{found[0]['content']}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [f"<tool_call>\n{_written(call['function'])}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *written])}


def _written(function: Mapping[str, Any]) -> str:
    """As the model wrote it: arguments that are no object, of a call that was cut off, are text as it is."""
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {text}}}'


TOOL_USE = "tool_use"  # the name of the template that transformers takes for chats with tools


class ChatTemplateError(InvalidRequestError, code="chat_template_error"):
    """The model has no usable chat template, or the template rejects these messages."""


class ChatTemplate:
    """A compiled template. Its source comes from the model or its operator, never from a request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], named: Sequence[str] = ()) -> None:
        """source: Jinja; empty where the model has no default template. named: its other templates."""
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_tools = False
        self._template: jinja2.Template | None = None
        self._problem = ""
        if not source:
            self._problem = _without_default(named)
            return
        try:
            self._template = _environment().from_string(source)
            self.knows_tools = "tools" in find_undeclared_variables(_environment().parse(source))
        except Exception:  # beside jinja2's own errors: deep nesting, numbers of thousands of digits
            self._problem = "This model's chat template is not valid Jinja: use /v1/completions instead."

    def render(
        self, messages: Sequence[Mapping[str, Any]], now: datetime, options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt's text. Raises ChatTemplateError with the template's message.

        messages: the arguments of calls are objects, or text that is none. now: the date that the template may write.
        options: `tools`, `documents`, `add_generation_prompt` (true without it), and the template's own.
        """
        if self._template is None:
            raise ChatTemplateError(self._problem, param="messages")
        options = dict(options or {})
        if not self.knows_tools:
            messages = with_tools(messages, options.pop("tools", None), system=self._takes_system)
        else:
            messages = [self._fitting(message) for message in messages]
        messages = self._with_parts(messages)
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **options}
        try:
            return self._template.render({**given, "messages": messages, "strftime_now": now.strftime})
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
        except Exception:  # raised by filters, methods and operators
            raise ChatTemplateError("The model's chat template fails on these messages.", param="messages") from None

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages in an order that the template takes: agents send system messages later on, and users' in a row.

        Where it refuses these, or leaves them out, a later system message becomes the user's, and those in a row one.
        """
        found: list[Mapping[str, Any]] = []
        for message in messages:
            role = message["role"]
            if role == "system" and any(one["role"] != "system" for one in found) and not self._takes_late_system:
                role = "user"
            last = found[-1] if found else None
            joins = {"system": not self._takes_two_systems, "user": not self._takes_two_users}.get(role, False)
            if joins and last is not None and last["role"] == role:
                found[-1] = {**last, "content": f"{last.get('content') or ''}\n\n{message.get('content') or ''}"}
            else:
                found.append(message if role == message["role"] else {**message, "role": role})
        return found

    @cached_property
    def _takes_late_system(self) -> bool:
        return self._shows_all("system", "user", "assistant", "system", "user")

    @cached_property
    def _takes_two_systems(self) -> bool:
        return self._shows_all("system", "system", "user")

    @cached_property
    def _takes_two_users(self) -> bool:
        return self._shows_all("user", "user")

    def _shows_all(self, *roles: str) -> bool:
        """Whether it renders messages of these roles, and leaves none out."""
        if self._template is None:
            return True
        texts = [f"x{place}text" for place in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        rendered = self._render_plain(self._with_parts(messages), None)
        if rendered is None:
            return False
        shown = sum(text in rendered for text in texts)
        return shown in (0, len(texts))  # none: it changes all texts

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether an assistant's message may have more than one call; false only where one works and two do not."""
        if not self.knows_tools or not self._renders(calls=1, **self._form):
            return True
        return self._renders(calls=2, **self._form)

    @cached_property
    def _form(self) -> Mapping[str, bool]:
        """How the template wants calls."""
        return next((form for form in _FORMS if self._renders(calls=1, **form)), _FORMS[0])

    @cached_property
    def _takes_text(self) -> bool:
        """Whether it renders a call whose arguments are text that is no object."""
        return self._renders(calls=1, no_object=True, **self._form)

    @cached_property
    def _takes_system(self) -> bool:
        return self._succeeds([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], None)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether it shows text in a list of parts alone, as templates of models with images do."""
        return not self._shows("xtextx") and self._shows(_parts("xtextx"))

    def _shows(self, content: Any) -> bool:
        rendered = self._render_plain([{"role": "user", "content": content}], None) or ""
        return "xtextx" in rendered and "'xtextx'" not in rendered  # not as Python writes a list

    def _with_parts(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages with their text in the template's form."""
        if not self._wants_parts:
            return messages
        return [
            {**message, "content": _parts(content or "")} if isinstance(content, str | None) else message
            for message in messages
            for content in [message.get("content")]
        ]

    def _fitting(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message of which calls and results are in the template's form."""
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [_call(self._with_object(call), **self._form) for call in calls]}
        if self._form["short_ids"] and message.get("tool_call_id"):
            return {**message, "tool_call_id": _short(message["tool_call_id"])}
        return message

    def _with_object(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call whose arguments are no object, for a template that fails on text: the text is one argument."""
        function = call["function"]
        if not isinstance(function["arguments"], str) or self._takes_text:
            return call
        return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}

    def _renders(self, *, calls: int, as_text: bool, short_ids: bool, no_object: bool = False) -> bool:
        """Whether it renders a chat with so many calls. no_object: the arguments of these are text that is none."""
        idents = [f"call_{place}" for place in range(calls)]
        function = {"name": "a", "arguments": "a" if no_object else {}}
        listed = [{"id": ident, "type": "function", "function": function} for ident in idents]
        messages: list[Mapping[str, Any]] = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [_call(call, as_text=as_text, short_ids=short_ids) for call in listed],
            },
        ]
        messages += [
            {"role": "tool", "content": "b", "name": "a", "tool_call_id": _short(ident) if short_ids else ident}
            for ident in idents
        ]
        parameters = {"type": "object", "properties": {}}
        tool = {"name": "a", "description": "", "parameters": parameters}
        return self._succeeds(messages, [{"type": "function", "function": tool}])

    def _succeeds(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> bool:
        return self._render_plain(self._with_parts(messages), tools) is not None

    def _render_plain(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        """None where the template fails."""
        assert self._template is not None
        given = {"tools": tools, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        try:
            return self._template.render({**given, "messages": messages, "strftime_now": datetime.now().strftime})
        except Exception:  # raised by templates, filters and operators
            return None


def _without_default(named: Sequence[str]) -> str:
    """What a client can do where a model has these templates only."""
    if not named:
        return "This model has no chat template: use /v1/completions with a prompt in the model's own format."
    tools = f" {TOOL_USE!r} is used for chats with 'tools'." if TOOL_USE in named else ""
    return (
        f"This model has no default chat template, only {', '.join(map(repr, named))}.{tools} Use /v1/completions, or "
        "have its operator name a template by --chat-template."
    )


# Arguments as JSON text, which some templates want; ids of nine letters and digits, as Mistral's templates want.
_FORMS = tuple({"as_text": as_text, "short_ids": short_ids} for short_ids in (False, True) for as_text in (False, True))


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _call(call: Mapping[str, Any], *, as_text: bool, short_ids: bool) -> Mapping[str, Any]:
    function = call["function"]
    if as_text and not isinstance(function["arguments"], str):
        function = {**function, "arguments": _tojson(function["arguments"])}
    return {**call, "id": _short(call["id"]) if short_ids else call["id"], "function": function}


def _short(ident: str) -> str:
    """The same nine letters and digits for an id; itself if it is that."""
    if len(ident) == 9 and ident.isalnum() and ident.isascii():
        return ident
    return hashlib.sha256(ident.encode()).hexdigest()[:9]


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
