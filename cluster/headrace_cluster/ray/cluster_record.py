"""What outlives the controllers of a cluster: a record in Ray's GCS."""

import msgspec

from headrace_cluster.core.words import Lease, Words
from headrace_cluster.ray import private


class ClusterRecord:
    """The record of one cluster. Every call blocks, and raises an error of Ray when the GCS does not answer."""

    def __init__(self, cluster: str) -> None:
        self._words_key, self._lease_key = f"{cluster}/words", f"{cluster}/lease"
        self._renewal_key = f"{cluster}/renewal"

    def words(self) -> Words:
        """As the last controller kept them; empty without one."""
        encoded = private.get_value(self._words_key)
        return msgspec.msgpack.decode(encoded, type=Words) if encoded else Words()

    def save_words(self, words: Words) -> None:
        """Replaces them."""
        private.put_value(self._words_key, msgspec.msgpack.encode(words))

    def lease(self) -> Lease | None:
        """The lease of the controller that acts; None without a lease."""
        encoded = private.get_value(self._lease_key)
        return msgspec.msgpack.decode(encoded, type=Lease) if encoded else None

    def save_lease(self, lease: Lease) -> None:
        """From now on its controller acts."""
        private.put_value(self._lease_key, msgspec.msgpack.encode(lease))

    def renew(self, lease: Lease, number: int) -> None:
        """The controller with this lease acts still. number: another one each time."""
        private.put_value(self._renewal_key, f"{lease.id} {number}".encode())

    def renewal(self, lease: Lease) -> bytes:
        """Changes while the controller with this lease acts; empty if it never did."""
        found = private.get_value(self._renewal_key) or b""
        return found if found.startswith(f"{lease.id} ".encode()) else b""

    def remove(self) -> None:
        """The cluster has ended: the lease stays, held by none, so that a controller that was paused ends."""
        found = self.lease()
        self.save_lease(Lease(id="", epoch=found.epoch if found else 1))
        for key in (self._words_key, self._renewal_key):
            private.delete_value(key)
