"""Text to token ids as transformers does, except that users cannot write control tokens."""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.answer_memory import Known
from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError

CLIENT, TEMPLATE = "c", "t"
_BEGIN, _END = "\U0010fffc", "\U0010fffd"  # private characters, which no template knows
_OPEN = "\U0010fffb "  # where a message is to be continued; its space shows whether the template trims


class UnmarkedChatError(InvalidRequestError, code="control_token_in_text"):
    """Text of a client spells a control token, and where the template puts this text is not known."""

    def __init__(self) -> None:
        super().__init__(
            "These messages, or definitions of tools, spell one of the model's control tokens, and the model's chat "
            "template changes them in a way that cannot be followed: remove what looks like a control token.",
            param="messages",
        )


class RenderedChat:
    """A chat in the model's own format. It is rendered again with marks around the client's strings."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], now: datetime, options: Mapping[str, Any]
    ) -> None:
        """now, options: as for `ChatTemplate.render`, and `continue_final_message`: the answer goes on with its text.

        Raises ChatTemplateError.
        """
        self._template = template
        self._messages = messages
        self._now = now
        self._continues = options.get("continue_final_message", False)
        self._options = {name: value for name, value in options.items() if name != "continue_final_message"}
        self.text = self._render(messages, self._options)

    def strings(self) -> list[str]:
        """All strings of the client but roles and types."""
        return strings([self._messages, self._options])

    def names(self) -> list[str]:
        """Names of fields that the client chose, such as those of a tool's parameters."""
        return names([self._options, *(message.get("tool_calls") for message in self._messages)])

    def origins(self, tags: Sequence[str] = ()) -> str:
        """For each character of the text, CLIENT or TEMPLATE: what is between marks around a client's string is CLIENT.

        Raises UnmarkedChatError. tags: an assistant's message has these as tokens: the model wrote them.
        """
        if any(_BEGIN in text or _END in text for text in self.strings()):
            raise UnmarkedChatError
        around = re.compile("|".join(map(re.escape, tags)) if tags else r"(?!)")
        mark_own = partial(_mark, around=around)
        messages = [_each(one, mark_own if one.get("role") == "assistant" else _mark) for one in self._messages]
        options = _each(self._options, _mark)
        try:
            marked = self._render(messages, options)
        except ChatTemplateError:
            raise UnmarkedChatError from None
        if marked.replace(_BEGIN, "").replace(_END, "") != self.text:
            raise UnmarkedChatError
        edges = [place for place, char in enumerate(marked) if char in (_BEGIN, _END)]
        found: list[str] = []
        depth = 0
        for start, end in pairwise([-1, *edges, len(marked)]):
            if start >= 0:
                depth += 1 if marked[start] == _BEGIN else -1
            if depth < 0 or (depth > 0 and end == len(marked)):  # the template shows a part of a string only
                raise UnmarkedChatError
            found.append((CLIENT if depth > 0 else TEMPLATE) * (end - start - 1))
        return "".join(found)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if not self._continues:
            return self._template.render(messages, self._now, options)
        last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_OPEN}"}
        rendered = self._template.render([*messages[:-1], last], self._now, {**options, "add_generation_prompt": False})
        place = rendered.rfind(_OPEN.strip())
        if place < 0:
            raise ChatTemplateError("The model's chat template does not show the last message.", param="messages")
        kept = rendered[:place]
        return kept if rendered.startswith(_OPEN, place) else kept.rstrip()


def _mark(text: str, around: re.Pattern[str] | None = None) -> str:
    """The text between marks, which are inside of the white space around it: templates trim.

    around: what is left without marks.
    """
    if around is not None:
        rest = iter(around.findall(text))
        return "".join(_mark(piece) + next(rest, "") for piece in around.split(text))
    inner = text.strip()
    if not inner:
        return text
    start = text.index(inner)
    return f"{text[:start]}{_BEGIN}{inner}{_END}{text[start + len(inner) :]}"


