"""After a lost GCS of our own Ray: another one, with pauses between attempts. The clock is a number."""

from headrace_cluster.ray.local_ray import BACKOFF, STABLE_SECONDS, GcsRestart


class _Bench:
    """A GCS that is dead or alive, and the times of its starts."""

    def __init__(self, *, startable: bool = True) -> None:
        self.now = 50.0
        self.dead = False
        self.startable = startable
        self.starts: list[float] = []
        self.restart = GcsRestart(lambda: self.dead, self._start, lambda: self.now, lambda: 0.0)

    def _start(self) -> None:
        self.starts.append(self.now)
        if not self.startable:
            raise OSError("no memory")
        self.dead = False

    def wait(self, seconds: float) -> list[str]:
        """What was done, with four polls per second."""
        found = []
        for _ in range(int(seconds * 4)):
            found.append(self.restart.poll())
            self.now += 0.25
        return [message for message in found if message]


def test_nothing_is_done_while_it_runs() -> None:
    bench = _Bench()
    assert bench.wait(100) == [] and bench.starts == []


def test_another_one_starts_at_once() -> None:
    bench = _Bench()
    bench.wait(10)
    bench.dead = True
    (message,) = bench.wait(1)
    assert "another one was started" in message and bench.starts == [60.0]


def test_failed_starts_are_repeated_without_end_with_growing_pauses() -> None:
    bench = _Bench(startable=False)
    bench.dead = True
    messages = bench.wait(600)
    pauses = [after - before for before, after in zip(bench.starts, bench.starts[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[0] == BACKOFF.first and pauses[-1] == BACKOFF.limit
    assert len(messages) == len(bench.starts) > 20 and all("OSError" in message for message in messages)


def test_one_that_ends_again_and_again_is_started_less_often() -> None:
    bench = _Bench()
    for _ in range(400):
        bench.dead = True
        bench.wait(0.25)
    assert len(bench.starts) < 10


def test_one_that_ran_for_long_is_replaced_at_once() -> None:
    bench = _Bench()
    for _ in range(400):
        bench.dead = True
        bench.wait(0.25)
    bench.dead = False
    bench.wait(BACKOFF.limit + STABLE_SECONDS + 1)
    bench.starts.clear()
    bench.dead = True
    bench.wait(1.5)
    assert len(bench.starts) == 1
    bench.dead = True
    bench.wait(1.5)
    assert len(bench.starts) == 2, "the pauses begin again"
