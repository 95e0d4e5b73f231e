"""A TCP proxy whose two directions can be cut one by one: no bytes pass, and no connection is closed."""

import asyncio
import contextlib
import threading
from typing import Literal

Direction = Literal["to the replica", "to the router"]


class OneWayCut:
    """Forwards connections from `address` to a target."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._passing: dict[Direction, asyncio.Event] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    def cut(self, direction: Direction) -> None:
        self._loop.call_soon_threadsafe(self._passing[direction].clear)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _listen(self) -> str:
        for direction in ("to the replica", "to the router"):
            self._passing[direction] = asyncio.Event()
            self._passing[direction].set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        await asyncio.gather(
            self._forward(reader, far_writer, "to the replica"), self._forward(far_reader, writer, "to the router")
        )

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sink):
            while data := await source.read(1 << 16):
                await self._passing[direction].wait()
                sink.write(data)
                await sink.drain()
            await self._passing[direction].wait()

    async def _close(self) -> None:
        self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
