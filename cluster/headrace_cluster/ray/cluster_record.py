"""What outlives the controllers of a cluster: a record in Ray's GCS."""

import msgspec

from headrace_cluster.core.words import Lease, Words
from headrace_cluster.ray import private


class ClusterRecord:
    """Of one cluster. Every call blocks, and raises an error of Ray when the GCS does not answer."""

    def __init__(self, cluster: str) -> None:
        self._words_key, self._lease_key = f"{cluster}/words", f"{cluster}/lease"

    def words(self) -> Words:
        """As the last controller kept them; empty without one."""
        encoded = private.get_value(self._words_key)
        return msgspec.msgpack.decode(encoded, type=Words) if encoded else Words()

    def save_words(self, words: Words) -> None:
        """Replaces them."""
        private.put_value(self._words_key, msgspec.msgpack.encode(words))

    def lease(self) -> Lease | None:
        """Of the controller that acts; None without one."""
        encoded = private.get_value(self._lease_key)
        return msgspec.msgpack.decode(encoded, type=Lease) if encoded else None

    def save_lease(self, lease: Lease) -> None:
        """From now on its controller acts."""
        private.put_value(self._lease_key, msgspec.msgpack.encode(lease))

    def remove(self) -> None:
        """The cluster has ended."""
        for key in (self._words_key, self._lease_key):
            private.delete_value(key)
