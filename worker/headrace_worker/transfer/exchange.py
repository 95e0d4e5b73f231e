"""A replica's two sides of moving KV blocks, as one part of its engine: what it fetches, and what it grants. Pure."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from headrace_worker.request import Request
from headrace_worker.scheduler import Scheduler
from headrace_worker.transfer.fetch import FetchLimits
from headrace_worker.transfer.fetching import Fetcher
from headrace_worker.transfer.granting import Granter, GrantLimits
from headrace_worker.transfer.messages import FromSource, ToSource
from headrace_worker.transfer.orders import OpenPair, Order, PairFailed, Report


class Outbound(Struct):
    """What is to be said to other replicas, in order."""

    to_sources: list[tuple[str, ToSource]] = []
    to_targets: list[tuple[str, FromSource]] = []
    hang_up: list[str] = []  # sources that are to be left, and targets that are to be turned out

    def __bool__(self) -> bool:
        return bool(self.to_sources or self.to_targets or self.hang_up)


class Exchange:
    """Of one engine; not thread-safe: the step loop owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: int,
        clock: Callable[[], float],
        fetch_limits: FetchLimits | None = None,
        grant_limits: GrantLimits | None = None,
    ) -> None:
        self.fetcher = Fetcher(scheduler.kv, ranks, fetch_limits)
        self.granter = Granter(scheduler, grant_limits)
        self._scheduler = scheduler
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether the clock has to be looked at."""
        return bool(len(self.fetcher) or len(self.granter) or self.pending)

    @property
    def pending(self) -> bool:
        """Whether a plan has to go out, even one without work."""
        return bool(self.fetcher.orders or self.granter.orders or self.fetcher.has_ready)

    def compute_for_others(self, willing: bool) -> None:
        """Whether prompts of other replicas are computed here from now on; those that were granted are."""
        self.granter.willing = willing

    def tick(self, seconds_per_token: float = 0.0) -> None:
        """At the beginning of a turn: requests whose fetch is over are queued.

        `seconds_per_token`: what computing one takes here, as predicted now.
        """
        self.granter.seconds_per_token = seconds_per_token
        now = self._clock()
        for request in self.fetcher.tick(now):
            self._scheduler.add(request)
        self.granter.tick(now)

    def begin(self, request: Request, seconds_per_token: float) -> bool:
        """Whether the request waits for a fetch now; else the caller queues it."""
        if not request.source:
            return False
        queued = self._scheduler.missing_tokens
        compute = not request.cached_only
        return self.fetcher.begin(request, request.source, self._clock(), seconds_per_token, queued, compute=compute)

    def take_orders(self, step: int) -> list[Order]:
        """After a step was planned (0: nothing to compute), the orders that go with it."""
        self.granter.planned(step)
        # A grant's blocks are free when it is dropped, and may be what a fetch has reserved since: its Drop goes first.
        orders = self.granter.orders + self.fetcher.orders
        self.fetcher.orders, self.granter.orders = [], []
        return orders

    def launched(self, orders: Sequence[Order]) -> None:
        """The orders' plan is on its way."""
        self.fetcher.launched(orders)

    def processed(self, step: int) -> None:
        """A step's results are in."""
        self.granter.processed(step)

    def heard_source(self, source: str, message: FromSource) -> None:
        self.fetcher.heard(source, message, self._clock())

    def source_lost(self, source: str) -> None:
        self.fetcher.lost(source, self._clock())

    def heard_target(self, target: str, message: ToSource) -> None:
        self.granter.heard(target, message, self._clock())

    def target_opened(self, target: str, order: OpenPair) -> None:
        self.granter.opened(target, order, self._clock())

    def reported(self, report: Report) -> None:
        """A courier of any rank has a word to say."""
        self.fetcher.reported(report, self._clock())
        if isinstance(report, PairFailed):
            self.granter.pair_failed(report.pair)

    def take_outbound(self) -> Outbound:
        """What is to be said since the last call."""
        fetcher, granter = self.fetcher, self.granter
        found = Outbound(fetcher.messages, granter.messages, fetcher.close_peers + granter.close_peers)
        fetcher.messages, granter.messages, fetcher.close_peers, granter.close_peers = [], [], [], []
        return found

    def held(self) -> list[int]:
        """Blocks held besides those of the scheduler's requests."""
        return self.fetcher.held() + self.granter.held()
