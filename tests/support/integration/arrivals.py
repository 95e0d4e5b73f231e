"""Requests that arrive at a constant rate, whatever happens to the earlier ones."""

import asyncio
import threading
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request; times are of `time.monotonic`."""

    sent: float
    ended: float
    status: int
    tokens: int
    text: str  # of an error


class Arrivals:
    """Sends requests from its creation until `stop`."""

    def __init__(self, url: str, per_second: float, tokens: int, model: str = "tiny") -> None:
        """tokens: of each answer."""
        self.answers: list[Answer] = []
        self._url, self._rate, self._tokens, self._model = url, per_second, tokens, model
        self._random = Random(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 60) -> list[Answer]:
        """Sends no more; returns when all requests have ended."""
        self._over.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "requests without an end"
        return self.answers

    async def _run(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as session:
            running: set[asyncio.Task[None]] = set()
            due = time.monotonic()
            while not self._over.is_set():
                task = asyncio.create_task(self._complete(session))
                running.add(task)
                task.add_done_callback(running.discard)
                due += self._random.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*running)

    async def _complete(self, session: aiohttp.ClientSession) -> None:
        prompt = [self._random.randrange(10, 300) for _ in range(16)]
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True}
        sent = time.monotonic()
        try:
            async with session.post("/v1/completions", json=body) as answer:
                found = await answer.json()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            status, found = 0, {"error": repr(error)}
        tokens = found["usage"]["completion_tokens"] if status == 200 else 0
        self.answers.append(Answer(sent, time.monotonic(), status, tokens, str(found.get("error", ""))))
