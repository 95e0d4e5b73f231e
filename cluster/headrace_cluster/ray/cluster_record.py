"""What outlives the controllers of a cluster: a record in Ray's GCS."""

import msgspec

from headrace_cluster.core.snapshot import ControllerSnapshot, Lease
from headrace_cluster.ray import private


class ClusterRecord:
    """Of one cluster. Every call blocks, and raises an error of Ray when the GCS does not answer."""

    def __init__(self, cluster: str) -> None:
        self._snapshot_key, self._lease_key = f"{cluster}/snapshot", f"{cluster}/lease"

    def snapshot(self) -> ControllerSnapshot | None:
        """The last controller's; None without an earlier one."""
        encoded = private.get_value(self._snapshot_key)
        return msgspec.msgpack.decode(encoded, type=ControllerSnapshot) if encoded else None

    def save_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Replaces the snapshot."""
        private.put_value(self._snapshot_key, msgspec.msgpack.encode(snapshot))

    def lease(self) -> Lease | None:
        """Of the controller that acts; None without one."""
        encoded = private.get_value(self._lease_key)
        return msgspec.msgpack.decode(encoded, type=Lease) if encoded else None

    def save_lease(self, lease: Lease) -> None:
        """From now on its controller acts."""
        private.put_value(self._lease_key, msgspec.msgpack.encode(lease))

    def remove(self) -> None:
        """The cluster has ended."""
        for key in (self._snapshot_key, self._lease_key):
            private.delete_value(key)
