"""An HTTP server on one socket; the router, not a signal, starts and stops it."""

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from headrace_router.api.http.protocol import BoundedProtocol
from headrace_router.core.limits import Limits

QUIET_POLL_SECONDS = 0.02
ABORT_SECONDS = 1.0  # for requests to end after their connection was aborted


def http_config(
    app: ASGIApp, limits: Limits, tls: ssl.SSLContext | None, *, stop_seconds: int | None = None
) -> uvicorn.Config:
    """uvicorn's settings: our bounds, no access log, no lifespan.

    tls: None = plain HTTP. stop_seconds: for requests in flight when the server stops; None = without a limit.
    """
    return uvicorn.Config(
        app,
        http=type("LimitedProtocol", (BoundedProtocol,), {"limits": limits}),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        loop="asyncio",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        # uvicorn declares whole seconds, and hands them to call_later.
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=stop_seconds,
    )


class HttpServer:
    """Serves one application. Of one event loop."""

    def __init__(
        self, app: ASGIApp, listening: socket.socket, limits: Limits, tls: ssl.SSLContext | None = None
    ) -> None:
        """tls: None = plain HTTP."""
        self.port = int(listening.getsockname()[1])
        self._server = _QuietServer(http_config(app, limits, tls))
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop_listening(self) -> None:
        """Accepts no new connections; those that wait to be accepted still are."""
        for server in self._server.servers:
            waiting = select.poll()
            for listening in server.sockets:
                waiting.register(listening.fileno(), select.POLLIN)
            while waiting.poll(0):  # noqa: ASYNC110  # the event loop accepts them
                await asyncio.sleep(0)
            server.close()  # without a pause since: closing a socket resets what waits there

    async def quiet(self, seconds: float) -> None:
        """Waits until no connection is open, or none has had a request for these seconds."""
        loop, state = asyncio.get_running_loop(), self._server.server_state
        since = loop.time()
        while state.connections and loop.time() - since < seconds:
            await asyncio.sleep(QUIET_POLL_SECONDS)
            if state.tasks:
                since = loop.time()

    async def stop(self, seconds: float) -> None:
        """Accepts no new connections; responses get `seconds` to reach their clients, then connections are aborted."""
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=seconds)
        if not done:
            # uvicorn would cancel the requests itself, and log each of them as a failure with its traceback.
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            done, _ = await asyncio.wait({self._task}, timeout=ABORT_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task})


class _QuietServer(uvicorn.Server):
    """Without uvicorn's signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
