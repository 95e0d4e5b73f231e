"""A peer connection over queues: chunks that arrive in order, are dropped, or are not the expected ones."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_worker.comm.errors import RankLostError
from headrace_worker.comm.group import Sending
from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.orders import OpenPair, PairFailed, Receive, Received, Send, TransferReport
from headrace_worker.core.transfer.shards import KvShards, RankShard, plan_routes
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.kv_transfer import peer_connection as module
from headrace_worker.kv_transfer.peer_connection import PeerConnection
from headrace_worker.model.attention import LayerCache
from support.worker.recording_device import RecordingDevice

SHARDS = KvShards(4, 8, "float32", (0,), (RankShard(((0, 1),), (0, 2)),))


class QueuePairGroup:
    """Both ends in one process."""

    lane: "queue.Queue[Tensor | None]"

    def __init__(self, *_: object) -> None:
        pass

    def send(self, piece: Tensor, to: int) -> Sending:
        self.lane.put(piece.clone())
        return Sending(None, piece)

    def finish(self, sending: Sending) -> None:
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
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PeerConnection, Tensor, list[TransferReport]]]:
    """make(sends, device, check): an end of a pair, its pool [2, B, K, P, D] and what it reports."""

    class FakePairGroup(QueuePairGroup):
        lane: "queue.Queue[Tensor | None]" = queue.Queue()

    monkeypatch.setattr(module, "PairGroup", FakePairGroup)

    def end(
        sends: bool, device: RankDevice | None = None, check: Callable[[], None] = lambda: None
    ) -> tuple[PeerConnection, Tensor, list[TransferReport]]:
        pool = torch.randn(2, 8, 2, 4, 8) if sends else torch.zeros(2, 8, 2, 4, 8)
        caches: Any = {layer: LayerCache(0, pool, 0) for layer in (0, 1)}
        reports: list[TransferReport] = []
        order = OpenPair(1, Rendezvous("", 1, bytes(32)), 2, 0, 1, tuple(plan_routes(SHARDS, SHARDS)), sends)
        connection = PeerConnection(order, 0, "127.0.0.1", SHARDS, caches, device or CpuDevice(), reports.append, check)
        connection.start()
        return connection, pool, reports

    return end


def _wait(reports: list[TransferReport], count: int) -> None:
    while len(reports) < count:
        time.sleep(0.001)


def test_a_chunk_arrives(make: Callable[[bool], tuple[PeerConnection, Tensor, list[TransferReport]]]) -> None:
    source, mine, _ = make(True)
    target, theirs, reports = make(False)
    source.enqueue(Send(1, 7, 0, ((3, 5),)), None)
    target.enqueue(Receive(1, 7, 0, (2,), ((6, 2),)), None)
    _wait(reports, 1)
    assert isinstance(reports[0], Received) and reports[0].good
    assert torch.equal(theirs[:, [6, 2]], mine[:, [3, 5]])
    assert not theirs[:, [0, 1, 3, 4, 5, 7]].any()
    source.close()
    target.close()


def test_copies_do_not_queue_behind_steps_and_are_done_when_they_are_reported(
    make: Callable[..., tuple[PeerConnection, Tensor, list[TransferReport]]],
) -> None:
    """Blocks may be in use until what was launched before the order is done."""
    devices = RecordingDevice(), RecordingDevice()
    for device in devices:
        device.use()  # the step thread, which queues orders
    source, mine, _ = make(True, devices[0])
    target, theirs, reports = make(False, devices[1])
    source.enqueue(Send(1, 7, 0, ((3, 5),)), None)
    target.enqueue(Receive(1, 7, 0, (2,), ((6, 2),)), None)
    _wait(reports, 1)
    assert torch.equal(theirs[:, [6, 2]], mine[:, [3, 5]])
    sent, received = (device.calls["headrace-pair-1"] for device in devices)
    copied = ["mark headrace-pair-1", "mark.synchronize headrace-pair-1"]
    read = ["upload", *copied, "download", "download.wait"]
    assert sent == ["use", "own_stream", "mark.synchronize default", *read * 2]
    assert received[:3] == ["use", "own_stream", "wait_for default"]
    writes = [call for call in received[3:] if call != "host_memory"]
    assert writes == ["upload", "upload", *copied, *copied] * 2
    source.close()
    target.close()


class BlockingDevice(RecordingDevice):
    """Its first copy of that kind ends when the test lets it; so does that of a step which was launched before."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call
        self.begun, self.end = threading.Event(), threading.Event()

    def note(self, call: str, stream: str = "") -> None:
        super().note(call, stream)
        if call == self._call and threading.current_thread().name == "headrace-pair-1" and not self.begun.is_set():
            self.begun.set()
            assert self.end.wait(10)


