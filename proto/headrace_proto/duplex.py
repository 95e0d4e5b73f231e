"""Runs both directions of one bidirectional stream, so that they end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

REASON_SECONDS = 0.2  # for the reader to raise the reason after the writer of a broken stream has ended

Result = TypeVar("Result")


async def run_duplex(reading: Coroutine[Any, Any, Result], writing: Coroutine[Any, Any, None]) -> Result:
    """Returns or raises what `reading` does, and cancels `writing` then. If `writing` ends first, the stream ends, too.

    The reader cannot detect that its writer has failed: without this the stream would stay open forever. In that case
    raises what `writing` raised, or ConnectionError when it returned.
    """
    reader, writer = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():  # both detect the end of a call, but only the reader gets its reason
            await asyncio.wait({reader}, timeout=REASON_SECONDS)
        if not reader.done():
            writer.result()
            raise ConnectionError("nothing more can be sent on this stream")
        return reader.result()
    finally:
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
