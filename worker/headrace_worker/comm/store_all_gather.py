"""All-gather of short strings through the rendezvous store."""

from headrace_worker.comm.rendezvous import RendezvousStore


class StoreAllGather:
    """One sequence of all-gathers: all ranks call them in the same order, each rank on one thread at a time.

    Sequences with different names are independent, so that two threads of a rank may each use one.
    """

    def __init__(self, store: RendezvousStore, name: str, rank: int, size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._round = 0

    def gather(self, value: str) -> list[str]:
        """The value of each rank, in rank order. Waits for all ranks; raises RankLostError when one is lost."""
        self._round += 1
        self._store.set(self._key(self._round, self._rank), value)
        values = [self._store.read(self._key(self._round, rank)) for rank in range(self._size)]
        for rank in range(self._size):  # each rank has begun this round, and so has read all of the last one
            self._store.delete_key(self._key(self._round - 1, rank))
        return values

    def _key(self, round_number: int, rank: int) -> str:
        return f"{self._name}-{round_number}-{rank}"
