"""Prompts that other replicas have a replica compute, and that its reported load does not include yet. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

STEPS = 2  # of the replica, after which its load includes a request that was on its way


@dataclass(slots=True)
class _Prompt:
    tokens: int
    is_reported: Callable[[], bool]
    sent_step: int | None = None  # the newest step here, when the other replica had received its attempt


class RemotePrompts:
    """Of one router's attempts, by their ids.

    The other replica receives the attempt first, which its load shows; then it requests the prompt. Two steps later
    this one's load includes it.
    """

    def __init__(self) -> None:
        self._prompts: dict[bytes, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self._prompts.values())

    def add(self, attempt_id: bytes, tokens: int, is_reported: Callable[[], bool]) -> None:
        """is_reported: whether the load of the replica that will request it includes the attempt."""
        self._prompts[attempt_id] = _Prompt(tokens, is_reported)

    def discard(self, attempt_id: bytes) -> bool:
        """It is computed, or not needed any more. Returns whether it was there."""
        return self._prompts.pop(attempt_id, None) is not None

    def stepped(self, step: int) -> None:
        """This replica's load is that of this step."""
        for attempt_id, prompt in list(self._prompts.items()):
            if prompt.sent_step is None:
                prompt.sent_step = step if prompt.is_reported() else None
            elif step >= prompt.sent_step + STEPS:
                del self._prompts[attempt_id]
