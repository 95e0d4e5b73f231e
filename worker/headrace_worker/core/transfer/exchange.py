"""Both sides of KV transfers in one replica's engine: the blocks it fetches, and those it grants to others. Pure."""

from collections.abc import Callable

from msgspec import Struct

from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler
from headrace_worker.core.transfer.fetching import Fetcher, FetchLimits, SourceSpeed
from headrace_worker.core.transfer.granting import Granter, GrantLimits
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.core.transfer.offload import FIRST_NUMBER, Offload
from headrace_worker.core.transfer.orders import ChunkRead, Order, TransferReport
from headrace_worker.core.transfer.slots import Slots
from headrace_worker.core.transfer.tiers import make_tiers


class Outbound(Struct):
    """Messages to send to other replicas, in order."""

    to_sources: list[tuple[str, ToSource]] = []
    to_targets: list[tuple[str, FromSource]] = []
    disconnect: list[str] = []  # sources to disconnect

    def __bool__(self) -> bool:
        return bool(self.to_sources or self.to_targets or self.disconnect)


class TransferExchange:
    """The transfers of one engine. Not thread-safe: the step loop owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: int,
        clock: Callable[[], float],
        fetch_limits: FetchLimits | None = None,
        grant_limits: GrantLimits | None = None,
        predict: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        host_slots: int = 0,
        host_states: int = 0,
        files: Slots | None = None,
    ) -> None:
        """predict: seconds to compute a token here, and those of the newest step; 0 = not known yet. host_slots,
        host_states: blocks and recurrent states that each rank's host memory holds. files: places for blocks in each
        rank's file, with what it had at the start.
        """
        self.fetcher = Fetcher(scheduler.kv, ranks, scheduler.limits.max_num_batched_tokens, clock, fetch_limits)
        self.granter = Granter(scheduler, clock, predict, grant_limits)
        self.offload = Offload(
            scheduler.kv,
            ranks,
            make_tiers(scheduler.kv, Slots(host_slots), Slots(host_states), scheduler.limits.max_num_batched_tokens),
            Slots(0) if files is None else files,
            clock,
            lambda: predict()[1],
        )
        self.moves_blocks = True  # whether this replica's ranks can read others' memory
        self.send: Callable[[Outbound], None] | None = None  # before a step computes what its messages announce
        self._scheduler = scheduler
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether `tick` must be called."""
        return bool(len(self.fetcher) or len(self.granter) or self.offload.busy or self.pending)

    @property
    def pending(self) -> bool:
        """Whether a plan must be launched, even one without work."""
        orders = self.fetcher.orders or self.granter.orders or self.offload.orders
        return bool(orders or self.fetcher.has_ready or self.offload.has_ready)

    def compute_for_others(self, enabled: bool) -> None:
        """Whether prompts of other replicas are computed here from now on; those already granted are."""
        self.granter.computes_for_others = enabled

    def tick(self) -> None:
        """Called at the beginning of a step: queues the requests whose fetch has ended."""
        for request in (*self.fetcher.tick(), *self.offload.tick()):
            self._scheduler.add(request)
        self.granter.tick()

    def begin(self, request: Request, seconds_per_token: float) -> bool:
        """Starts a fetch if the request has a source, or a load. False: the caller must queue the request."""
        queued = self._scheduler.missing_tokens
        fetches = bool(request.source) and self.moves_blocks
        if fetches and self.fetcher.begin(request, request.source, seconds_per_token, queued):
            return True
        return not self.offload.empty and self.offload.begin(request, seconds_per_token, queued)

    def cancel(self, request: Request) -> None:
        """The request has ended: so does its fetch or load, if it has one."""
        if not self.offload.cancel(request):
            self.fetcher.cancel(request)

    def handle_report(self, report: TransferReport) -> None:
        """Handles a report of any rank's transfer worker."""
        if isinstance(report, ChunkRead) and report.fetch >= FIRST_NUMBER:
            self.offload.handle_report(report)
        else:
            self.fetcher.handle_report(report)

    def take_orders(self, step: int) -> list[Order]:
        """The orders of a plan, after step `step` was planned (0: nothing to compute)."""
        self.granter.planned(step)
        orders = self.granter.orders + self.fetcher.orders + self.offload.orders
        self.fetcher.orders, self.granter.orders, self.offload.orders = [], [], []
        return orders

    def source_speeds(self) -> list[SourceSpeed]:
        """Speeds of the sources whose speed is known."""
        return self.fetcher.peers.speeds(self._clock())

    def send_early(self) -> None:
        """Sends what there is so far, if `send` is set: a step may compute for longer than a read takes."""
        if self.send is not None and (outbound := self.take_outbound()):
            self.send(outbound)

    def take_outbound(self) -> Outbound:
        """Messages since the last call."""
        fetcher, granter = self.fetcher, self.granter
        found = Outbound(fetcher.messages, granter.messages, fetcher.close_peers)
        fetcher.messages, granter.messages, fetcher.close_peers = [], [], []
        return found

    def held(self) -> list[int]:
        """Blocks held besides those of the scheduler's requests."""
        return self.fetcher.held() + self.granter.held() + self.offload.held()

    def held_slots(self) -> list[int]:
        """Slots of recurrent state held besides those of the scheduler's requests."""
        return self.fetcher.held_slots() + self.granter.held_slots() + self.offload.held_slots()
