"""Attempts that were sent to a replica and that its reported load does not include yet."""


class Unreported:
    """With the tokens that each will compute there."""

    def __init__(self) -> None:
        self._attempts: dict[bytes, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._attempts

    def add(self, attempt_id: bytes, tokens: int) -> None:
        self._attempts[attempt_id] = tokens
        self.tokens += tokens

    def discard(self, attempt_id: bytes) -> None:
        """It is reported, or has ended."""
        self.tokens -= self._attempts.pop(attempt_id, 0)

    def clear(self) -> None:
        self._attempts.clear()
        self.tokens = 0
