"""A router's data on a model: facts, tokenizer and chat template, as a replica describes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from headrace_base.errors import HeadraceError, panics_as_errors
from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.answer.grammar import GrammarCheck
from headrace_router.answer.parser import Syntax, syntax_of
from headrace_router.core.sampling_options import default_options
from headrace_router.text.answer_memory import AnswerMemory, AnswerPlace, answer_place
from headrace_router.text.chat_template import TOOL_USE, ChatTemplate
from headrace_router.text.detokenize import TokenTable
from headrace_router.text.text_encoder import ControlTokens, RenderedChat, TextEncoder
from headrace_router.text.turn_check import turn_problem


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


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A chat up to the start of the assistant's answer. thinking: the answer begins inside of the reasoning.

    place: of the answer, for `AnswerMemory`. kept: tokens of earlier answers as the model wrote them.
    """

    token_ids: list[int]
    thinking: bool
    place: AnswerPlace | None = None
    kept: int = 0


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
        return self.chat(messages, {}).token_ids

    def form(self, options: Mapping[str, Any]) -> ChatForm:
        """The form of a chat with these template options: chosen as transformers does, by whether there are tools."""
        return self._form if options.get("tools") is None else self._form_with_tools

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        memory: AnswerMemory | None = None,
        keys: Sequence[bytes] = (),
    ) -> EncodedChat:
        """Renders and tokenizes a chat up to the start of the assistant's answer. Slow: call off the event loop.

        options: of the template. memory: of earlier answers; keys: `message_keys` of the messages.
        """
        form = self.form(options)
        known = with_known_roles(messages, form.template)
        rendered = RenderedChat(form.template, known, datetime.now(), options)
        thinking = form.syntax.begins_in_reasoning(rendered.text)
        if memory is None or not self.joins:
            return EncodedChat(self.encoder.encode_chat(rendered), thinking)
        parts = memory.known(rendered.text, messages, keys, self.tokens.token_bytes)
        whole = options.get("add_generation_prompt", True) and not options.get("continue_final_message")
        return EncodedChat(
            self.encoder.encode_chat(rendered, parts),
            thinking,
            answer_place(rendered.text, keys[-1]) if whole else None,
            sum(len(part.token_ids) for part in parts),
        )

    @cached_property
    def turn_problem(self) -> str:
        """Where turns of a conversation part, though nobody changed them; empty if they do not. See `turn_check`."""

        def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
            form = self.form(options)
            return form.template.render(with_known_roles(messages, form.template), datetime.now(), options)

        syntax = self._form_with_tools.syntax
        return turn_problem(
            render,
            lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids,
            lambda token_id: self.tokens.token_json(token_id).text,
            tools=syntax.tools is not None or self._form_with_tools.template.knows_tools,
            reasons=syntax.reasoning is not None,
        )

    @cached_property
    def joins(self) -> bool:
        """Whether a text may be tokenized in parts: some tokenizers put a space before each text."""
        first, second = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b c"))
        return b"".join(map(self.tokens.token_bytes, [*first, *second])) == b"ab c"

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


def with_known_roles(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[Mapping[str, Any]]:
    """As the template knows them, and in an order that it takes.

    developer is system where it has no such role, and reasoning has its name.
    """
    keeps, thinking = "developer" in template.source, ".thinking" in template.source
    found = []
    for message in messages:
        known = {**message, "role": "system" if message["role"] == "developer" and not keeps else message["role"]}
        # gpt-oss refuses a call's message with both.
        if thinking and "reasoning_content" in known and not (known["content"] and known.get("tool_calls")):
            known["thinking"] = known["reasoning_content"]
        found.append(known)
    return template.fitted(found)


def _unknown_token(spec: dict[str, Any]) -> str | None:
    """The token for what the vocabulary lacks, from a tokenizer.json."""
    model = spec["model"]
    if isinstance(number := model.get("unk_id"), int):
        return str(model["vocab"][number][0])
    return model.get("unk_token") or None
