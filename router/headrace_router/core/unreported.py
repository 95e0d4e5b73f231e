"""Attempts that were sent to a replica and that its reported load does not include yet."""


class Unreported:
    """With the tokens that each will compute there, and the replica's newest step when it was queued."""

    def __init__(self) -> None:
        self._attempts: dict[bytes, tuple[int, int]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._attempts

    def add(self, attempt_id: bytes, tokens: int, step: int) -> None:
        self._attempts[attempt_id] = tokens, step
        self.tokens += tokens

    def discard(self, attempt_id: bytes) -> None:
        """It is reported, or has ended."""
        tokens, _ = self._attempts.pop(attempt_id, (0, 0))
        self.tokens -= tokens

    def discard_until(self, step: int) -> None:
        """Those that were queued at that step or before are reported by now."""
        for attempt_id in [key for key, (_, queued) in self._attempts.items() if queued <= step]:
            self.discard(attempt_id)

    def clear(self) -> None:
        self._attempts.clear()
        self.tokens = 0
