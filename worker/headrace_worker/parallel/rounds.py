"""Questions that every rank answers and whose answers every rank hears."""

from headrace_worker.parallel.meeting import Noticeboard


class Rounds:
    """One series of questions: all ranks ask the same ones in the same order. Of one thread at a time.

    Series of different names do not mix, so that two threads of a rank may each be in the middle of one.
    """

    def __init__(self, board: Noticeboard, name: str, rank: int, size: int) -> None:
        self._board = board
        self._name = name
        self._rank = rank
        self._size = size
        self._asked = 0

    def say(self, answer: str) -> list[str]:
        """What each rank says, in rank order. Waits for all, but not for the lost: raises RankLostError."""
        self._asked += 1
        self._board.post(f"{self._name}-{self._asked}-{self._rank}", answer)
        return [self._board.read(f"{self._name}-{self._asked}-{rank}") for rank in range(self._size)]
