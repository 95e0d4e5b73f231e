"""Sums and gathers through shared memory, between real processes."""

import contextlib
import ctypes
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace_kernels.cpu.exchange import ABORTED, Exchange, segment_bytes
from headrace_kernels.cpu.library import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason="no compiled kernels")

SLOT = 4096  # 1,024 floats


class Shared:
    """Anonymous memory that child processes share."""

    def __init__(self, size: int, state_bytes: int = SLOT) -> None:
        self.size, self.state_bytes = size, state_bytes
        self.mapping = mmap.mmap(-1, segment_bytes(size, state_bytes))
        self._pinned = ctypes.c_char.from_buffer(self.mapping)
        self.address = ctypes.addressof(self._pinned)

    def exchange(self, rank: int, timeout_ms: int = 30_000) -> Exchange:
        return Exchange(self.address, rank, self.size, self.state_bytes, timeout_ms)


def in_processes(size: int, run_rank: Callable[[int], None]) -> None:
    """Runs `run_rank(rank)` in a forked process per rank, rank 0 in this one."""
    children = []
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            status = 1
            torch.set_num_threads(1)  # a thread pool does not survive a fork
            with contextlib.suppress(BaseException):
                run_rank(rank)
                status = 0
            os._exit(status)
        children.append(pid)
    try:
        run_rank(0)
    except BaseException:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
    assert statuses == [0] * (size - 1)


def part(rank: int, count: int, round_number: int = 0) -> torch.Tensor:
    """A rank's tensor [count]: known to all ranks, of very different magnitudes, so that the order of sums matters."""
    generator = torch.Generator().manual_seed(1000 * round_number + rank)
    scale = 10.0 ** torch.randint(-6, 7, (count,), generator=generator)
    return torch.randn(count, generator=generator) * scale


def sequential(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    return total


COUNTS = (0, 1, 3, 576, 1023, 1024, 1025, 2048, 2049, 10_000)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_adding_in_rank_order_on_every_rank(size: int) -> None:
    shared = Shared(size)

    def run_rank(rank: int) -> None:
        exchange = shared.exchange(rank)
        for round_number, count in enumerate(COUNTS * 3):
            parts = [part(other, count, round_number) for other in range(size)]
            mine = parts[rank].clone()
            assert exchange.sum(mine) == 0
            assert torch.equal(mine.view(torch.int32), sequential(parts).view(torch.int32))

    in_processes(size, run_rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64])
def test_gathers_return_the_bytes_of_all_ranks(size: int, dtype: torch.dtype) -> None:
    shared = Shared(size)

    def run_rank(rank: int) -> None:
        exchange = shared.exchange(rank)
        for round_number, count in enumerate(COUNTS):
            parts = [(part(other, count, round_number) * 100).clamp(0, 200).to(dtype) for other in range(size)]
            out = torch.full((size, count), 7, dtype=dtype)
            assert exchange.gather(parts[rank], out) == 0
            assert torch.equal(out, torch.stack(parts))

    in_processes(size, run_rank)


@pytest.mark.faults("ranks")
@pytest.mark.parametrize(("size", "rounds"), [(2, 8000), (3, 2000), (4, 1000)])
def test_thousands_of_exchanges_with_random_delays(size: int, rounds: int) -> None:
    """Small ones and ones of several slots, sums and gathers, early and late ranks: nothing is lost or reordered."""
    shared = Shared(size)

    def run_rank(rank: int) -> None:
        exchange, dice, own = shared.exchange(rank), random.Random(5), random.Random(rank)
        ranks = torch.arange(size, dtype=torch.float32)
        for round_number in range(rounds):
            count = dice.choice((1, 16, 576, 1024, 1500, 3000))
            if own.random() < 0.02:
                time.sleep(own.random() * 0.003)
            mine = torch.full((count,), float(round_number + rank))
            if dice.random() < 0.5:
                assert exchange.sum(mine) == 0
                assert (mine == float((round_number + ranks).sum())).all()
            else:
                out = torch.empty((size, count))
                assert exchange.gather(mine, out) == 0
                assert (out == (round_number + ranks).unsqueeze(1)).all()

    in_processes(size, run_rank)


def test_the_count_of_chunks_may_wrap() -> None:
    shared = Shared(2)
    start = 2**32 - 5
    for rank in range(2):  # as after so many exchanged chunks
        ctypes.c_uint32.from_address(shared.address + 64 * (2 + rank)).value = start

    def run_rank(rank: int) -> None:
        exchange = shared.exchange(rank)
        exchange._sequence.value = start
        for _ in range(20):
            mine = torch.full((10,), 1.0 + rank)
            assert exchange.sum(mine) == 0
            assert (mine == 3).all()

    in_processes(2, run_rank)


@contextlib.contextmanager
def waiting(exchange: Exchange) -> Iterator[list[int]]:
    """A thread that waits in a sum; its status when it has ended."""
    ended: list[int] = []

    def wait() -> None:
        ended.append(exchange.sum(torch.ones(5)))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert not ended, "it should wait"
    yield ended
    thread.join(30)


def test_an_abort_ends_all_waits_and_all_later_ones() -> None:
    shared = Shared(3)
    others = [shared.exchange(rank) for rank in range(3)]
    with waiting(others[0]) as first, waiting(others[1]) as second:
        others[2].abort()
    assert first == second == [ABORTED]
    assert others[2].sum(torch.ones(5)) == ABORTED
    assert others[0].gather(torch.ones(5), torch.ones(3, 5)) == ABORTED


def test_a_timeout_names_the_absent_rank() -> None:
    shared = Shared(3)
    with waiting(shared.exchange(0, timeout_ms=600)) as first, waiting(shared.exchange(1, timeout_ms=500)) as second:
        pass
    assert first == second == [1 + 2]
