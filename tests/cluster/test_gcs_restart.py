"""After a lost GCS of our own Ray: another one, with pauses between attempts. The clock is a number."""

import errno
import os
from pathlib import Path

import pytest

from headrace_cluster.ray.gcs_restart import BACKOFF, RESERVED_BYTES, STABLE_SECONDS, GcsRestart, reserve_space


class _Bench:
    """A GCS that is dead or alive, and the times of its starts."""

    def __init__(self, *, startable: bool = True) -> None:
        self.now = 50.0
        self.dead = False
        self.startable = startable
        self.starts: list[float] = []
        self.space = True  # on disk
        self.reserves: list[float] = []
        self.restart = GcsRestart(lambda: self.dead, self._start, self._reserve, lambda: self.now, lambda: 0.0)

    def _start(self) -> None:
        self.starts.append(self.now)
        if not self.startable:
            raise OSError("no memory")
        self.dead = False

    def _reserve(self) -> bool:
        self.reserves.append(self.now)
        return self.space

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


def test_space_is_reserved_again_once_the_next_one_has_run_for_a_minute() -> None:
    """A start uses the space that was reserved: without another reserve the next one would have none."""
    bench = _Bench()
    bench.wait(200)
    assert bench.reserves == [], "it is reserved since the start of Ray"
    for _ in range(2):
        bench.dead = True
        bench.wait(STABLE_SECONDS / 2)
    last = bench.starts[-1]
    bench.wait(200)
    assert bench.reserves == [last + STABLE_SECONDS]
    bench.dead, bench.space = True, False
    bench.wait(3 * STABLE_SECONDS + 1)
    assert [when - bench.starts[-1] for when in bench.reserves[1:]] == [60.0, 120.0, 180.0], "on a full disk again"


def test_a_reserve_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reserve_space(tmp_path)
    (reserved,) = tmp_path.iterdir()
    assert reserved.stat().st_size == RESERVED_BYTES

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not reserve_space(tmp_path) and list(tmp_path.iterdir()) == []
    assert not reserve_space(tmp_path / "removed")
