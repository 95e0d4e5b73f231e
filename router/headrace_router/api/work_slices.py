"""Long work on the event loop, in slices: one slice per turn, whatever the number of requests that need one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

SLICE_SECONDS = 0.002
BLOCK_BYTES = 64 << 10


class WorkSlices:
    """Sends what generators produce; one per router."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def send(self, pieces: Iterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends pieces as they are made, in blocks of about 64 KiB. `send` waits while the client does not read."""
        block, complete = take(pieces)
        await send(block)
        while not complete:
            block, complete = await self.next(pieces)
            await send(block)

    async def next(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """One more slice of work: see `take`."""
        async with self._turn:  # first come, first served
            taken = take(pieces)
            await asyncio.sleep(0)
            return taken


def take(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """What can be made in a slice, and whether it was the last."""
    block: list[bytes] = []
    size, end = 0, time.perf_counter() + SLICE_SECONDS
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES or time.perf_counter() >= end:
            return b"".join(block), False
    return b"".join(block), True
