"""The chat templates of a model, and the control tokens with which they end an assistant's turn."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from tokenizers import Tokenizer

from headrace_base.errors import ModelLoadError
from headrace_worker.model.gguf_metadata import Metadata, text
from headrace_worker.model.json_files import read_object
from headrace_worker.model.source import ModelSource

DEFAULT, TOOL_USE = "default", "tool_use"  # the names of those that transformers chooses by itself
_GGUF_KEY = "tokenizer.chat_template"
_REASONING, _ANSWER = "xreasoningx", "xanswerx"


def read_template(path: Path) -> str:
    """The text of a chat template's file. Raises ModelLoadError where it cannot be read, or is not valid Jinja."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ModelLoadError(
            f"--chat-template {path} cannot be read ({reason}): name a file on the machine where the model runs."
        ) from error
    if problem := syntax_problem(source):
        raise ModelLoadError(f"--chat-template {path} is not valid Jinja, {problem}")
    return source


def syntax_problem(template: str) -> str:
    """What is wrong with a template's Jinja, with its line; empty if nothing is."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        if "generation" not in str(error.message):  # a tag of transformers
            return f"line {error.lineno}: {error.message}"
    return ""


def processor_template(source: ModelSource) -> str | None:
    """That of a folder whose processor, of text and images or audio, has its own, in the older form: it is used instead
    of the tokenizer's one, as by transformers. Raises ModelLoadError for one that is no text.
    """
    path = source.path / "chat_template.json"
    if not path.is_file() or (source.path / "chat_template.jinja").is_file():
        return None
    template = read_object(path, source.name).get("chat_template")
    if not isinstance(template, str):
        raise ModelLoadError(f"chat_template.json of {source.name!r} has no text as its chat_template: correct it.")
    return template


def gguf_templates(metadata: Metadata) -> dict[str, str]:
    """By name. Raises ModelLoadError for one that is no text."""
    found = {DEFAULT: text(metadata, _GGUF_KEY, "")}
    named = (key for key in metadata if key.startswith(f"{_GGUF_KEY}."))
    return found | {key.removeprefix(f"{_GGUF_KEY}."): text(metadata, key) for key in named}


def turn_ends(
    templates: Mapping[str, str], special_tokens: Mapping[str, str], tokenizer: Tokenizer, known: Collection[int]
) -> list[int]:
    """The control tokens with which the templates in use end an assistant's turn, where none of these is known.

    known: the end tokens of the files.
    """
    ends: list[int] = []
    for name in (DEFAULT, TOOL_USE):
        if templates.get(name):
            found = _after_answer(templates[name], [] if name == TOOL_USE else None, special_tokens, tokenizer)
            if found and found[0] not in ends and not {*found} & {*known}:
                ends.append(found[0])
    return ends


def _after_answer(
    template: str, tools: list[Any] | None, special_tokens: Mapping[str, str], tokenizer: Tokenizer
) -> list[int]:
    """The control tokens that a template writes one after the other behind an assistant's text.

    None if the first of them is a part of other text, also begins the answer, or ends the reasoning before it. A
    control token is, as for routers, a special token, or another added token that the template writes.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    before = shown = after = ""
    for content in (str, _parts):  # templates of models with images may show text in a list of parts alone
        answer = {"role": "assistant", "content": content(_ANSWER)}
        answer |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _REASONING)
        chat = [{"role": "user", "content": content("Hi")}, answer]
        try:
            (rendered,), _ = render_jinja_template([chat], tools, chat_template=template, **special_tokens)
        except Exception:  # exceptions of filters and operators, too: a template may refuse any chat
            continue
        before, shown, after = rendered.rpartition(_ANSWER)
        if shown:
            break
    ids = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.content.strip() and (token.special or token.content in template)
    }
    control = "|".join(re.escape(content) for content in sorted(ids, key=len, reverse=True))
    match = re.match(rf"\s*(?P<run>(?P<first>{control})(?:{control})*)", after) if shown and control else None
    if match is None:
        return []
    first = match["first"]
    _, thinks, begin = before.rpartition(_REASONING)
    spelled = re.match(rf"\s|{control}|\Z", after[match.end("first") :]) is None
    if spelled or before.rstrip().endswith(first) or (thinks and first in begin):
        return []
    return [ids[content] for content in re.findall(control, match["run"])]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
