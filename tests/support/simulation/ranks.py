"""A replica's ranks behind the engine's `StepRunner`: each executes the plans in order, the others after rank 0."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult, Work
from headrace_worker.core.transfer.orders import Announce, Connect, Order, Read, TransferReport
from headrace_worker.core.transfer.shards import KvShards
from support.simulation.shadow import INVALID, RankShadow, Task
from support.simulation.sim_model import BLOCK, Model, next_tag, next_token
from support.simulation.transfer_workers import DataNetwork, Disk, LayerGate, SimTransferWorker
from support.simulation.world import InvariantViolation, Owner, World

INVALID_TOKEN = 1  # never sampled by the model


class StepFailed(Exception):
    """The model failed on a step."""


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    tags: list[int]
    invalid: bool = False  # a step failed on it: later tokens are invalid


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    tasks: list[Task]
    result: StepResult
    fails: bool


@dataclass(slots=True)
class Exposure:
    """A chunk that ranks may still write: its blocks, and the ranks."""

    order: Read
    ranks: set[int]
    groups: int  # of blocks; slots of states follow them

    @property
    def blocks(self) -> set[int]:
        return {block for row in self.order.mine[: self.groups] for block in row}

    @property
    def slots(self) -> set[int]:
        return {slot for row in self.order.mine[self.groups :] for slot in row}


class SimRanks:
    """Rank 0 executes a plan when it is launched; the others later, at the latest when its result is collected."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        model: Model,
        shards: KvShards,
        network: DataNetwork,
        report: Callable[[TransferReport], None],
        spend: Callable[[], None],
        disks: Sequence[Disk],
    ) -> None:
        self.failing_steps = 0  # steps that will fail
        self._routed_ranks: dict[int, set[int]] = {}  # of this target, by source
        self.computed_in: dict[tuple[int, int, int], int] = {}  # the step that computes an offered chunk's blocks
        self.collected: set[int] = {0}  # steps that are known to have succeeded; 0: nothing to compute
        self.exposures: dict[tuple[int, int, int], Exposure] = {}  # by source, fetch, chunk
        self._world = world
        self._owner = owner
        self._spend = spend  # adds the time of a step
        self._rows: dict[int, _Row] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self._groups = len(model.windows)
        self._states: dict[int, int] | None = {0: 0} if model.states else None  # of slots: the tag of the tokens before
        self._pending: list[deque[_Launched]] = [deque() for _ in shards.ranks]
        self.transfer_workers = [
            SimTransferWorker(
                world,
                owner,
                RankShadow(number, shard, model.windows, BLOCK, states=self._states or {}),
                shard.agent,
                network,
                report,
                self._over,
                disks[number],
            )
            for number, shard in enumerate(shards.ranks)
        ]

    def launch(self, plan: StepPlan) -> _Launched:
        self._expose(plan.orders)
        launched = self._resolve(plan)
        for order in plan.orders:
            if isinstance(order, Announce):
                self.computed_in[order.peer, order.fetch, order.chunk] = 0 if order.computed else plan.step
        for rank, pending in enumerate(self._pending):
            pending.append(launched)
            if rank:
                self._world.at(self._world.delay(), partial(self._advance, rank, 1), self._owner)
        self._advance(0, 1)
        if launched.fails and self._world.chance(0.5):
            raise StepFailed
        return launched

    def draw(self, handle: _Launched, masks: Mapping[int, Mask]) -> None:
        self._world.fail("a step is guided, and no simulated request is")

    def collect(self, handle: _Launched) -> StepResult:
        self._spend()
        if handle.plan.work:
            for rank, pending in enumerate(self._pending):
                while any(entry is handle for entry in pending):
                    self._advance(rank, 1)
        if handle.fails:
            raise StepFailed
        self.collected.add(handle.plan.step)
        return handle.result

    # -- inside -----------------------------------------------------------------------------------------------

    def _resolve(self, plan: StepPlan) -> _Launched:
        """Applies the plan to the rows, and returns the work of each rank."""
        rows, tables = self._rows, self._tables
        for freed in plan.frees:
            rows.pop(freed, None)
        for init in plan.inits:
            tags, tag = [], 0
            for token in init.token_ids:
                tag = next_tag(tag, token)
                tags.append(tag)
            rows[init.row] = _Row(list(init.token_ids), tags)
            for group in range(self._groups):
                tables[group, init.row] = {}
        for update in plan.tables:
            table = tables[update.group, update.row]
            for index, block in enumerate(update.block_ids, update.first):
                table[index] = block
        fails = bool(plan.work) and self.failing_steps > 0 and len(self._pending) == 1
        self.failing_steps -= fails
        tasks, sampled = [], []
        for work in plan.work:
            row = rows[work.row]
            stop = work.start + work.count
            if stop > len(row.tokens):
                self._world.fail("a plan computes positions whose tokens do not exist")
            mine = [dict(tables[group, work.row]) for group in range(self._groups)]
            row.invalid = row.invalid or fails
            if self._states is not None:
                self._advance_state(self._states, work, row)
            tasks.append(Task(work.start, stop, row.tags[:stop], mine, row.invalid))
            if work.sample:
                if stop != len(row.tokens):
                    self._world.fail("a token is sampled before its predecessors are computed")
                token = INVALID_TOKEN if row.invalid else next_token(row.tags[-1])
                row.tokens.append(token)
                row.tags.append(next_tag(row.tags[-1], token))
                sampled.append(token)
        return _Launched(plan, tasks, StepResult(plan.step, sampled, {}, {}), fails)

    def _advance_state(self, states: dict[int, int], work: Work, row: _Row) -> None:
        """The pieces of a row read and write slots."""
        before = row.tags[work.start - 1] if work.start else 0
        if not row.invalid and states.get(work.state_read) != before:
            self._world.fail(f"row {work.row} reads the state of another prefix in slot {work.state_read}")
        for end, slot in work.state_writes:
            states[slot] = INVALID if row.invalid else row.tags[end - 1]
        if (
            not work.state_writes
            or work.state_writes[-1][0] != work.start + work.count
            or not all(slot for _, slot in work.state_writes)
        ):
            self._world.fail("a row's state is not kept")

    def _advance(self, rank: int, count: int) -> None:
        for _ in range(min(count, len(self._pending[rank]))):
            self._execute(rank, self._pending[rank].popleft())

    def _execute(self, rank: int, launched: _Launched) -> None:
        worker, gate = self.transfer_workers[rank], LayerGate() if launched.tasks else None
        for order in launched.plan.orders:
            worker.execute(order, gate)
        if launched.tasks:
            alone = worker.blocks_in_transfer()
            for task in launched.tasks:
                try:
                    both = worker.shadow.compute(task) & alone
                except InvariantViolation as violation:  # the engine would take it for a step that failed
                    self._world.fail(str(violation))
                if both:
                    self._world.fail(f"a step on rank {rank} writes blocks {both} that are still being transferred")
        if gate is not None:
            gate.opened = True
        worker.opened()

    def _expose(self, orders: list[Order]) -> None:
        """Records the blocks that transfer workers may write: from the order until it is done."""
        for order in orders:
            match order:
                case Connect(peer, routes=routes):
                    self._routed_ranks[peer] = {route.target for route in routes}
                case Read():
                    ranks = set(self._routed_ranks[order.peer])
                    self.exposures[order.peer, order.fetch, order.chunk] = Exposure(order, ranks, self._groups)

    def _over(self, rank: int, order: Read) -> None:
        key = (order.peer, order.fetch, order.chunk)
        self.exposures[key].ranks.discard(rank)
        if not self.exposures[key].ranks:
            del self.exposures[key]
