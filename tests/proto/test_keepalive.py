"""Both ends of an internal connection detect that the other one is silent: nothing closes it when a machine is lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace_base.cluster_member import PAUSE_SECONDS, PING_SECONDS, SERVER, WATCH_REPLY_SECONDS, WATCHER
from support.integration.one_way_cut import OneWayCut

CLIENT_SECONDS = 2.0 * (PING_SECONDS + WATCH_REPLY_SECONDS)
SERVER_SECONDS = 1.25 * (PING_SECONDS + PAUSE_SECONDS)  # gRPC's own limit of a ping is a minute


@pytest.mark.faults("router")
def test_a_silent_peer_is_detected_by_both_ends() -> None:
    """A stream on which the client sends nothing: TCP reports no error of it."""

    async def scenario() -> dict[str, float]:
        ended: dict[str, float] = {}
        server_ended = asyncio.Event()

        async def serve(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"message"
                    await asyncio.sleep(0.2)
            finally:
                ended["server"] = time.monotonic()
                server_ended.set()

        server = grpc.aio.server(options=SERVER)
        handler = grpc.method_handlers_generic_handler("test", {"Watch": grpc.unary_stream_rpc_method_handler(serve)})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        cut = OneWayCut(f"127.0.0.1:{port}")
        try:
            async with grpc.aio.insecure_channel(cut.address, options=WATCHER) as channel:
                watch: Any = channel.unary_stream("/test/Watch")
                stream = watch(b"")
                assert await stream.read() == b"message"
                cut.cut("to the replica")
                cut.cut("to the router")
                began = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError):
                    async with asyncio.timeout(CLIENT_SECONDS):
                        while True:
                            await stream.read()
                ended["client"] = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SERVER_SECONDS):
                        await server_ended.wait()
        finally:
            cut.close()
            await server.stop(0)
        return {end: at - began for end, at in ended.items()}

    ended = asyncio.run(scenario())
    print({end: f"{seconds:.1f} s" for end, seconds in ended.items()})
    assert ended.keys() == {"client", "server"}, "the other end would wait for ever"
    assert ended["server"] > PAUSE_SECONDS, "a router that is paused keeps its streams"
