"""From a checked body to a `GenerationRequest`: limits, defaults, tokenizing. One validator for every API."""

import functools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace_base.errors import counted
from headrace_proto.replica_pb2 import Sampling, TokenSequence
from headrace_router.access.auth import Tenant
from headrace_router.answer.parser import AnswerParser
from headrace_router.core.cache_miss import Conversation
from headrace_router.core.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from headrace_router.core.fleet import Fleet
from headrace_router.core.limits import Limits
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks
from headrace_router.core.sampling_options import API_DEFAULTS
from headrace_router.dispatch.answer_grammar import AnswerGrammars
from headrace_router.dispatch.choice import is_first
from headrace_router.text.answer_memory import AnswerMemory, digest_of, key_after, message_digest, message_keys
from headrace_router.text.model_card import EncodedChat, ModelCard
from headrace_router.text.text_encoder import names, strings
from headrace_router.text.tokenizer_pool import TokenizerPool
from headrace_router.validation.bodies import ChatBody, CompletionBody, RequestOptions
from headrace_router.validation.token_bodies import DetokenizeBody, TokenizeBody
from headrace_router.validation.tool_use import ToolUse, grammar_of, template_message, tools_of, without_volatile

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions, unless the model has one
UINT64 = 1 << 64
# Fields of a body that are sent as they are. In JSON bad words are texts and logit_bias has other keys; a seed may be
# drawn here.
_OWN = {"bad_words", "logit_bias", "prompt_logprobs", "seed"}
_SENT = RequestOptions.model_fields.keys() & {*Sampling.DESCRIPTOR.fields_by_name} - _OWN


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """The tokens of a prompt, and its blocks by each scheme."""

    token_ids: list[int]
    blocks: Mapping[HashScheme, PromptBlocks]


