"""One replica at a time is ended to be built again, by an operator or by the controller. Pure."""

from collections.abc import Iterable, Mapping

from headrace_cluster.core.record import Record, State
from headrace_cluster.core.surges import Surges


def roll_obstacle(records: Iterable[Record], surges: Surges) -> str:
    """Why no replica beside these may end now to be built again, in a sentence; empty: all of them serve.

    Those that an operator drained do not count: they stay as they are.
    """
    for record in records:
        if surges.builds_of(record) or record.rolling:
            return f"{record.replica_id} is being rolled; try again when it is ready"
        if record.held:
            continue
        if record.state is not State.READY:
            return f"{record.replica_id} is {record.state}; try again when it is ready"
        if record.connected is None:
            return f"not every router is connected to {record.replica_id} yet; try again in a few seconds"
    return ""


def next_outdated(records: Mapping[str, Record], surges: Surges) -> str | None:
    """The replica that the spec describes differently, and that is to be built again now; None while it must wait.

    One whose next build did not start stays as it is: a spec that cannot run replaces nothing.
    """
    if roll_obstacle(records.values(), surges):
        return None
    outdated = (record.replica_id for record in records.values() if record.outdated and not record.held)
    return next((replica_id for replica_id in outdated if replica_id not in surges.failed), None)
