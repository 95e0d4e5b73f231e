"""Transfer workers of two replicas in one process, by NIXL: what is read, when, and when its blocks are free."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest
import torch
from torch import Tensor

from headrace_worker.core.transfer.orders import (
    Announce,
    ChunkRead,
    Connect,
    Disconnect,
    End,
    FetchOver,
    Load,
    Order,
    Read,
    Store,
    TransferReport,
)
from headrace_worker.core.transfer.shards import GroupShard, KvGroup, KvShards, RankShard, plan_routes
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.kv_transfer.agent import KvAgent, TransfersUnavailableError, UnknownBackendError
from headrace_worker.kv_transfer.pieces import joined, layer_slices, pieces
from headrace_worker.kv_transfer.transfer_worker import HostMemory, TransferWorker

LAYERS, BLOCKS, HEADS, POSITIONS, SIZE = 3, 8, 4, 2, 4
NAMES = count()


class Rank:
    """One rank of a replica: its pools, worker and reports."""

    def __init__(self, shards: KvShards, number: int) -> None:
        first, stop = shards.ranks[number].groups[0].units
        self.pools = {layer: torch.zeros(2, BLOCKS, stop - first, POSITIONS, SIZE) for layer in range(LAYERS)}
        self.agent = KvAgent(f"test-{next(NAMES)}", list(self.pools.values()), "ucx:lo")
        self.reports: list[TransferReport] = []
        self.host = {layer: torch.zeros(2, 20, stop - first, POSITIONS, SIZE) for layer in range(LAYERS)}
        self.agent.register(list(self.host.values()))
        there = (tuple(tuple(part.data_ptr() for part in pool) for pool in self.host.values()),)
        strides = ((self.pools[0][0].stride(0) * 4,) * 2,)
        held = RankShard(shards.ranks[number].groups, b"", there, strides)
        self.slots = HostMemory(held, lambda group, slot: [], None)
        addresses = (tuple(tuple(part.data_ptr() for part in pool) for pool in self.pools.values()),)
        self.shard = RankShard(shards.ranks[number].groups, self.agent.metadata, addresses, strides)
        self.number = number

    def start(self, shards: KvShards, check: Callable[[], None] = lambda: None) -> None:
        self.worker = TransferWorker(
            self.number, shards, self.agent, CpuDevice(), self.reports.append, check, self.slots
        )

    def order(self, *orders: Order) -> None:
        """In a plan without work."""
        self.worker.begin_step(orders, computes=False)

    def await_reports(self, number: int) -> list[TransferReport]:
        end = time.monotonic() + 20
        while len(self.reports) < number:
            assert time.monotonic() < end, self.reports
            time.sleep(0.001)
        return self.reports


class Replica:
    def __init__(self, tp: int) -> None:
        heads = HEADS // tp
        groups = [(GroupShard(tuple(range(LAYERS)), (rank * heads, rank * heads + heads)),) for rank in range(tp)]
        empty = KvShards(
            POSITIONS, "float32", (KvGroup(0, (POSITIONS * SIZE * 4,) * 2),), tuple(map(RankShard, groups))
        )
        self.ranks = [Rank(empty, number) for number in range(tp)]
        self.shards = KvShards(POSITIONS, "float32", empty.groups, tuple(rank.shard for rank in self.ranks))
        for rank in self.ranks:
            rank.start(self.shards)

    def connect(self, other: "Replica", *, reads: bool) -> None:
        source, target = (other, self) if reads else (self, other)
        routes = tuple(plan_routes(source.shards, target.shards))
        for rank in self.ranks:
            rank.order(Connect(1, other.shards.ranks, routes, reads))

    def whole(self, layer: int, blocks: list[int]) -> Tensor:
        """[2, blocks, heads, positions, size]."""
        return torch.cat([rank.pools[layer][:, blocks] for rank in self.ranks], 2)


@pytest.fixture
def make_pair() -> Iterator[Callable[[int, int], tuple[Replica, Replica]]]:
    made: list[Replica] = []

    def make(source_tp: int, target_tp: int) -> tuple[Replica, Replica]:
        source, target = Replica(source_tp), Replica(target_tp)
        made.extend((target, source))
        generator = torch.Generator().manual_seed(1)
        for rank in source.ranks:
            for pool in rank.pools.values():
                pool.copy_(torch.rand(pool.shape, generator=generator))
        source.connect(target, reads=False)
        target.connect(source, reads=True)
        return source, target

    yield make
    for replica in made:
        for rank in replica.ranks:
            rank.worker.stop()


THEIRS, MINE = [5, 2, 3], [1, 6, 7]


def read(*, computed: bool, fetch: int = 1) -> Read:
    return Read(1, fetch, 0, (tuple(THEIRS),), (tuple(MINE),), computed)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)])
def test_blocks_that_are_computed_are_read_at_once(
    source_tp: int, target_tp: int, make_pair: Callable[[int, int], tuple[Replica, Replica]]
) -> None:
    source, target = make_pair(source_tp, target_tp)
    for rank in source.ranks:
        rank.order(Announce(1, 1, 0, computed=True))
    for rank in target.ranks:
        rank.order(read(computed=True))
    for rank in target.ranks:
        (report,) = rank.await_reports(1)
        assert (
            isinstance(report, ChunkRead)
            and report.good
            and report.num_bytes == LAYERS * 2 * 3 * 32 * HEADS // target_tp
        )
    for layer in range(LAYERS):
        assert torch.equal(target.whole(layer, MINE), source.whole(layer, THEIRS))
        assert not target.whole(layer, [0, 2, 3, 4, 5]).any()


def test_each_layer_is_read_when_its_source_has_computed_it(
    make_pair: Callable[[int, int], tuple[Replica, Replica]],
) -> None:
    source, target = make_pair(1, 1)
    giving, taking = source.ranks[0], target.ranks[0]
    taking.order(read(computed=False))
    written = giving.worker.begin_step([Announce(1, 1, 0, computed=False)], computes=True)
    assert written is not None
    for layer in (0, 1):
        written(layer, torch.zeros(0))
        while not torch.equal(target.whole(layer, MINE), source.whole(layer, THEIRS)):
            time.sleep(0.001)
    time.sleep(0.05)
    assert not target.whole(2, MINE).any() and not taking.reports
    giving.worker.end_step()  # a step that is replayed marks no layer
    assert taking.await_reports(1) == [ChunkRead(0, 1, 0, True, LAYERS * 2 * 3 * 32 * HEADS, taking.reports[0].seconds)]  # type: ignore[union-attr]


def test_nothing_is_read_after_an_end(make_pair: Callable[[int, int], tuple[Replica, Replica]]) -> None:
    source, target = make_pair(1, 1)
    giving, taking = source.ranks[0], target.ranks[0]
    taking.order(read(computed=False))
    taking.order(End(1, 1))
    assert taking.await_reports(1) == [FetchOver(0, 1)]
    giving.worker.begin_step([Announce(1, 1, 0, computed=False)], computes=True)
    giving.worker.end_step()
    taking.order(read(computed=True, fetch=2), End(1, 3))
    assert {type(report) for report in taking.await_reports(3)[1:]} == {ChunkRead, FetchOver}
    taking.order(Disconnect(1))
    giving.order(End(1, 1), Disconnect(1))


def test_what_a_failed_group_computed_is_not_announced(
    make_pair: Callable[[int, int], tuple[Replica, Replica]],
) -> None:
    source, target = make_pair(1, 1)
    giving, taking = source.ranks[0], target.ranks[0]

    def lost() -> None:
        raise RuntimeError("a rank is lost")

    giving.worker._check = lost
    taking.order(read(computed=False))
    giving.worker.begin_step([Announce(1, 1, 0, computed=False)], computes=True)
    giving.worker.end_step()
    time.sleep(0.1)
    assert not taking.reports and not target.whole(0, MINE).any()


def test_a_source_that_has_ended_fails_the_read(make_pair: Callable[[int, int], tuple[Replica, Replica]]) -> None:
    source, target = make_pair(1, 1)
    (taking,) = target.ranks
    broken = msgspec.structs.replace(source.shards.ranks[0], agent=b"nonsense")
    routes = tuple(plan_routes(source.shards, target.shards))
    taking.order(Connect(2, (broken,), routes, reads=True))
    taking.order(Read(2, 9, 0, (tuple(THEIRS),), (tuple(MINE),), computed=True))
    taking.order(Read(2, 9, 1, (tuple(THEIRS),), (tuple(MINE),), computed=False))
    assert [(report.fetch, report.good) for report in taking.await_reports(2) if isinstance(report, ChunkRead)] == [
        (9, False), (9, False)
    ]  # fmt: skip


def test_blocks_go_to_host_memory_and_come_back(make_pair: Callable[[int, int], tuple[Replica, Replica]]) -> None:
    replica, _ = make_pair(2, 1)
    before = {layer: replica.whole(layer, THEIRS) for layer in range(LAYERS)}
    slots = (19, 1, 7)
    for rank in replica.ranks:
        rank.order(Store(1, (tuple(THEIRS),), (slots,)))
        rank.await_reports(1)
        for pool in rank.pools.values():
            pool.zero_()
        rank.order(Load(2, (slots,), (tuple(MINE),)))
        reports = [report for report in rank.await_reports(2) if isinstance(report, ChunkRead)]
        assert [(report.fetch, report.good) for report in reports] == [(1, True), (2, True)]
    for layer in range(LAYERS):
        assert torch.equal(replica.whole(layer, MINE), before[layer])


def test_neighbours_on_both_sides_are_one_piece() -> None:
    group = GroupShard((0, 1), (0, 2))
    rank = RankShard((group,), b"a", (((0, 1000), (2000, 3000)),), ((16, 16),))
    shards = KvShards(2, "float32", (KvGroup(0, (8, 8)),), (rank,))
    (route,) = plan_routes(shards, shards)
    slices = layer_slices(route)
    assert slices == [((0, 0),), ((0, 1),)]
    theirs, mine = (pieces(shards, shards.ranks[0], route, slices[1], blocks) for blocks in ([[4, 5, 7]], [[1, 2, 3]]))
    assert mine.tolist() == [[2016, 16], [2032, 16], [2048, 16], [3016, 16], [3032, 16], [3048, 16]]
    theirs, mine = joined(theirs, mine)
    assert theirs.tolist() == [[2064, 32], [2112, 16], [3064, 32], [3112, 16]]
    assert mine.tolist() == [[2016, 32], [2048, 16], [3016, 32], [3048, 16]]


def test_blocks_of_a_layer_that_shares_its_slot_are_apart() -> None:
    group = GroupShard((0,), (0, 2))
    ranks = [RankShard((group,), b"a", (((start, 1000),),), ((stride, 16),)) for start, stride in ((8, 64), (0, 16))]
    apart, dense = (KvShards(2, "float32", (KvGroup(0, (8, 8)),), (rank,)) for rank in ranks)
    (route,) = plan_routes(apart, dense)
    (layers,) = layer_slices(route)
    theirs, mine = (pieces(shards, shards.ranks[0], route, layers, [[4, 5]]) for shards in (apart, dense))
    assert theirs.tolist() == [[264, 16], [328, 16], [1064, 16], [1080, 16]]
    theirs, mine = joined(theirs, mine)
    assert theirs.tolist() == [[264, 16], [328, 16], [1064, 32]] and mine.tolist() == [[64, 16], [80, 16], [1064, 32]]


def test_a_backend_that_is_unknown_or_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackendError, match="--kv-transfer tcpx:eth0: NIXL has no such backend here, but ucx"):
        KvAgent("unknown", [torch.zeros(4)], "tcpx:eth0")
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError("no such module")))
    with pytest.raises(TransfersUnavailableError, match=r"no such module. Install nixl-cu13, or serve without pools"):
        KvAgent("missing", [torch.zeros(4)])
