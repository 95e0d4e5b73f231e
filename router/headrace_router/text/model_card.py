"""A router's data on a model: facts, tokenizer and chat template, as a replica describes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer

from headrace_base.errors import HeadraceError, panics_as_errors
from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.answer.grammar import GrammarCheck
from headrace_router.answer.parser import Syntax, syntax_of
from headrace_router.core.sampling_options import default_options
from headrace_router.text.chat_template import TOOL_USE, ChatTemplate
from headrace_router.text.detokenize import TokenTable
from headrace_router.text.text_encoder import ControlTokens, RenderedChat, TextEncoder


class ModelFactsError(HeadraceError):
    """A replica's description of its model is not usable."""


class LoadedTokenizer:
    """A tokenizer and what is derived from it; cached by digest, since replicas of a model share it."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises ModelFactsError."""
        try:
            spec = json.loads(text := tokenizer_json.decode())
            with panics_as_errors():
                self.tokenizer = Tokenizer.from_str(text)
            self.unknown = _unknown_token(spec)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelFactsError("the replica's tokenizer.json is not valid") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        decoder = spec.get("decoder")
        self.tokens = TokenTable(self.tokenizer, isinstance(decoder, dict) and decoder.get("type") == "ByteLevel")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """One of a model's chat templates, and how the model writes its answers to such chats."""

    template: ChatTemplate
    syntax: Syntax


class ModelCard:
    """One revision of one model. Immutable; safe to use from the tokenizer threads."""

    def __init__(self, facts: ModelFacts, loaded: LoadedTokenizer) -> None:
        """Raises ModelFactsError."""
        self.model = facts.identity.model
        self.revision = facts.identity.revision
        self.max_model_len = facts.max_model_len
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = frozenset(facts.eos_token_ids)
        self.defaults = default_options(facts)
        self.tokens = loaded.tokens
        self._tokenizer = loaded.tokenizer
        self.grammars = GrammarCheck(loaded.tokenizer.to_str, self.vocab_size, sorted(self.eos_token_ids))
        self._form = _form(facts.chat_template, facts, loaded.tokenizer)
        named = facts.named_templates
        self._form_with_tools = _form(named[TOOL_USE], facts, loaded.tokenizer) if TOOL_USE in named else self._form
        try:
            with panics_as_errors():
                sources = {self._form.template.source, self._form_with_tools.template.source}
                control = ControlTokens(loaded.tokenizer, "\n".join(sources), loaded.unknown)
                bos = facts.bos_token_id if facts.add_bos and facts.HasField("bos_token_id") else None
                self.encoder = TextEncoder(loaded.tokenizer, control, bos)
        except Exception as error:  # as above: a tokenizer may be valid, and encode nothing
            raise ModelFactsError("the replica's tokenizer does not encode text") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of `chat`."""
        return self.chat(messages, {})[0]

    def form(self, options: Mapping[str, Any]) -> ChatForm:
        """The form of a chat with these template options: chosen as transformers does, by whether there are tools."""
        return self._form if options.get("tools") is None else self._form_with_tools

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[list[int], bool]:
        """Renders and tokenizes a chat up to the start of the assistant's answer. Slow: call off the event loop.

        options: of the template. Returns the token ids, and whether the answer begins inside of the reasoning.
        """
        form = self.form(options)
        known = _with_known_roles(messages, form.template)
        rendered = RenderedChat(form.template, known, datetime.now(), options)
        return self.encoder.encode_chat(rendered), form.syntax.begins_in_reasoning(rendered.text)

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. Slow for long lists: call off the event loop. special: with special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary has them; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


def _form(source: str, facts: ModelFacts, tokenizer: Tokenizer) -> ChatForm:
    template = ChatTemplate(source, facts.special_tokens, sorted(facts.named_templates))
    added = tokenizer.get_added_tokens_decoder()
    syntax = syntax_of(
        source,
        facts.tool_parser,
        facts.reasoning_parser,
        {token.content: token_id for token_id, token in added.items()},
        {token_id for token_id, token in added.items() if token.special},
        knows_tools=template.knows_tools,
    )
    return ChatForm(template, syntax)


def _with_known_roles(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """As the template knows them: developer is system where it has no such role, and reasoning has its name."""
    keeps, thinking = "developer" in template.source, ".thinking" in template.source
    found = []
    for message in messages:
        known = {**message, "role": "system" if message["role"] == "developer" and not keeps else message["role"]}
        # gpt-oss refuses a call's message with both.
        if thinking and "reasoning_content" in known and not (known["content"] and known.get("tool_calls")):
            known["thinking"] = known["reasoning_content"]
        found.append(known)
    return found


def _unknown_token(spec: dict[str, Any]) -> str | None:
    """The token for what the vocabulary lacks, from a tokenizer.json."""
    model = spec["model"]
    if isinstance(number := model.get("unk_id"), int):
        return str(model["vocab"][number][0])
    return model.get("unk_token") or None
