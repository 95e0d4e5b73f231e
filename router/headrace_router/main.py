"""The router process: `run` blocks until it is told to stop."""

import asyncio
import signal
import sys

from headrace_proto.errors import HeadraceError
from headrace_router.config import RouterConfig
from headrace_router.logs import configure_logs
from headrace_router.server import RouterServer


def run(config: RouterConfig) -> int:
    """Runs one router until SIGTERM or SIGINT. Returns the exit code: 0 stopped in order, 1 could not start.

    A second signal ends it at once. What went wrong is one sentence on stderr.
    """
    configure_logs(config.log_level, config.router_id)
    try:
        asyncio.run(_serve(config))
    except HeadraceError as error:
        print(f"headrace router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(config: RouterConfig) -> None:
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    server = RouterServer(config)
    await server.start()
    await told_to_stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)  # a second one ends the process
    await server.stop()