@pytest.mark.parametrize(("sends", "call"), [(True, "download.wait"), (False, "upload"), (False, "mark.synchronize")])
def test_the_step_thread_does_not_wait_for_copies_to_and_from_the_host(
    sends: bool, call: str, make: Callable[..., tuple[PeerConnection, Tensor, list[TransferReport]]]
) -> None:
    """It drops a fetch meanwhile, and no block of the fetch is written afterwards."""
    device = BlockingDevice(call)
    device.use()
    other = RecordingDevice()
    other.use()
    source, mine, _ = make(True, device if sends else other)
    target, theirs, reports = make(False, other if sends else device)
    source.enqueue(Send(1, 7, 0, ((3,),)), None)
    target.enqueue(Receive(1, 7, 0, (1,), ((6,),)), None)
    assert device.begun.wait(10)
    dropped = threading.Thread(target=(source if sends else target).drop, args=(7,), daemon=True)
    dropped.start()
    dropped.join(5)
    waits = dropped.is_alive()
    mine.zero_()  # the blocks belong to another request
    device.end.set()
    assert not waits
    _wait(reports, 1)
    if not sends:
        assert not theirs.any()
    source.close()
    target.close()


@pytest.mark.parametrize("gated", [False, True])
def test_nothing_is_sent_that_was_computed_while_a_rank_was_lost(
    gated: bool, make: Callable[..., tuple[PeerConnection, Tensor, list[TransferReport]]]
) -> None:
    """On a GPU the wait for a layer ends as if it were computed, once the group of a lost rank is aborted."""
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise RankLostError("a step hangs")

    class Gate:
        def wait(self, layer: int) -> None:
            if layer == 1:
                lost.set()

    source, _, sent = make(True, None, check)
    target, _, received = make(False)
    if not gated:
        lost.set()
    source.enqueue(Send(1, 7, 0, ((3, 5),)), Gate() if gated else None)
    target.enqueue(Receive(1, 7, 0, (2,), ((6, 2),)), None)
    _wait(sent, 1)
    assert sent == [PairFailed(0, 1, "a step hangs")]
    assert not any(isinstance(report, Received) and report.good for report in received)
    source.close()
    target.close()


def test_a_dropped_fetch_writes_nothing_and_is_reported_as_failed(
    make: Callable[[bool], tuple[PeerConnection, Tensor, list[TransferReport]]],
) -> None:
    source, _, _ = make(True)
    target, theirs, reports = make(False)
    target.enqueue(Receive(1, 7, 0, (1,), ((6,),)), None)
    target.drop(7)
    target.enqueue(Receive(1, 8, 0, (1,), ((4,),)), None)
    source.enqueue(Send(1, 7, 0, ((3,),)), None)
    source.enqueue(Send(1, 8, 0, ((2,),)), None)
    _wait(reports, 2)
    assert not theirs[:, 6].any() and theirs[:, 4].any()
    source.close()
    target.close()


def test_an_unexpected_chunk_ends_the_pair(
    make: Callable[[bool], tuple[PeerConnection, Tensor, list[TransferReport]]],
) -> None:
    """Else every later chunk would be off by one, and all fetches of the pair would fail."""
    source, _, _ = make(True)
    target, _, reports = make(False)
    source.enqueue(Send(1, 7, 1, ((3,),)), None)  # chunk 0 was never offered
    target.enqueue(Receive(1, 7, 0, (1,), ((6,),)), None)
    _wait(reports, 2)
    assert isinstance(reports[0], Received) and not reports[0].good
    assert isinstance(reports[1], PairFailed) and "another chunk" in reports[1].error
    source.close()
    target.close()
