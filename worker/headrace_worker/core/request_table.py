"""Waiting and running requests; a running one holds a row and blocks."""

from collections import Counter
from collections.abc import Sequence

from headrace_worker.core.kv.manager import KVManager, PrefixHit
from headrace_worker.core.plan import RowInit
from headrace_worker.core.queue import WaitingQueue
from headrace_worker.core.request import Request


class RowPool:
    """Allocates row numbers. Each use of a row has a number, so that data of an earlier use is recognized."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._uses = [0] * count
        self.freed: list[int] = []  # since the last planned step: the next plan passes them to the runner

    def __bool__(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def allocate(self) -> tuple[int, int]:
        """Returns (row, the number of this use). Raises IndexError when none is free."""
        row = self._free.pop()
        self._uses[row] += 1
        return row, self._uses[row]

    def release(self, row: int) -> None:
        self._free.append(row)
        self.freed.append(row)

    def clear_freed(self) -> None:
        """The freed rows are in a plan now."""
        self.freed = []

    def check(self, held: list[int]) -> None:
        """Raises RuntimeError unless every row is either free or held, once."""
        if sorted(held + self._free) != list(range(len(self._uses))):
            raise RuntimeError("rows are lost or held twice")


class RequestTable:
    """Moves requests between queue and rows. The scheduler decides which, and when."""

    def __init__(self, max_num_seqs: int, kv: KVManager) -> None:
        self.kv = kv
        self.rows = RowPool(max_num_seqs)
        self.running: list[Request] = []
        self.running_of: Counter[bytes] = Counter()  # by tenant
        self.waiting = WaitingQueue(self.running_of)
        self.suspects = 0  # requests that may have caused a failed step
        self.guided = 0  # running requests that have a guide

    def admit(self, request: Request, hit: PrefixHit) -> RowInit:
        """Moves a request from the queue to a row, with the blocks of its prefix; a row must be free."""
        self.waiting.take(request)
        request.table = self.kv.new_table(hit)
        if self.kv.states is not None:
            again, parts = request.started is not None, hit.covered > hit.tokens
            branch = hit.covered // self.kv.block_size if parts and not again else 0
            state = request.table.state
            self.kv.states.begin(state, request.prompt_len, hit.tokens, hit.snapshot, branch, again=again)
        request.computed = hit.tokens
        request.row, row_use = self.rows.allocate()
        self.guided += request.guide is not None
        self.running.append(request)
        self.running_of[request.tenant_salt] += 1
        return RowInit(request.row, row_use, list(request.tokens), request.prompt_len, request.sampling)

    def preempt(self, request: Request) -> None:
        """Moves a request back to the queue: its blocks are released, and positions no longer cached are recomputed."""
        self._release_row(request)
        request.computed = 0
        request.preemptions += 1
        self.waiting.push(request)

    def in_excess(self, waiting: Request) -> Request | None:
        """The running request to preempt for a waiting one: the least urgent, then the latest, of the tenant that runs
        most; None unless the waiting one's tenant runs none and that one several.
        """
        running_of = self.running_of
        most = max(running_of, key=lambda tenant: running_of[tenant], default=b"")
        if running_of[waiting.tenant_salt] or running_of[most] < 2:
            return None
        return max(
            (request for request in self.running if request.tenant_salt == most),
            key=lambda request: (request.priority, request.arrival),
        )

    def least_urgent(self, excluded: Sequence[Request]) -> Request | None:
        """The running request to preempt first: of the tenant that runs most, the least urgent, then the latest."""
        planned = {id(request) for request in excluded}
        return max(
            (request for request in self.running if id(request) not in planned),
            key=lambda request: (self.running_of[request.tenant_salt], request.priority, request.arrival),
            default=None,
        )

    def remove(self, request: Request) -> None:
        """Removes a request in any phase: its row and blocks are free at once."""
        self.waiting.remove(request)
        self._release_row(request)
        self.clear_suspect(request)

    def _release_row(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            self.running_of[request.tenant_salt] -= 1
            if not self.running_of[request.tenant_salt]:
                del self.running_of[request.tenant_salt]
            self.rows.release(request.row)
            request.row = -1
            self.guided -= request.guide is not None
        if request.table is not None:
            self.kv.release(request.table)
            request.table = None

    def mark_suspect(self, request: Request) -> None:
        """A step with this request failed: it is a suspect until it succeeds in a step alone."""
        if not request.suspect:
            request.suspect = True
            self.suspects += 1

    def clear_suspect(self, request: Request) -> None:
        if request.suspect:
            request.suspect = False
            self.suspects -= 1

    def check(self, others: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless blocks, rows and tables agree; others, slots: held outside of this table."""
        self.kv.pool.check()
        if self.kv.states is not None:
            states = [request.table.state for request in self.running if request.table is not None]
            self.kv.states.check(states, slots)
        held: dict[int, int] = dict.fromkeys(others, 1)
        for request in self.running:
            if request.table is None or request.row < 0:
                raise RuntimeError("a running request holds no row")
            if request.table.capacity < request.computed:
                raise RuntimeError("a request computed more than it holds")
            for block in request.table.held():
                held[block] = held.get(block, 0) + 1
        for request in self.waiting:
            if request.table is not None or request.row >= 0:
                raise RuntimeError("a waiting request holds a row")
        if len(held) != self.kv.pool.used:
            raise RuntimeError(f"requests hold {len(held)} blocks, the pool counts {self.kv.pool.used} used")
        if self.running_of != Counter(request.tenant_salt for request in self.running):
            raise RuntimeError("the running requests are not counted by their tenants")
        self.rows.check([request.row for request in self.running])
