"""`headrace drain` and `headrace undrain`: ask, then look until it is done."""

import json
import time
from collections.abc import Callable
from typing import Any

from headrace_cluster.cli.client import AdminClient, ServerError
from headrace_cluster.display import say

LOOK_SECONDS = 0.25
STOP_SECONDS = 60.0  # beyond the time for requests: to move what is left and to end the processes
START_SECONDS = 1800.0  # to load a model again

Entry = dict[str, Any]


def drain_replica(
    admin_port: int, replica: str, seconds: float | None, *, force: bool = False, as_json: bool = False
) -> None:
    """Returns once the replica is drained. Raises NotRunningError; ServerError with the sentence of the refusal."""
    entry = await_drained(AdminClient(admin_port), replica, seconds, force=force)
    _tell(entry, f"{replica} is drained; bring it back with: headrace undrain {replica}", as_json=as_json)


def undrain_replica(admin_port: int, replica: str, *, as_json: bool = False) -> None:
    """Returns once the replica is ready again. Raises NotRunningError, ServerError."""
    _tell(await_ready(AdminClient(admin_port), replica), f"{replica} is ready", as_json=as_json)


def await_drained(client: AdminClient, replica: str, seconds: float | None, *, force: bool = False) -> Entry:
    """Orders a drain, and its entry of the status when it is done. Raises ServerError."""
    body = {"replica": replica, "seconds": seconds, "force": force}
    order = client.call("POST", "/drain", {name: value for name, value in body.items() if value is not None})

    def done(entry: Entry) -> bool:
        if entry["state"] != "drained" and entry["generation"] != order["generation"]:
            raise ServerError(f"{replica} was brought back while it was drained; see `headrace status`")
        return bool(entry["state"] == "drained")

    return _watch(client, replica, done, _in_flight, order["seconds"] + STOP_SECONDS)


def await_ready(client: AdminClient, replica: str) -> Entry:
    """Has a drained replica built again, and its entry of the status when it is ready. Raises ServerError."""
    order = client.call("POST", "/undrain", {"replica": replica})

    def done(entry: Entry) -> bool:
        again = entry["generation"] > order["generation"]
        if entry["state"] == "drained" or (again and entry["state"] == "dead"):
            why = f": {entry['note']}" if entry["note"] else ""
            raise ServerError(f"{replica} is {entry['state']}{why}")
        return bool(again and entry["state"] == "ready")

    return _watch(client, replica, done, lambda entry: f"{entry['state']}: {entry['note']}", START_SECONDS)


def _watch(
    client: AdminClient, replica: str, done: Callable[[Entry], bool], shown: Callable[[Entry], str], seconds: float
) -> Entry:
    """The replica's entry of the status once `done`; says what changes meanwhile."""
    told = ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        entries = client.call("GET", "/status")["replicas"]
        entry: Entry | None = next((entry for entry in entries if entry["id"] == replica), None)
        if entry is None:
            raise ServerError(f"{replica} is gone: the server is stopping")
        if done(entry):
            return entry
        if (news := shown(entry)) != told:
            say(f"{replica}: {news}")
            told = news
        time.sleep(LOOK_SECONDS)
    raise ServerError(f"{replica} is not done after {seconds:g} s; see `headrace status`")


def _in_flight(entry: Entry) -> str:
    load = entry["load"]
    return f"{entry['state']}, {load['running']} running, {load['waiting']} waiting"


def _tell(entry: Entry, sentence: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry, indent=2))
    else:
        say(sentence)
