"""In which order adopted builds that the spec describes differently are replaced: one at a time, drained. Pure."""

from collections.abc import Mapping

from headrace_cluster.core.record import Record, State
from headrace_cluster.core.surges import Surges


def next_outdated(records: Mapping[str, Record], surges: Surges) -> str | None:
    """The replica that is to be built again now; None while any other one is not ready, or not connected to routers.

    One whose next build did not start stays as it is: a spec that cannot run replaces nothing.
    """
    if surges.leaving or any(surges.following(record) is not None for record in records.values()):
        return None
    counted = [record for record in records.values() if not record.held]
    if any(record.state is not State.READY or record.rolling or record.connected is None for record in counted):
        return None
    waiting = (record.replica_id for record in counted if record.outdated and record.replica_id not in surges.failed)
    return next(waiting, None)
