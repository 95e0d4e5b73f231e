"""Who waits and who runs, and what those who run hold: a row and blocks."""

from collections.abc import Sequence

from headrace_worker.kv.manager import KVManager, PrefixHit
from headrace_worker.plan import RowInit
from headrace_worker.queue import WaitingQueue
from headrace_worker.request import Request
from headrace_worker.row_pool import RowPool


class Roster:
    """Moves requests between queue and rows. Who is moved, and when, the scheduler says."""

    def __init__(self, max_num_seqs: int, kv: KVManager) -> None:
        self.kv = kv
        self.rows = RowPool(max_num_seqs)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.suspects = 0  # requests that a failed step may be the fault of
        self.guided = 0  # running requests that have a guide

    def admit(self, request: Request, hit: PrefixHit) -> RowInit:
        """From the queue to a row and the blocks of its prefix; a row must be free."""
        self.waiting.remove(request)
        request.table = self.kv.adopt(hit)
        request.computed = hit.tokens
        request.row, generation = self.rows.take()
        self.guided += request.guide is not None
        self.running.append(request)
        return RowInit(request.row, generation, list(request.tokens), request.prompt_len, request.sampling)

    def send_back(self, request: Request) -> None:
        """Preempts: blocks are given up, and what is not found again is computed again."""
        self._leave_row(request)
        request.computed = 0
        request.preemptions += 1
        self.waiting.push(request)

    def dismiss(self, request: Request) -> None:
        """Takes a request out in any phase: its row and blocks are free at once."""
        self.waiting.remove(request)
        self._leave_row(request)
        self.trust(request)

    def _leave_row(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            self.rows.give_back(request.row)
            request.row = -1
            self.guided -= request.guide is not None
        if request.table is not None:
            self.kv.release(request.table)
            request.table = None

    def suspect(self, request: Request) -> None:
        """A step that it was in failed: until it was in one alone, it may be at fault."""
        if not request.suspect:
            request.suspect = True
            self.suspects += 1

    def trust(self, request: Request) -> None:
        if request.suspect:
            request.suspect = False
            self.suspects -= 1

    def check(self, others: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless blocks, rows and tables agree; `others`: blocks held by no request of here."""
        self.kv.pool.check()
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
        self.rows.check([request.row for request in self.running])
