"""`headrace stop`: requests the stop of a cluster, and waits until it has ended."""

import signal
import time

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import NotRunningError, ServerError
from headrace_cluster.launch.display import show_message
from headrace_cluster.launch.signals import SAME_SECONDS, STOP_ALL
from headrace_cluster.local.state import ServeState
from headrace_cluster.program import program_name
from headrace_proto.quantities import counted

CLOSE_SECONDS = 35.0  # for replicas, controller and Ray to end after the last request
POLL_SECONDS = 1.0  # of the requests in flight


def stop_server(choice: ServerChoice, wait_seconds: float | None, *, now: bool = False) -> None:
    """Raises NotRunningError when there is nothing to stop, ServerError when it does not end in time.

    wait_seconds: none = the server's time for requests in flight + CLOSE_SECONDS. now: requests end with an error.
    """
    client = AdminClient(choice)
    running = client.state
    if running is not None:
        wait_seconds = running.shutdown_seconds + CLOSE_SECONDS if wait_seconds is None else wait_seconds
        _stop_process(client, running, wait_seconds, now)
        show_message("stopped")
        return
    client.call("POST", "/stop")
    wait_seconds = CLOSE_SECONDS if wait_seconds is None else wait_seconds
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            client.call("GET", "/status")
        except NotRunningError:
            show_message("stopped")
            return
    raise ServerError(f"the cluster has not ended within {wait_seconds:g} s; see `{program_name()} status`")


def _stop_process(client: AdminClient, running: ServeState, wait_seconds: float, now: bool) -> None:
    """Stops it by a signal: this works even when the controller does not answer."""
    request = STOP_ALL if running.detaches else signal.SIGTERM
    running.process.signal(request)
    began = time.monotonic()
    next_poll, next_signal, shown = began, began + SAME_SECONDS + 0.1, ""
    while running.process.alive:
        if now and time.monotonic() > next_signal:  # repeated until it ends: one within SAME_SECONDS does not count
            next_signal = time.monotonic() + 2 * SAME_SECONDS
            running.process.signal(request)
        if time.monotonic() > began + wait_seconds:
            raise ServerError(
                f"process {running.pid} has not ended within {wait_seconds:g} s; "
                f"`{program_name()} stop --now` ends it sooner, "
                f"`kill -9 {running.pid}` in any case"
            )
        if not now and time.monotonic() > next_poll:
            next_poll = time.monotonic() + POLL_SECONDS
            line = _progress(client, running)
            if line and line != shown:
                show_message(line)
            shown = line
        time.sleep(0.05)


def _progress(client: AdminClient, running: ServeState) -> str:
    """The requests that the server waits for; empty without any, or when it does not answer."""
    try:
        replicas = client.call("GET", "/status")["replicas"]
    except (NotRunningError, ServerError):
        return ""
    builds = [build for entry in replicas for build in (entry, *entry.get("beside", ()))]
    count = sum(build["load"]["running"] + build["load"]["waiting"] for build in builds)
    if not count:
        return ""
    return f"{counted(count, 'request')} in flight: up to {running.shutdown_seconds:g} s to finish"
