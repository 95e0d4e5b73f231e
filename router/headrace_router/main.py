"""The router process: `run` blocks until a signal stops it."""

import asyncio
import os
import resource
import signal

import structlog

from headrace_base.errors import HeadraceError
from headrace_base.logs import configure_logs
from headrace_router.config import END_REQUESTS, RouterConfig
from headrace_router.event_loop import exempt_from_collection, new_event_loop
from headrace_router.router_server import RouterServer

OTHER_FILES = 512  # open files of replicas, logs and libraries

log = structlog.get_logger("headrace.router")


def run(config: RouterConfig) -> int:
    """Runs one router until SIGTERM, SIGINT or SIGHUP. Returns the exit code: 0 stopped in order, 1 could not start.

    Requests in flight get `shutdown_seconds`; END_REQUESTS, or one more SIGINT, ends them at once. A repeated SIGTERM
    changes nothing: a service manager and `headrace serve` may both send one. A failure is logged as one sentence.
    """
    configure_logs(config.logs)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # `tokenize_threads` bounds the threads of tokenizing
    log.info("router starts", router=config.router_id)
    _allow_open_files(2 * config.limits.connections + OTHER_FILES)  # HTTP and gRPC
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(config))
    except HeadraceError as error:
        log.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _allow_open_files(wanted: int) -> None:
    """Raises the process's limit of open files, if it is lower, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            f"this process may open {allowed} files, but limits.connections needs {wanted}: raise `ulimit -Hn`, "
            "or lower limits.connections"
        )


async def _serve(config: RouterConfig) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = RouterServer(config)

    def stop() -> None:
        stopping.set()
        server.begin_stop()

    def end_requests() -> None:
        server.end_requests()
        stop()

    def interrupt() -> None:
        (end_requests if stopping.is_set() else stop)()

    loop.add_signal_handler(END_REQUESTS, end_requests)
    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        loop.add_signal_handler(signal.SIGHUP, stop)
    await server.start()
    exempt_from_collection()
    await server.serve_until(stopping)