def strings(value: Any) -> list[str]:
    """All strings in a JSON value but roles and types."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _each(value, keep)
    return found


def names(value: Any) -> list[str]:
    """The names of all fields in a JSON value."""
    if isinstance(value, Mapping):
        return [*map(str, value), *(name for member in value.values() for name in names(member))]
    return [name for member in value for name in names(member)] if isinstance(value, list | tuple) else []


def _each(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """The value with each string but roles and types changed; names of fields are not."""
    if isinstance(value, str):
        return value if name in ("role", "type") else change(value)
    if isinstance(value, Mapping):
        return {key: _each(member, change, key) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_each(member, change, name) for member in value]
    return value


class ControlTokens:
    """The tokenizer's special tokens, and the other added tokens that the chat template writes."""

    def __init__(self, tokenizer: Tokenizer, template_source: str, unknown: str | None) -> None:
        """unknown: the token for what the vocabulary lacks; it is a control token only where its name is spelled."""
        added = tokenizer.get_added_tokens_decoder()
        self._names = {
            token_id: token.content
            for token_id, token in added.items()
            if token.content and (token.special or (not token.content.isspace() and token.content in template_source))
        }
        self._takes_space = {token_id for token_id, token in added.items() if token.lstrip or token.rstrip}
        # Added tokens that are not special, such as tags around thoughts and calls: an assistant's message has them.
        self.tags = sorted(
            (token.content for token_id, token in added.items() if token_id in self._names and not token.special),
            key=len,
            reverse=True,
        )
        self._unknown = unknown
        self._normalizer = tokenizer.normalizer
        spelled = {form for name in self._names.values() for form in (name, self._normalized(name)) if form}
        self._spellings = sorted(spelled)

    def isdisjoint(self, ids: Iterable[int]) -> bool:
        """Whether none of the ids is one of them, or that of the unknown token."""
        return self._names.keys().isdisjoint(ids)

    def are_spelled(self, texts: Iterable[str]) -> bool:
        """Whether a text contains the name of a control token, as it is or normalized."""
        forms = (form for text in texts for form in {text, self._normalized(text)})
        return any(name in form for form in forms for name in self._spellings)

    def spans(self, text: str, ids: Sequence[int], encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Where control tokens come from in the text: [start, end) each, in order; (0, 0) where that is not known.

        ids: those of the encoding, which makes another list of them at each access.
        """
        for place, token_id in enumerate(ids):
            if token_id in self._names:
                span = encoding.token_to_chars(place) or (0, 0)
                if token_id in self._takes_space:
                    span = self._without_space(text, *span)
                if self._names[token_id] != self._unknown or self._is_unknown(text[slice(*span)]):
                    yield span

    def _without_space(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The span of a token without the characters around its name that are normalized to white space."""
        part = text[start:end]
        start, end = end - len(part.lstrip()), start + len(part.rstrip())  # most of it, at once
        while start < end and not self._normalized(text[start]):
            start += 1
        while start < end and not self._normalized(text[end - 1]):
            end -= 1
        return start, max(start, end)

    def _is_unknown(self, part: str) -> bool:
        """Whether the text is the name of the unknown token, not something that the vocabulary lacks."""
        name = self._unknown or ""
        return part.strip() == name or self._normalized(part) == self._normalized(name)

    def _normalized(self, part: str) -> str:
        """Without white space around it."""
        return str(part if self._normalizer is None else self._normalizer.normalize_str(part)).strip()


_GROWING_CHARS = 50_000  # fewest characters of a text whose normalized length is checked
_GROWTH = 3  # normalized characters for each
_PIECE_CHARS = 4096  # normalized at a time
_ROUNDS = 32  # each one at least halves the spans that it found
CONTROL_SPANS = 1024  # spans of users' text in one prompt: the text grows by a cut for each span, and is encoded again


class ControlTokenError(InvalidRequestError, code="control_token_in_text"):
    """Text of a user becomes a control token in a way that cannot be undone."""

    def __init__(self, param: str) -> None:
        super().__init__(
            "This text would become a control token of the model, and no other encoding of it was found: "
            "remove what looks like one of the model's control tokens.",
            param=param,
        )


class GrownTextError(InvalidRequestError, code="text_grows"):
    """The model's tokenizer would make a text too long."""

    def __init__(self) -> None:
        super().__init__(
            f"The model's tokenizer replaces characters of this text by longer ones, more than {_GROWTH} for each: "
            "send less of them."
        )


class TooManyControlTokensError(InvalidRequestError, code="too_many_control_tokens"):
    """Text of a user has more spellings of control tokens than are encoded as text."""

    def __init__(self, param: str) -> None:
        super().__init__(
            f"This text has more than {CONTROL_SPANS} parts that look like the model's control tokens: remove some of "
            "them, or send the text in several requests.",
            param=param,
        )


class TextEncoder:
    """Encodes prompts and chats. Where text of a user becomes a control token, it is cut there and encoded again.

    The check is made on the tokens, so normalizers, pre-tokenizers and models of all kinds are covered, and every
    other text is encoded once, unchanged.
    """

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens, bos: int | None) -> None:
        """bos: the token that begins each bare prompt; none if the model needs none."""
        self._control = control
        # An added token between two characters keeps the tokenizer from joining them. No text contains its random name.
        self._cut = f"\U0010fffe{secrets.token_hex(16)}\U0010fffe"
        self._tokenizer = _copy(tokenizer)
        self._tokenizer.add_special_tokens([AddedToken(self._cut, normalized=False)])
        self._cut_id = self._tokenizer.token_to_id(self._cut)
        self._prefix, self._suffix = _added_around(tokenizer)
        if bos is not None and self._prefix[:1] != [bos]:
            self._prefix = [bos, *self._prefix]

    def encode_prompt(self, text: str, *, around: bool = True) -> list[int]:
        """Ids of a bare prompt. around: with the tokens that the tokenizer itself adds around one.

        Raises ControlTokenError, TooManyControlTokensError.
        """
        ids = self._plain(text)
        if not self._control.isdisjoint(ids):
            self._check_growth(text)
            ids = self._encode(text, CLIENT * len(text), "prompt")
        return [*self._prefix, *ids, *self._suffix] if around else ids

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each word alone and after a space, each sequence once. Spelled control tokens are tokens here.

        Raises GrownTextError.
        """
        texts = [before + word.lstrip() for word in words for before in ("", " ")]
        return [list(ids) for ids in dict.fromkeys(tuple(self._plain(text)) for text in texts) if ids]

    def encode_chat(self, chat: RenderedChat, known: Sequence[Known] = ()) -> list[int]:
        """Ids of a rendered chat; the template has written all of its special tokens. known: parts with these tokens.

        Which characters are the client's is found by a second rendering, with marks around the client's strings. It is
        never left out: a template may make a control token of text that spells none (by `lower()`, or by writing the
        client's text between its own brackets).
        Raises ControlTokenError, TooManyControlTokensError, UnmarkedChatError.
        """
        names = chat.names()  # templates compare them, so they cannot be marked
        if names and self._control.are_spelled(["\n".join(names)]):
            raise UnmarkedChatError
        self._check_growth(chat.text)
        try:
            origins = chat.origins(self._control.tags)
        except UnmarkedChatError:
            strings = chat.strings()
            if self._control.are_spelled([*strings, "".join(strings)]):
                raise
            origins = ""  # of no matter: no text of the client can become a control token
        ids: list[int] = []
        place = 0
        for part in (*known, Known(len(chat.text), len(chat.text), ())):
            text = chat.text[place : part.start]
            ids += self._encode(text, origins[place : part.start], "messages") if origins else self._plain(text)
            ids += part.token_ids
            place = part.end
        return ids

    def _plain(self, text: str) -> list[int]:
        self._check_growth(text)
        # Unlike `encode`, the batch functions let other threads run meanwhile; the fast one has no offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _check_growth(self, text: str) -> None:
        """Compatibility forms of Unicode make up to 18 characters of one, and tokenizing takes memory for each.

        Raises GrownTextError.
        """
        normalizer = self._tokenizer.normalizer
        if normalizer is None or len(text) < _GROWING_CHARS or text.isascii():
            return
        left = max(_GROWING_CHARS, len(text)) * _GROWTH
        for start in range(0, len(text), _PIECE_CHARS):
            left -= len(normalizer.normalize_str(text[start : start + _PIECE_CHARS]))
            if left < 0:
                raise GrownTextError

    def _encode(self, text: str, origins: str, param: str) -> list[int]:
        cuts = 0
        for _ in range(_ROUNDS):
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            ids = encoding.ids
            # A control token whose place in the text is not known counts as the client's.
            spans = [
                (start, end)
                for start, end in self._control.spans(text, ids, encoding)
                if start == end or CLIENT in origins[start:end]
            ]
            if not spans:
                return [token_id for token_id in ids if token_id != self._cut_id]
            if any(end - start < 2 for start, end in spans):
                break
            cuts += len(spans)
            if cuts > CONTROL_SPANS:
                raise TooManyControlTokensError(param)
            places = [(start + end) // 2 for start, end in spans]
            text, origins = _joined(self._cut, text, places), _joined("t" * len(self._cut), origins, places)
        raise ControlTokenError(param)


def _joined(cut: str, text: str, places: list[int]) -> str:
    """The text with a cut at each place."""
    edges = [0, *places, len(text)]
    return cut.join(text[start:end] for start, end in pairwise(edges))


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without its post-processor; the two share the model, which is most of their memory."""
    copy = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (copy.add_special_tokens if token.special else copy.add_tokens)([token])
    if copy.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps are kept by the file only
        return Tokenizer.from_str(tokenizer.to_str())
    return copy


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after a bare prompt."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
