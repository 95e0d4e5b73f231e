"""How much of the time between two passes was a pause of this process, in which it received nothing. Pure."""

from collections import deque

PAUSE_SECONDS = 1.0  # between two passes: a longer time may be a pause
COMPARED_PASSES = 10


class Pauses:
    """Compares the time between two passes with the last ones: a slow process receives messages, a stopped one none."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque([0.0], maxlen=COMPARED_PASSES)

    def pause(self, gap: float) -> float:
        """Seconds of the pause in a time between two passes: what exceeds the longest of the last ones."""
        usual = max(self._gaps)
        self._gaps.append(gap)
        return gap - usual if gap > max(PAUSE_SECONDS, usual) else 0.0
