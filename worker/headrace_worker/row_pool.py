"""The rows of a step's buffers, and who may use them."""


class RowPool:
    """Hands out row numbers. Each use of a row has a generation: nothing of an earlier one is mistaken for its own."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._generations = [0] * count
        self.given_back: list[int] = []  # since the last step that was planned: the next one tells the runner

    def __bool__(self) -> bool:
        """Whether one is free."""
        return bool(self._free)

    def take(self) -> tuple[int, int]:
        """(row, its generation). Raises IndexError when none is free."""
        row = self._free.pop()
        self._generations[row] += 1
        return row, self._generations[row]

    def give_back(self, row: int) -> None:
        self._free.append(row)
        self.given_back.append(row)

    def told(self) -> None:
        """A step carries what was given back so far."""
        self.given_back = []

    def check(self, held: list[int]) -> None:
        """Raises RuntimeError unless every row is either free or held, once."""
        if sorted(held + self._free) != list(range(len(self._generations))):
            raise RuntimeError("rows are lost or held twice")
