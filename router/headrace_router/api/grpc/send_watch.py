"""Cancels a call whose client does not read."""

import asyncio


class SendWatch:
    """Of the call of the current task, which sets `sending` around each event that it sends."""

    def __init__(self, seconds: float) -> None:
        """seconds: for the client to accept an event; the call ends after that, at twice that at the latest."""
        task = asyncio.current_task()
        assert task is not None
        self.sending = False
        self.sent = 0  # events
        self._task: asyncio.Task[object] = task
        self._seconds = seconds
        self._stalled: int | None = None  # `sent` when the last period ended, if an event was being sent
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.sending and self._stalled == self.sent:
            self._task.cancel()
            return
        self._stalled = self.sent if self.sending else None
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check)
