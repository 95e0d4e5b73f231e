"""What waits to be sent to a replica."""

import asyncio

from headrace_proto.replica_pb2 import Cancel, RouterFrame, Submit

MAX_FRAME_TOKENS = 256 << 10  # prompt tokens in one RouterFrame: about 1 MiB


class Outbox:
    """Submits and cancels of one replica until its stream takes them; within a frame, cancels come first."""

    def __init__(self) -> None:
        self._submits: list[Submit] = []
        self._cancels: list[bytes] = []
        self._wake = asyncio.Event()

    def submit(self, submit: Submit) -> None:
        self._submits.append(submit)
        self._wake.set()

    def cancel(self, attempt_id: bytes) -> None:
        """Calls an attempt off; when its submit is still here, the replica never hears of it."""
        kept = [submit for submit in self._submits if submit.attempt_id != attempt_id]
        if len(kept) == len(self._submits):
            self._cancels.append(attempt_id)
            self._wake.set()
        self._submits = kept

    def clear(self) -> None:
        """Forgets everything: there is nobody to send it to."""
        self._submits.clear()
        self._cancels.clear()

    async def next_frame(self) -> RouterFrame:
        """Waits for something to send. Takes all there is, up to about 1 MiB of prompts."""
        while not (self._submits or self._cancels):
            self._wake.clear()
            await self._wake.wait()
        return self._take()

    def _take(self) -> RouterFrame:
        tokens = count = 0
        for submit in self._submits:
            tokens += len(submit.prompt_token_ids) + len(submit.output_token_ids)
            count += 1
            if tokens >= MAX_FRAME_TOKENS:
                break
        submits, self._submits = self._submits[:count], self._submits[count:]
        cancels, self._cancels = self._cancels, []
        return RouterFrame(submits=submits, cancels=[Cancel(attempt_id=attempt_id) for attempt_id in cancels])
