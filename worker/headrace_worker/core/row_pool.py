"""Allocation of the rows of a step's buffers."""


class RowPool:
    """Allocates row numbers. Each use of a row has a number, so that data of an earlier use is recognized."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._uses = [0] * count
        self.freed: list[int] = []  # since the last planned step: the next plan passes them to the runner

    def __bool__(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def allocate(self) -> tuple[int, int]:
        """Returns (row, the number of this use). Raises IndexError when none is free."""
        row = self._free.pop()
        self._uses[row] += 1
        return row, self._uses[row]

    def release(self, row: int) -> None:
        self._free.append(row)
        self.freed.append(row)

    def clear_freed(self) -> None:
        """The freed rows are in a plan now."""
        self.freed = []

    def check(self, held: list[int]) -> None:
        """Raises RuntimeError unless every row is either free or held, once."""
        if sorted(held + self._free) != list(range(len(self._uses))):
            raise RuntimeError("rows are lost or held twice")
