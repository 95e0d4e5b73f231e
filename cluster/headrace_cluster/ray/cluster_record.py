"""What outlives controller and keeper of a cluster: a record in the key-value store of Ray's GCS.

The keeper is the process that starts a controller and watches it: `serve` or `headrace controller`.
"""

import msgspec
from ray.experimental import internal_kv

from headrace_cluster.core.snapshot import ControllerSnapshot, Keeper

_SPACE = b"headrace"


class ClusterRecord:
    """Of one cluster. Every call blocks, and raises an error of Ray when the GCS does not answer."""

    def __init__(self, cluster: str) -> None:
        self._snapshot_key = f"{cluster}/snapshot".encode()
        self._keeper_key = f"{cluster}/keeper".encode()

    def snapshot(self) -> ControllerSnapshot | None:
        """The last controller's; None without an earlier one."""
        encoded = internal_kv._internal_kv_get(self._snapshot_key, namespace=_SPACE)
        return msgspec.msgpack.decode(encoded, type=ControllerSnapshot) if encoded else None

    def save_snapshot(self, snapshot: ControllerSnapshot) -> None:
        """Replaces the snapshot."""
        internal_kv._internal_kv_put(self._snapshot_key, msgspec.msgpack.encode(snapshot), namespace=_SPACE)

    def keeper(self) -> Keeper | None:
        """The process that last took over the cluster; None without one."""
        encoded = internal_kv._internal_kv_get(self._keeper_key, namespace=_SPACE)
        return msgspec.msgpack.decode(encoded, type=Keeper) if encoded else None

    def save_keeper(self, keeper: Keeper) -> None:
        """Replaces the keeper."""
        internal_kv._internal_kv_put(self._keeper_key, msgspec.msgpack.encode(keeper), namespace=_SPACE)

    def remove(self) -> None:
        """The cluster has ended."""
        for key in (self._snapshot_key, self._keeper_key):
            internal_kv._internal_kv_del(key, namespace=_SPACE)
