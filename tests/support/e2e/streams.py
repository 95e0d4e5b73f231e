"""Many completions at once over HTTP, each checked event by event, some with a disconnect of the client."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Outcome:
    """The result of one streamed completion."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False  # [DONE] was received
    dropped: bool = False  # the client disconnected
    error: str = ""

    @property
    def complete(self) -> bool:
        """As promised: one finish reason, usage equal to the tokens, [DONE], no error."""
        if not self.done or self.error or self.finish_reason is None or self.usage is None:
            return False
        return bool(self.usage["completion_tokens"] == len(self.token_ids))


async def _stream(session: aiohttp.ClientSession, body: dict[str, Any]) -> Outcome:
    outcome = Outcome()
    full_body = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with session.post("/v1/completions", json=full_body) as answer:
        outcome.status = answer.status
        if answer.status != 200:
            outcome.error = await answer.text()
            return outcome
        async for raw in answer.content:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                assert not outcome.done
                outcome.done = True
                continue
            _record_event(outcome, json.loads(line[6:]))
    return outcome


def _record_event(outcome: Outcome, event: dict[str, Any]) -> None:
    assert not outcome.done, "an event after [DONE]"
    if "error" in event:
        outcome.error = event["error"]["message"]
    if event.get("usage"):
        assert outcome.usage is None, "two usage events"
        outcome.usage = event["usage"]
    for choice in event.get("choices", []):
        assert choice["index"] == 0 and outcome.finish_reason is None, "an event after the finish reason"
        outcome.text += choice["text"]
        outcome.token_ids += choice["token_ids"]
        if choice["logprobs"]:
            outcome.logprobs += choice["logprobs"]["token_logprobs"]
        outcome.finish_reason = choice["finish_reason"]


def run_streams(
    url: str, bodies: Sequence[dict[str, Any]], drop_after: float | None = None, seconds: float = 120
) -> list[Outcome]:
    """Sends all bodies at once. `drop_after`: seconds until each client disconnects."""

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> Outcome:
        try:
            async with asyncio.timeout(drop_after):
                return await _stream(session, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            dropped = drop_after is not None and isinstance(error, TimeoutError)
            return Outcome(dropped=dropped, error=repr(error))

    async def run() -> list[Outcome]:
        options = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=seconds)}
        async with aiohttp.ClientSession(url, **options) as session:  # type: ignore[arg-type]
            return await asyncio.gather(*(one(session, body) for body in bodies))

    return asyncio.run(run())


@contextmanager
def steady_streams(url: str, bodies: Sequence[dict[str, Any]]) -> Iterator[list[tuple[int, Outcome]]]:
    """Repeats each body as soon as its stream ends, until the block ends; yields the list of all outcomes.

    This keeps up the load for any duration, independent of the speed of the machine.
    """
    outcomes: list[tuple[int, Outcome]] = []
    over = threading.Event()

    def repeat(index: int) -> None:
        while not over.is_set():
            outcomes.append((index, run_streams(url, [bodies[index]])[0]))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
