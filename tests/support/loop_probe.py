"""How long one event loop computes without a pause: a bound of its lag on a machine without other work."""

import asyncio
import gc
import time

PAUSE_SECONDS = 0.002


class LoopProbe:
    """`longest`: the most processor seconds of the loop's thread between two wake-ups of a task on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of a loop that runs in another thread."""
        self.longest = 0.0
        self._over = False
        gc.disable()  # a test process has many more objects than a router or a replica
        self._task = asyncio.run_coroutine_threadsafe(self._run(), loop)

    def stop(self) -> float:
        """Ends the task once the loop has run it again; returns `longest`."""
        self._over = True
        self._task.result(30)
        gc.enable()
        return self.longest

    async def _run(self) -> None:
        while not self._over:
            before = time.thread_time()
            await asyncio.sleep(PAUSE_SECONDS)
            self.longest = max(self.longest, time.thread_time() - before)
