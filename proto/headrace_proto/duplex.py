"""Both directions of one stream: they live and end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

REASON_SECONDS = 0.2  # that a reader has to say why a stream ended under its writer

Result = TypeVar("Result")


async def both_ways(reading: Coroutine[Any, Any, Result], writing: Coroutine[Any, Any, None]) -> Result:
    """What `reading` returns or raises. `writing` goes on as long; when it ends before, that ends the stream, too.

    A stream whose writer died looks well from its reader, and would be kept for good. Raises what `writing` raised, or
    ConnectionError when it just ended.
    """
    reader, writer = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():  # the end of a call is seen by both, and only the reader is told its reason
            await asyncio.wait({reader}, timeout=REASON_SECONDS)
        if not reader.done():
            writer.result()
            raise ConnectionError("nothing more can be said on this stream")
        return reader.result()
    finally:
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
