"""How much text a model's context holds, checked before the work that it bounds."""

from dataclasses import dataclass

from headrace_router.core.errors import ContextLengthError


@dataclass(frozen=True, slots=True)
class ContextSize:
    """None: not known."""

    tokens: int | None
    chars: int | None  # a longer text has more tokens

    def check_chars(self, count: int, param: str) -> None:
        """Raises ContextLengthError."""
        if self.chars is not None and count > self.chars:
            raise ContextLengthError(
                f"The prompt has {count} characters; the model's context holds at most {self.chars}. Shorten it.",
                param=param,
            )

    def check_tokens(self, count: int, param: str) -> None:
        """Raises ContextLengthError."""
        if self.tokens is not None and count > self.tokens:
            raise self.too_long(f"the prompt has {count}", param)

    def too_long(self, counted: str, param: str) -> ContextLengthError:
        """counted: how many tokens there are."""
        return ContextLengthError(
            f"This model's maximum context length is {self.tokens} tokens; {counted}. Shorten it.", param=param
        )
