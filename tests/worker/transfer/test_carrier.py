"""A carrier over wires that are queues: what it makes of chunks that are not the ones that are due."""

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_worker.config import Meeting
from headrace_worker.model.attention import LayerCache
from headrace_worker.transfer import carrier as module
from headrace_worker.transfer.carrier import Carrier
from headrace_worker.transfer.orders import OpenPair, PairFailed, Receive, Received, Report, Send
from headrace_worker.transfer.shards import KvShards, RankShard, plan_routes

SHARDS = KvShards(4, 8, "float32", (0,), (RankShard(((0, 1),), (0, 2)),))


class QueueWire:
    """Both ends in one process."""

    lane: "queue.Queue[Tensor | None]"

    def __init__(self, *_: object) -> None:
        pass

    def send(self, piece: Tensor, to: int) -> None:
        self.lane.put(piece.clone())

    def finish(self, sending: None) -> None:
        pass

    def expect(self, piece: Tensor, source: int) -> Tensor:
        return piece

    def take(self, piece: Tensor) -> None:
        found = self.lane.get(timeout=10)
        assert found is not None
        piece.copy_(found)

    def close(self) -> None:
        pass


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Carrier, Tensor, list[Report]]]:
    """make(sends): an end of a pair, its pool [2, B, K, P, D] and what it reports."""

    class Wire(QueueWire):
        lane: "queue.Queue[Tensor | None]" = queue.Queue()

    monkeypatch.setattr(module, "Wire", Wire)

    def end(sends: bool) -> tuple[Carrier, Tensor, list[Report]]:
        pool = torch.randn(2, 8, 2, 4, 8) if sends else torch.zeros(2, 8, 2, 4, 8)
        caches: Any = {layer: LayerCache(0, pool, 0) for layer in (0, 1)}
        reports: list[Report] = []
        order = OpenPair(1, Meeting("", 1, 1, bytes(32)), 2, 0, 1, tuple(plan_routes(SHARDS, SHARDS)), sends)
        carrier = Carrier(order, 0, "127.0.0.1", SHARDS, caches, reports.append)
        carrier.start(None)
        return carrier, pool, reports

    return end


def _wait(reports: list[Report], count: int) -> None:
    end = time.monotonic() + 10
    while len(reports) < count:
        assert time.monotonic() < end, reports
        time.sleep(0.001)


def test_a_chunk_arrives(make: Callable[[bool], tuple[Carrier, Tensor, list[Report]]]) -> None:
    source, mine, _ = make(True)
    target, theirs, reports = make(False)
    source.put(Send(1, 7, 0, ((3, 5),)), None)
    target.put(Receive(1, 7, 0, (2,), ((6, 2),)), None)
    _wait(reports, 1)
    assert isinstance(reports[0], Received) and reports[0].good
    assert torch.equal(theirs[:, [6, 2]], mine[:, [3, 5]])
    assert not theirs[:, [0, 1, 3, 4, 5, 7]].any()
    source.close()
    target.close()


def test_a_dropped_fetch_writes_nothing_and_is_not_good(
    make: Callable[[bool], tuple[Carrier, Tensor, list[Report]]],
) -> None:
    source, _, _ = make(True)
    target, theirs, reports = make(False)
    target.put(Receive(1, 7, 0, (1,), ((6,),)), None)
    target.drop(7)
    target.put(Receive(1, 8, 0, (1,), ((4,),)), None)
    source.put(Send(1, 7, 0, ((3,),)), None)
    source.put(Send(1, 8, 0, ((2,),)), None)
    _wait(reports, 2)
    assert not theirs[:, 6].any() and theirs[:, 4].any()
    source.close()
    target.close()


def test_another_chunk_than_the_one_that_is_due_ends_the_pair(
    make: Callable[[bool], tuple[Carrier, Tensor, list[Report]]],
) -> None:
    """Else every chunk after it would be one behind, and no fetch of the pair would ever be good again."""
    source, _, _ = make(True)
    target, _, reports = make(False)
    source.put(Send(1, 7, 1, ((3,),)), None)  # chunk 0 was never offered
    target.put(Receive(1, 7, 0, (1,), ((6,),)), None)
    _wait(reports, 2)
    assert isinstance(reports[0], Received) and not reports[0].good
    assert isinstance(reports[1], PairFailed) and "another chunk" in reports[1].error
    source.close()
    target.close()
