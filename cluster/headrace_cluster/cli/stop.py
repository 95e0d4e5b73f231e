"""`headrace stop`: asks the owner of a cluster to end it, and waits until it did."""

import signal
import time

from headrace_cluster import state
from headrace_cluster.cli.client import AdminClient, ServerError
from headrace_cluster.display import say
from headrace_cluster.errors import NotRunningError


def stop_server(admin_port: int, wait_seconds: float) -> None:
    """Raises NotRunningError when there is nothing to stop, ServerError when it does not end in time."""
    running = state.load(admin_port)
    if running is not None:
        # Works even when the controller does not answer.
        running.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + wait_seconds
        while running.process.alive:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"process {running.pid} has not ended within {wait_seconds:g} s; `kill -9 {running.pid}` ends it "
                    "and all that it started"
                )
            time.sleep(0.05)
        say("stopped")
        return
    client = AdminClient(admin_port)  # raises NotRunningError without a key
    client.call("POST", "/stop")
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            client.call("GET", "/status")
        except NotRunningError:
            say("stopped")
            return
    raise ServerError(f"the cluster has not ended within {wait_seconds:g} s; see `headrace status`")
