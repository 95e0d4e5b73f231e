"""Clients that all disconnect at the same time."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp


class LoadGenerator:
    """Opens all streams at once, and reads them on a separate thread until `disconnect`."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.tokens = 0
        self._url = url
        self._bodies = bodies
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()

    def disconnect(self) -> None:
        """Closes every connection; returns when they are closed. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        self._loop.close()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as session:
            readers = [asyncio.create_task(self._read(session, body)) for body in self._bodies]
            await self._over.wait()
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)  # some streams ended with an error

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        full_body = body | {"stream": True, "return_token_ids": True, "ignore_eos": True}
        async with session.post("/v1/completions", json=full_body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.tokens += sum(len(choice["token_ids"]) for choice in event.get("choices", []))
