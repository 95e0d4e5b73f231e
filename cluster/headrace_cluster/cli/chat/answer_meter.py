"""Speed and token counts of one answer. Pure: the clock is an argument."""

from collections.abc import Callable
from typing import Any


class AnswerMeter:
    """Starts when it is created. Times are measured in the client; token counts are from the server's usage."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._first: float | None = None

    def record_text(self) -> None:
        """Records that text arrived."""
        self._last = self._clock()
        if self._first is None:
            self._first = self._last

    def summary(self, usage: dict[str, Any] | None) -> str:
        """One line: tokens, tok/s after the first token, TTFT, and the prompt's tokens. None = no usage arrived."""
        seconds = self._clock() - self._start
        ttft = f"TTFT {self._first - self._start:.2f} s" if self._first is not None else "no text"
        if not usage:
            return f"{seconds:.2f} s, {ttft}; the server sent no token counts"
        tokens = int(usage.get("completion_tokens", 0))
        spent = self._last - self._first if self._first is not None else 0.0
        rate = f"{(tokens - 1) / spent:.1f} tok/s, " if tokens > 1 and spent > 0 else ""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        prompt = _count(int(usage.get("prompt_tokens", 0)))
        return f"{_count(tokens)} in {seconds:.2f} s, {rate}{ttft}; prompt {prompt}, {cached} cached"


def _count(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'}"
