"""A replica's ranks behind the engine's `StepRunner`: each takes the plans in order, the others after rank 0."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from couriers import Gate, SimCourier
from shadow import RankShadow, Task
from sim_model import BLOCK, Model, draw, follow
from wires import PairWire
from world import BrokenPromise, Owner, World

from headrace_worker.plan import StepPlan, StepResult
from headrace_worker.transfer.orders import ClosePair, Drop, OpenPair, Order, Receive, Report, Send
from headrace_worker.transfer.shards import KvShards

SPOILT_TOKEN = 1  # never drawn by the model


class StepExploded(Exception):
    """The model failed on a step."""


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    tags: list[int]
    spoilt: bool = False  # a step failed on it: what follows means nothing


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    tasks: list[Task]
    result: StepResult
    explodes: bool


@dataclass(slots=True)
class Exposure:
    """A chunk that ranks may still read or write: its blocks, and the ranks."""

    order: Send | Receive
    ranks: set[int]

    @property
    def blocks(self) -> set[int]:
        return {block for row in self.order.blocks for block in row}


class SimRanks:
    """Rank 0 takes a plan when it is launched; the others follow, at the latest when its result is collected."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        model: Model,
        shards: KvShards,
        wire_of: Callable[[OpenPair], PairWire],
        report: Callable[[Report], None],
        spend: Callable[[], None],
    ) -> None:
        self.explode = 0  # steps that will fail
        self._movers: dict[int, set[int]] = {}  # ranks with a route, by pair
        self.computed_in: dict[tuple[int, int, int], int] = {}  # chunks that were sent, and the step of their blocks
        self.collected: set[int] = {0}  # steps that are known to have worked; 0: nothing to compute
        self.exposures: dict[tuple[int, int, int], Exposure] = {}  # by pair, fetch, chunk
        self._world = world
        self._owner = owner
        self._spend = spend  # a step's time goes by
        self._rows: dict[int, _Row] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self._groups = len(model.windows)
        self._pending: list[deque[_Launched]] = [deque() for _ in shards.ranks]
        self.couriers = [
            SimCourier(world, owner, RankShadow(number, shard, model.windows, BLOCK), wire_of, report, self._carried)
            for number, shard in enumerate(shards.ranks)
        ]

    def launch(self, plan: StepPlan) -> _Launched:
        self._expose(plan.orders)
        launched = self._resolve(plan)
        fresh = {block for task in launched.tasks for block in task.written(BLOCK)}
        dropped = {(order.pair, order.fetch) for order in plan.orders if isinstance(order, Drop)}
        for order in plan.orders:
            if isinstance(order, Send):
                late = any(block in fresh for row in order.blocks for block in row)
                late = late and (order.pair, order.fetch) not in dropped  # zeros are sent, and the blocks others' again
                self.computed_in[order.pair, order.fetch, order.chunk] = plan.step if late else 0
        for rank, pending in enumerate(self._pending):
            pending.append(launched)
            if rank:
                self._world.at(self._world.delay(), lambda rank=rank: self._follow(rank, 1), self._owner)
        self._follow(0, 1)
        if launched.explodes and self._world.chance(0.5):
            raise StepExploded
        return launched

    def collect(self, handle: _Launched) -> StepResult:
        self._spend()
        if handle.plan.work:
            for rank, pending in enumerate(self._pending):
                while any(entry is handle for entry in pending):
                    self._follow(rank, 1)
        if handle.explodes:
            raise StepExploded
        self.collected.add(handle.plan.step)
        return handle.result

    # -- inside -----------------------------------------------------------------------------------------------

    def _resolve(self, plan: StepPlan) -> _Launched:
        """Applies the plan to the rows, and says what each rank has to do."""
        rows, tables = self._rows, self._tables
        for row in plan.frees:
            rows.pop(row, None)
        for init in plan.inits:
            tags, tag = [], 0
            for token in init.token_ids:
                tag = follow(tag, token)
                tags.append(tag)
            rows[init.row] = _Row(list(init.token_ids), tags)
            for group in range(self._groups):
                tables[group, init.row] = {}
        for update in plan.tables:
            table = tables[update.group, update.row]
            for index, block in enumerate(update.block_ids, update.first):
                table[index] = block
        explodes = bool(plan.work) and self.explode > 0 and len(self._pending) == 1
        self.explode -= explodes
        tasks, drawn = [], []
        for work in plan.work:
            row, stop = rows[work.row], work.start + work.count
            if stop > len(row.tokens):
                raise BrokenPromise("a plan computes positions whose tokens do not exist")
            mine = [dict(tables[group, work.row]) for group in range(self._groups)]
            row.spoilt = row.spoilt or explodes
            tasks.append(Task(work.start, stop, row.tags[:stop], mine, row.spoilt))
            if work.sample:
                if stop != len(row.tokens):
                    raise BrokenPromise("a token is drawn before its predecessors are computed")
                token = SPOILT_TOKEN if row.spoilt else draw(row.tags[-1])
                row.tokens.append(token)
                row.tags.append(follow(row.tags[-1], token))
                drawn.append(token)
        return _Launched(plan, tasks, StepResult(plan.step, drawn, {}, {}), explodes)

    def _follow(self, rank: int, count: int) -> None:
        for _ in range(min(count, len(self._pending[rank]))):
            self._take(rank, self._pending[rank].popleft())

    def _take(self, rank: int, launched: _Launched) -> None:
        courier, gate = self.couriers[rank], Gate() if launched.tasks else None
        for order in launched.plan.orders:
            courier.take(order, gate)
            if self._world.chance(0.1):
                courier.hurry()
        if launched.tasks:
            alone = courier.touched()
            for task in launched.tasks:
                both = courier.shadow.compute(task) & alone
                if both:
                    raise BrokenPromise(f"a step on rank {rank} writes blocks {both} that a courier may still touch")
        if gate is not None:
            gate.opened = True
            courier.opened()

    def _expose(self, orders: list[Order]) -> None:
        """Notes what couriers are told to touch, from now until they are done or told not to."""
        for order in orders:
            match order:
                case OpenPair(pair, routes=routes, sends=sends):
                    self._movers[pair] = {route.source if sends else route.target for route in routes}
                case Send() | Receive() if any(order.blocks):
                    ranks = set(self._movers[order.pair])
                    self.exposures[order.pair, order.fetch, order.chunk] = Exposure(order, ranks)
                case Drop(pair, fetch):
                    self._hide(lambda key, pair=pair, fetch=fetch: key[:2] == (pair, fetch))
                case ClosePair(pair):
                    self._hide(lambda key, pair=pair: key[0] == pair)

    def _hide(self, gone: Callable[[tuple[int, int, int]], bool]) -> None:
        for key in [key for key in self.exposures if gone(key)]:
            del self.exposures[key]

    def _carried(self, rank: int, order: Send | Receive) -> None:
        key = (order.pair, order.fetch, order.chunk)
        exposure = self.exposures.get(key)
        if exposure is not None:
            exposure.ranks.discard(rank)
            if not exposure.ranks:
                del self.exposures[key]
