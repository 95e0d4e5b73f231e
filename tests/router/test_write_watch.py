"""How much a client must read in how long: bytes that it has read count, not those that happen to be buffered."""

import asyncio
from collections.abc import Callable

import pytest

from headrace_router.api.http.write_watch import PROGRESS_BYTES, WriteWatch

PERIOD = 0.05


class FakeTransport:
    """Its client reads when `read` is called."""

    def __init__(self) -> None:
        self.buffered = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.buffered += len(data)

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True

    def read(self, size: int) -> None:
        self.buffered = max(0, self.buffered - size)


def is_aborted(periods: int, each: Callable[[FakeTransport, WriteWatch], None], written: int) -> bool:
    """After so many periods, in the middle of each of which `each` is called."""

    async def run() -> bool:
        transport = FakeTransport()
        watch = WriteWatch(transport, PERIOD)
        watch.write(bytes(written))
        await asyncio.sleep(PERIOD / 2)
        for _ in range(periods):
            each(transport, watch)
            await asyncio.sleep(PERIOD)
        watch.stop()
        return transport.aborted

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("written", "read", "aborted"),
    [
        (10 * PROGRESS_BYTES, 2 * PROGRESS_BYTES, False),
        (10 * PROGRESS_BYTES, PROGRESS_BYTES // 4, True),
        (10, 10, False),
        (10, 0, True),
        (0, 0, False),
    ],
)
def test_a_client_must_read_on(written: int, read: int, aborted: bool) -> None:
    assert is_aborted(4, lambda transport, _: transport.read(read), written) == aborted


def test_a_client_that_reads_everything_may_have_much_buffered_at_the_end_of_a_period() -> None:
    """Answers on one connection: what was buffered when the period began was read long ago."""

    def answer(transport: FakeTransport, watch: WriteWatch) -> None:
        transport.read(1 << 30)
        watch.write(bytes(50_000))

    assert not is_aborted(6, answer, 50_000)


def test_a_client_that_reads_down_to_a_rest_must_read_the_rest() -> None:
    """The transport resumes writing then; the watch goes on."""
    turns = 0

    def read_down(transport: FakeTransport, watch: WriteWatch) -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            transport.read(3 * PROGRESS_BYTES - 1000)

    assert is_aborted(5, read_down, 3 * PROGRESS_BYTES)