@dataclass(frozen=True, slots=True)
class PromptHasher:
    """Hashes the KV blocks of a tenant's prompts as the replicas do. The tenant's salt is in every hash."""

    schemes: Collection[HashScheme]
    tenant: Tenant

    def prompt(self, token_ids: list[int]) -> HashedPrompt:
        """Slow: call it off the event loop."""
        return HashedPrompt(token_ids, {scheme: scheme.blocks(self.tenant.salt, token_ids) for scheme in self.schemes})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The input of a generation. `label` is the client's request id: for logs, never a key."""

    card: ModelCard
    label: str
    choices: list[ChoiceRequest]
    stop: tuple[str, ...]
    echoes: tuple[str, ...] = ()  # the prompt's text per choice, when the answer repeats it
    parser: Callable[[], AnswerParser] | None = None  # for each choice, where an answer is more than text
    calls_before: int = 0  # calls of tools in the chat: some models count them
    special: bool = False  # special tokens stay in the text
    ignored: tuple[str, ...] = ()  # fields that change nothing for this model
    remember: Callable[[Mapping[str, Any], Sequence[int]], None] | None = None  # an answer, and all of its tokens
    turn: Conversation | None = None  # of a chat

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts; each prompt counts once for all of its choices, as OpenAI counts."""
        return sum(len(choice.prompt_token_ids) for choice in self.choices if is_first(choice))


class Preparer:
    """Makes requests from checked bodies; one per router."""

    def __init__(
        self,
        fleet: Fleet[ModelCard],
        schemes: Callable[[str, str], set[HashScheme]],
        limits: Limits,
        pool: TokenizerPool,
        *,
        strips_volatile: bool = True,
    ) -> None:
        """schemes: how the blocks of a model and revision are hashed. strips_volatile: see `without_volatile`."""
        self._fleet = fleet
        self._schemes = schemes
        self._limits = limits
        self._pool = pool
        self._strips_volatile = strips_volatile
        self._grammars = AnswerGrammars(limits, pool)
        self._answers = AnswerMemory()

    async def prepare(
        self, body: ChatBody | CompletionBody, tenant: Tenant, label: str, session: str = "", *, whole: bool = False
    ) -> GenerationRequest:
        """label: for logs. session: for placement. whole: the answer is not streamed.

        Raises ApiError; nothing was sent to a replica yet.
        """
        if not session:
            session = (isinstance(body, ChatBody) and body.prompt_cache_key) or body.session_id or ""
        session = f"{tenant.name}/{session}" if session else ""
        if isinstance(body, ChatBody):
            return await self._chat(body, tenant, label, session, whole)
        return await self._completion(body, tenant, label, session)

    async def _chat(self, body: ChatBody, tenant: Tenant, label: str, session: str, whole: bool) -> GenerationRequest:
        limits = self._limits
        constraint, field = grammar_of(body, limits.grammar_bytes)
        used = tools_of(body)
        messages, options, chars = self._for_template(body, used)
        self._check_chat(body)
        card = self._fleet.card(body.model)
        sampling = await self._sampling(body, card, tenant, (body.top_logprobs or 0) if body.logprobs else None)
        hasher = PromptHasher(self._schemes(card.model, card.revision), tenant)
        asked = body.max_completion_tokens or body.max_tokens
        kept = self._kept(body, card, asked, None)

        def encode() -> tuple[HashedPrompt, EncodedChat, Conversation]:
            turn = conversation_of(messages, options.get("tools"), card, tenant)
            encoded = card.chat(messages, options, self._answers, turn.keys)
            return hasher.prompt(encoded.token_ids[kept]), encoded, turn

        prompt, encoded, turn = await self._pool.run(encode, tenant.name, chars)
        thinking = encoded.thinking
        lengths = self._lengths(body, card, [prompt], sampling, asked, None)
        form = card.form(options)
        continues = bool(body.continue_final_message)
        limit: int | None = body.max_reasoning_tokens
        ignored: tuple[str, ...] = ()
        if limit is not None and not form.syntax.closes_by_token:
            limit, ignored = None, ("max_reasoning_tokens",)
        grammar = await self._grammars.of_chat(
            card, form, tenant, used, constraint, field, thinking=thinking, thought_tokens=limit
        )
        special = body.skip_special_tokens is False
        calls = used is not None and used.offered and form.syntax.tools is not None
        parser = None
        if calls or form.syntax.reasoning is not None:
            parser = functools.partial(
                AnswerParser,
                form.syntax,
                used.schemas if used is not None and calls else None,
                custom=used.custom if used is not None else (),
                thinking=thinking,
                one_call=used is not None and (used.one_call or not form.template.takes_several_calls),
                whole=whole,
                special=special,
            )
        return GenerationRequest(
            card,
            label,
            self._choices(body, card, [prompt], lengths, sampling, tenant, label, session, grammar),
            _stops(body.stop),
            parser=parser,
            calls_before=sum(len(message.tool_calls or ()) for message in body.messages),
            special=special,
            ignored=ignored,
            remember=functools.partial(self._answers.add, encoded.place) if encoded.place is not None else None,
            turn=None if body.truncate_prompt_tokens else turn.without_last() if continues else turn,
        )

    async def tokenize(self, body: ChatBody | TokenizeBody, tenant: Tenant) -> tuple[ModelCard, list[int]]:
        """The tokens of a prompt. Raises ApiError."""
        if isinstance(body, TokenizeBody):
            self._check_chars(len(body.prompt), "prompt")
            _check_text(body.prompt, "prompt")
            card = self._fleet.card(body.model)
            encode = functools.partial(card.encoder.encode_prompt, body.prompt, around=body.add_special_tokens)
            return card, await self._pool.run(encode, tenant.name, len(body.prompt))
        messages, options, chars = self._for_template(body, tools_of(body))
        card = self._fleet.card(body.model)
        encoded = await self._pool.run(lambda: card.chat(messages, options), tenant.name, chars)
        return card, encoded.token_ids

    async def detokenize(self, body: DetokenizeBody, tenant: Tenant) -> str:
        """The text of tokens, special ones included. Raises ApiError."""
        card = self._fleet.card(body.model)
        _check_ids(body.tokens, card, "tokens")
        return await self._pool.run(lambda: card.decode(body.tokens, True), tenant.name, len(body.tokens))

    def _for_template(self, body: ChatBody, used: ToolUse | None) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        """The messages and variables that a template gets, and how many characters of the client they have."""
        messages = [template_message(message) for message in body.messages]
        if self._strips_volatile:
            messages = without_volatile(messages)
        options = _template_options(body)
        if used is not None:
            options["tools"] = used.listed
        given = [*strings([messages, options]), *names([options, *(one.get("tool_calls") for one in messages)])]
        chars = sum(map(len, given))
        self._check_chars(chars, "messages")
        for text in given:
            _check_text(text, "messages")
        return messages, options, chars

    def _check_chat(self, body: ChatBody) -> None:
        _at_most(len(body.metadata or {}), self._limits.metadata_entries, "metadata", "entries")
        self._check_labels(body.metadata or {})
        self._check_labels({"user": body.user, "safety_identifier": body.safety_identifier})
        self._check_labels({"prompt_cache_key": body.prompt_cache_key, "session_id": body.session_id})
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise InvalidRequestError(
                "'max_tokens' and 'max_completion_tokens' differ: send one of them.", param="max_completion_tokens"
            )
        self._check_stream(body)

    async def _completion(self, body: CompletionBody, tenant: Tenant, label: str, session: str) -> GenerationRequest:
        constraint, field = grammar_of(body, self._limits.grammar_bytes)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise UnsupportedError("'best_of' is supported only when it equals 'n'.", param="best_of")
        texts, ids = _prompts(body.prompt)
        _at_most(len(texts) + len(ids), self._limits.prompts, "prompt", "prompts")
        chars = sum(map(len, texts))
        self._check_chars(chars, "prompt")
        for text in texts:
            _check_text(text, "prompt")
        self._check_labels({"user": body.user, "session_id": body.session_id})
        self._check_stream(body)
        card = self._fleet.card(body.model)
        sampling = await self._sampling(body, card, tenant, body.logprobs)
        _check_ids([token_id for one in ids for token_id in one], card, "prompt")
        kept = self._kept(body, card, body.max_tokens, COMPLETION_MAX_TOKENS)
        hasher = PromptHasher(self._schemes(card.model, card.revision), tenant)
        special = body.skip_special_tokens is False

        def encode(given: str | list[int]) -> tuple[HashedPrompt, str]:
            """A prompt, and its text for an echo."""
            whole = card.encoder.encode_prompt(given) if isinstance(given, str) else given
            token_ids, echo = whole[kept], ""
            if body.echo:
                as_given = isinstance(given, str) and len(token_ids) == len(whole) and not special
                echo = str(given) if as_given else card.decode(token_ids, special)
            return hasher.prompt(token_ids), echo

        size = chars or sum(map(len, ids))
        encoded = await self._pool.run(lambda: [encode(given) for given in texts or ids], tenant.name, size)
        prompts = [prompt for prompt, _ in encoded]
        lengths = self._lengths(body, card, prompts, sampling, body.max_tokens, COMPLETION_MAX_TOKENS)
        grammar = await self._grammars.checked(card, tenant, constraint, field)
        return GenerationRequest(
            card,
            label,
            self._choices(body, card, prompts, lengths, sampling, tenant, label, session, grammar),
            _stops(body.stop),
            echoes=tuple(echo for _, echo in encoded for _ in range(body.n or 1)) if body.echo else (),
            special=special,
        )

    def _lengths(
        self,
        body: ChatBody | CompletionBody,
        card: ModelCard,
        prompts: list[HashedPrompt],
        sampling: Sampling,
        asked: int | None,
        api_default: int | None,
    ) -> list[int]:
        """The most tokens of an answer to each prompt. Raises InvalidRequestError, ContextLengthError."""
        limits = self._limits
        count = (body.n or 1) * len(prompts)
        _at_most(count, limits.choices, "n", "choices (n x prompts)")
        left = [card.max_model_len - len(prompt.token_ids) for prompt in prompts]  # context tokens for each answer
        if max(left) == card.max_model_len:
            raise InvalidRequestError("The prompt is empty: it needs at least one token.", param="prompt")
        self._check_length(card, min(left), "messages" if isinstance(body, ChatBody) else "prompt")
        if sampling.HasField("prompt_logprobs"):
            tokens = sum(len(prompt.token_ids) for prompt in prompts) * (body.n or 1)
            entries = tokens * (1 + sampling.prompt_logprobs)
            _at_most(
                entries, limits.logprob_entries, "prompt", "log-probabilities to report (n x tokens x (1 + logprobs))"
            )
        default = int(card.defaults.get("max_tokens", api_default or card.max_model_len))
        longest = min(asked or default, max(left))  # answer
        allowed = self._allowed_tokens(count, sampling)
        if longest > allowed:
            if asked is not None:
                with_logprobs = " with logprobs" if sampling.HasField("logprobs") else ""
                raise InvalidRequestError(
                    f"{counted(count, 'choice')} x {counted(longest, 'token')}{with_logprobs} exceed this server's "
                    f"limit of {counted(allowed, 'token')} for each choice.",
                    param="max_tokens",
                )
            longest = max(1, allowed)
        if sampling.min_tokens > (shortest := min(longest, *left)):
            hint = "" if asked is not None or shortest < default else "; send 'max_tokens' to allow more"
            raise InvalidRequestError(
                f"'min_tokens' ({sampling.min_tokens}) exceeds the most tokens that this request can have "
                f"({shortest}){hint}.",
                param="min_tokens",
            )
        return [min(longest, most) for most in left]

    def _choices(
        self,
        body: ChatBody | CompletionBody,
        card: ModelCard,
        prompts: list[HashedPrompt],
        lengths: list[int],
        sampling: Sampling,
        tenant: Tenant,
        label: str,
        session: str,
        grammar: str,
    ) -> list[ChoiceRequest]:
        choices: list[ChoiceRequest] = []
        for prompt, longest in zip(prompts, lengths, strict=True):
            # Each prompt gets its own seed: otherwise equal prompts would get equal answers.
            seed = secrets.randbits(64) if body.seed is None else body.seed % UINT64
            for copy in range(body.n or 1):
                own = Sampling()
                own.CopyFrom(sampling)
                own.max_tokens, own.seed, own.choice_index = longest, seed, copy
                choices.append(
                    ChoiceRequest(
                        label=label,
                        model=card.model,
                        revision=card.revision,
                        tenant_salt=tenant.salt,
                        prompt_token_ids=prompt.token_ids,
                        sampling=own,
                        index=len(choices),
                        priority=body.priority or 0,
                        deadline_seconds=self._limits.request_seconds,
                        session=session,
                        grammar=grammar,
                        blocks={} if sampling.HasField("prompt_logprobs") else prompt.blocks,
                    )
                )
        return choices

    def _kept(
        self, body: ChatBody | CompletionBody, card: ModelCard, asked: int | None, api_default: int | None
    ) -> slice:
        """The slice of a prompt's tokens that is kept.

        -1 leaves to the answer as many tokens as it may have, or half of the context where these are the whole context.
        """
        count = body.truncate_prompt_tokens
        if count == -1:
            context = card.max_model_len
            answer = asked or int(card.defaults.get("max_tokens", api_default or context))
            room = max(answer if answer < context else context // 2, body.min_tokens or 0)
            count = min(max(1, context - room), self._limits.prompt_tokens or context)
        return slice(-count if count else None, None)

    async def _sampling(
        self, body: ChatBody | CompletionBody, card: ModelCard, tenant: Tenant, logprobs: int | None
    ) -> Sampling:
        """Options, by name; an option that the client omitted has the model's default, else the API's."""
        limits = self._limits
        self._check_stops(body.stop)
        _at_most(len(body.stop_token_ids or ()), limits.stop_token_ids, "stop_token_ids", "token ids")
        _check_ids(body.stop_token_ids or (), card, "stop_token_ids")
        _at_most(len(body.logit_bias or ()), limits.logit_bias_entries, "logit_bias", "entries")
        _at_most(len(body.allowed_token_ids or ()), limits.allowed_token_ids, "allowed_token_ids", "token ids")
        _check_ids(body.allowed_token_ids or (), card, "allowed_token_ids")
        if logprobs is not None:
            _at_most(logprobs, limits.top_logprobs, "top_logprobs" if isinstance(body, ChatBody) else "logprobs", "")
        scored = body.prompt_logprobs
        if scored is not None:
            _at_most(scored, limits.top_logprobs, "prompt_logprobs", "")
        if isinstance(body, CompletionBody) and body.echo and logprobs is not None:
            scored = max(scored or 0, logprobs)
        given = {name: value for name in _SENT if (value := getattr(body, name)) is not None}
        options: dict[str, Any] = {**API_DEFAULTS, **card.defaults, **given}
        if options["top_p"] == 0:  # the most probable token alone
            options |= {"temperature": 0, "top_p": 1}
        biases = _biases(body.logit_bias or {}, card)
        words = await self._bad_words(body.bad_words or (), card, tenant)
        return Sampling(**options, logit_bias=biases, logprobs=logprobs, prompt_logprobs=scored, bad_words=words)

    async def _bad_words(self, words: Sequence[str], card: ModelCard, tenant: Tenant) -> list[TokenSequence]:
        """As token ids; a sequence with a token that the model does not have is none."""
        limits = self._limits
        _at_most(len(words), limits.bad_words, "bad_words", "texts")
        for word in words:
            _check_text(word, "bad_words")
            if not word.strip():
                raise InvalidRequestError("A bad word must have more than white space.", param="bad_words")
            _at_most(len(word.encode()), limits.bad_word_bytes, "bad_words", "bytes in a text")
        if not words:
            return []
        found = await self._pool.run(lambda: card.encoder.encode_words(words), tenant.name, sum(map(len, words)))
        _at_most(sum(map(len, found)), limits.bad_word_tokens, "bad_words", "tokens")
        return [TokenSequence(ids=ids) for ids in found if max(ids) < card.vocab_size]

    def _allowed_tokens(self, choices: int, sampling: Sampling) -> int:
        """The output tokens of each choice for which all choices and their log-probabilities stay within the limits."""
        allowed = self._limits.output_tokens // choices
        if not sampling.HasField("logprobs"):
            return allowed
        return min(allowed, self._limits.logprob_entries // (choices * (1 + sampling.logprobs)))

    def _check_length(self, card: ModelCard, left: int, param: str) -> None:
        """left: tokens of the context after the longest prompt."""
        limit = card.max_model_len
        prompt_tokens = limit - left
        if self._limits.prompt_tokens is not None and prompt_tokens > self._limits.prompt_tokens:
            raise ContextLengthError(
                f"The prompt has {counted(prompt_tokens, 'token')}; this server accepts {self._limits.prompt_tokens}.",
                param=param,
                lengths=(prompt_tokens, self._limits.prompt_tokens),
            )
        if left < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, and the answer needs at least one of them; "
                f"the prompt has {counted(prompt_tokens, 'token')}. Shorten it.",
                param=param,
                lengths=(prompt_tokens, limit - 1),
            )

    def _check_chars(self, count: int, param: str) -> None:
        if count > self._limits.prompt_chars:
            raise ContextLengthError(
                f"The prompt has {count} characters; this server accepts {self._limits.prompt_chars}. Shorten it.",
                param=param,
            )

    def _check_stops(self, stop: str | list[str] | None) -> None:
        stops = _stops(stop)
        _at_most(len(stops), self._limits.stop_strings, "stop", "strings")
        for text in stops:
            _check_text(text, "stop")
            if not text:
                raise InvalidRequestError("A stop string must not be empty.", param="stop")
            _at_most(len(text.encode()), self._limits.stop_bytes, "stop", "bytes in a string")

    def _check_labels(self, labels: Mapping[str, str | None]) -> None:
        for name, text in labels.items():
            _check_text(name, "metadata")
            _check_text(text or "", "metadata")
            _at_most(len((text or "").encode()), self._limits.label_bytes, name[:64], "bytes")

    def _check_stream(self, body: ChatBody | CompletionBody) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequestError(
                "'prompt_logprobs' is not sent in streams: send 'stream' as false.", param="prompt_logprobs"
            )


def _at_most(count: int, limit: int, param: str, what: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"'{param}' has {count} {what}".rstrip() + f"; the limit is {limit}.", param=param)


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"'{param}' holds half a surrogate pair, which is no text.", param=param) from None


def _check_ids(ids: Sequence[int], card: ModelCard, param: str) -> None:
    if ids and max(ids) >= card.vocab_size:
        raise InvalidRequestError(
            f"'{param}' holds the token id {max(ids)}; this model's ids are below {card.vocab_size}.", param=param
        )


def _biases(given: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError("The keys of 'logit_bias' must be token ids.", param="logit_bias")
        biases[int(key)] = bias
    _check_ids(list(biases), card, "logit_bias")
    return biases


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """The four forms of a completion prompt, as texts or as lists of ids."""
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise InvalidRequestError("'prompt' is an empty list.", param="prompt")
    first = prompt[0]  # all are of its type: the body was checked
    if isinstance(first, str):
        return cast(list[str], prompt), []
    return [], cast(list[list[int]], prompt) if isinstance(first, list) else [cast(list[int], prompt)]


def conversation_of(messages: Sequence[Mapping[str, Any]], tools: Any, card: ModelCard, tenant: Tenant) -> Conversation:
    """The turn of these messages, as the template gets them."""
    digests = [*map(message_digest, messages)]
    defined = digest_of([card.model, card.revision, tools])
    return Conversation(
        card.model,
        tenant.salt,
        defined,
        message_keys(key_after(tenant.salt, defined), digests),
        message_keys(defined, digests),
        digests,
        [place for place, message in enumerate(messages) if message["role"] == "assistant"],
        messages[0]["role"] in ("system", "developer"),
    )


def count_choices(body: ChatBody | CompletionBody) -> int:
    """How many answers a request asks for; its limits are not checked yet."""
    if isinstance(body, ChatBody):
        return body.n or 1
    texts, ids = _prompts(body.prompt)
    return (body.n or 1) * (len(texts) + len(ids))


_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now")


def _template_options(body: ChatBody) -> dict[str, Any]:
    """Variables of the chat template that a body sets. Raises InvalidRequestError."""
    options = dict(body.chat_template_kwargs or {})
    if own := [name for name in _TEMPLATE_OWN if name in options]:
        raise InvalidRequestError(
            f"'chat_template_kwargs' has '{own[0]}', which is no variable of its own: send it as a field, if at all.",
            param="chat_template_kwargs",
        )
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other: send one of them.",
                param="continue_final_message",
            )
        options["continue_final_message"] = True
    elif body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.documents:
        options["documents"] = body.documents
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options
