"""An HTTP server on one socket, started and stopped by the router and not by signals."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from headrace_router.config import RouterConfig
from headrace_router.http.protocol import bounded_protocol

KEEP_ALIVE_CONNECTION_SECONDS = 75


class HttpDoor:
    """Serves one application. Of one event loop."""

    def __init__(self, app: ASGIApp, listening: socket.socket, config: RouterConfig) -> None:
        self.port = int(listening.getsockname()[1])
        self._grace = config.shutdown_seconds
        options = uvicorn.Config(
            app,
            http=bounded_protocol(config.limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=max(1, round(config.shutdown_seconds)),
        )
        self._server = _QuietServer(options)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop(self) -> None:
        """No new connections; requests in flight get their time."""
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=self._grace + 2)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task})


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
