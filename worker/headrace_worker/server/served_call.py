"""Ending a streaming call from outside of the method that serves it."""

import asyncio
import contextlib
from typing import Any

import grpc


class ServedCall:
    """A call that a method of gRPC's asyncio server runs: create it in the method."""

    def __init__(self, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call as a task"
        self._task: asyncio.Task[Any] = task
        self._context = context
        self._ending: asyncio.Task[None] | None = None

    def end(self, sentence: str) -> None:
        """Ends it at once, also when it waits for a peer that does not read; the peer gets ABORTED and the sentence.

        The method is cancelled, as when its peer disconnects. Without a status a peer that reads again would wait.
        """
        if self._ending is None:
            self._task.cancel()
            self._ending = asyncio.create_task(self._abort(sentence))

    async def _abort(self, sentence: str) -> None:
        with contextlib.suppress(Exception):  # it always raises; the call may have ended at the same time
            await self._context.abort(grpc.StatusCode.ABORTED, sentence)
