"""`headrace stop`: requests the stop of a cluster, and waits until it has ended."""

import signal
import time
from typing import Annotated

import typer

from headrace_cluster.cli import options as o
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import NotRunningError, ServerError
from headrace_cluster.launch.display import show_message
from headrace_cluster.launch.signals import SAME_SECONDS, STOP_ALL
from headrace_cluster.program import program_name

CLOSE_SECONDS = 35.0  # for replicas, controller and Ray to end after the last request

app = typer.Typer(rich_markup_mode=None)


@app.command()
@o.takes_server(named=True)
def stop(
    choice: ServerChoice,
    wait: Annotated[
        float | None, typer.Option("--wait", min=0, help="Seconds to wait for the end. [default: as the server needs]")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="End requests in flight with an error, at once.")] = False,
) -> None:
    """Stop a running server, in order: requests in flight finish first."""
    client = AdminClient(choice)
    server = client.state
    seconds = CLOSE_SECONDS + (server.shutdown_seconds if server is not None else 0.0) if wait is None else wait

    def is_running() -> bool:
        return server.process.alive if server is not None else _answers(client)

    def request_stop() -> None:
        if server is None:
            client.call("POST", "/stop")
        else:  # a signal works even when the controller does not answer
            server.process.signal(STOP_ALL if server.detaches else signal.SIGTERM)

    request_stop()
    if server is not None and not now:
        show_message(f"stopping; requests in flight have up to {server.shutdown_seconds:g} s to finish")
    began = signalled = time.monotonic()
    while is_running():
        if time.monotonic() > began + seconds:
            kill = f", `kill -9 {server.pid}` in any case" if server is not None else ""
            sentence = f"the server has not ended within {seconds:g} s"
            raise ServerError(f"{sentence}; `{program_name()} stop --now` ends it sooner{kill}")
        # Repeated until the server ends: a signal within SAME_SECONDS of another one does not count.
        if now and server is not None and time.monotonic() > signalled + SAME_SECONDS + 0.1:
            signalled = time.monotonic()
            request_stop()
        time.sleep(0.05)
    show_message("stopped")


def _answers(client: AdminClient) -> bool:
    try:
        client.call("GET", "/status")
    except NotRunningError:
        return False
    return True
