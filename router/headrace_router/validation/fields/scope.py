"""The objects of a request: each is a scope of field names."""

from enum import Enum

from pydantic import BaseModel

from headrace_router.validation.bodies import ChatBody, ChatMessage, CompletionBody, StreamOptions, TextPart


class Scope(Enum):
    """An object of a request; the value is the prefix of its fields' paths."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    STREAM_OPTIONS = "stream_options"
    MESSAGE = "messages[]"
    PART = "messages[].content[]"

    @property
    def model(self) -> type[BaseModel]:
        """The pydantic model, which declares the honoured fields."""
        return _MODELS[self]

    @property
    def max_fields(self) -> int:
        """The most fields of one object: bounds the work on unknown fields."""
        return 100 if self in (Scope.CHAT, Scope.COMPLETIONS) else 32


_MODELS: dict[Scope, type[BaseModel]] = {
    Scope.CHAT: ChatBody,
    Scope.COMPLETIONS: CompletionBody,
    Scope.STREAM_OPTIONS: StreamOptions,
    Scope.MESSAGE: ChatMessage,
    Scope.PART: TextPart,
}
