"""What a run has shown, in numbers."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from headrace_cluster.simulator.cluster_change import to_text
from headrace_cluster.simulator.replayed_request import ReplayedRequest
from headrace_cluster.simulator.simulation import WARM_UP_SECONDS, Setup, Simulation
from headrace_cluster.simulator.trace import Trace, TraceRequest


def hit_rate_bound(trace: Trace, blocks: int, block: int = 0, models: int = 1) -> float:
    """Share of prompt tokens whose blocks were used before, by a cache of that many blocks that drops the oldest.

    blocks: of `block` tokens each; 0 = the trace's. models: that take turns and share nothing. Requests follow one
    another; only leading whole blocks count, and never all tokens of a prompt: the last one is always computed.
    """
    block = block or trace.block
    chains = _Chains(trace.block, block)
    cache: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for number, request in enumerate(trace.requests):
        total += request.input_tokens
        whole = list(chains.blocks(request, number % models))
        for place in whole[: (request.input_tokens - 1) // block]:
            if place not in cache:
                break
            found += block
        for place in reversed(whole):
            cache[place] = None
            cache.move_to_end(place)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found / total if total else 0.0


class _Chains:
    """Numbers for the simulated blocks: equal numbers are equal tokens with equal tokens before, as hashes are."""

    def __init__(self, traced: int, block: int) -> None:
        """Tokens of a block of the trace, and of a replica."""
        self._traced = traced
        self._block = block
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(self, request: TraceRequest, model: int) -> Iterator[int]:
        """Yields the numbers of the prompt's whole blocks."""
        before = -1 - model
        for end in range(self._block, request.input_tokens + 1, self._block):
            first = (end - self._block) // self._traced
            content = request.block_ids[first : (end - 1) // self._traced + 1]
            before = self._numbers.setdefault((before, content), len(self._numbers))
            yield before


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """NaN of nothing."""
        ordered = sorted(values)
        p50, p90, p99 = (
            ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
            for share in (0.5, 0.9, 0.99)
        )
        return cls(p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request counts for goodput if it meets both."""

    ttft: float = 2.0  # seconds
    tpot: float = 0.05


@dataclass(frozen=True)
class Result:
    """Times in seconds of virtual time; `decision_ms` is of this machine."""

    trace: str
    policy: str
    latency_model: str
    latency_source: str
    replicas: int
    prefill: int
    decode: int
    routers: int
    seed: int
    requests: int
    failed: int
    seconds: float  # from the first arrival to the last token
    arrivals_per_second: float
    hashed: bool  # whether the trace shows what prompts have in common; if not, hit rates are of nothing
    hit_rate: float  # prompt tokens that were in the cache where the prompt was computed
    hit_rate_bound: float  # hit rate of one LRU cache as large as all caches together: no limit if the caches are small
    hit_rate_unlimited: float  # hit rate of one cache that keeps everything
    ttft_seconds: Percentiles
    tpot_seconds: Percentiles
    slo: Slo
    goodput: float  # requests per second that meet the SLO
    goodput_share: float  # share of the requests that meet the SLO
    throughput: float  # requests per second
    tokens_per_second: float  # tokens of answers
    largest_share: float  # largest share of the requests on one replica
    imbalance: float  # largest share times replicas: 1 = even
    busiest: float  # share of the time that the busiest replica computed
    decision_ms: Percentiles
    prediction_error: Percentiles  # error of the predicted time until the first token: |predicted - actual| / actual
    preemptions: int
    transfers: int  # completed transfers of KV blocks
    fetched: int  # requests that were to fetch a prefix from another replica's cache
    prefilled: int  # requests whose prompt a prefill replica was to compute for another one
    wall_seconds: float
    requests_per_minute: float  # simulated on this machine
    per_replica: list[dict[str, Any]] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)  # what was simulated, by the names of the options

    def document(self) -> dict[str, Any]:
        """As JSON: null for percentiles of nothing."""
        document: dict[str, Any] = _finite(asdict(self))
        return document


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor Infinity."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _setup_document(simulation: Simulation, options: Mapping[str, Any]) -> dict[str, Any]:
    setup: Setup = simulation.setup
    shape = simulation.shapes[0]
    names = ("policy", "replicas", "prefill", "decode", "disaggregation", "routers", "models", "spread")
    return {
        **{name: getattr(setup, name) for name in names},
        "cache_blocks": shape.kv_blocks,
        "block_size": shape.block_size,
        "faults": ",".join(to_text(change) for change in setup.changes),
        "noise": setup.noise,
        "network": setup.network,
        "seed": setup.seed,
        **options,
        "latency": asdict(setup.latency),
    }


def result_of(
    simulation: Simulation, slo: Slo, wall_seconds: float, options: Mapping[str, Any] | None = None
) -> Result:
    """After its run. options: of the command, for `setup`."""
    setup, trace = simulation.setup, simulation.trace
    requests = simulation.requests
    served = [request for request in requests if request.failure is None and request.first_token is not None]
    ttft = [request.ttft for request in served if request.ttft is not None]
    end = max((request.last_token for request in served), default=WARM_UP_SECONDS)
    if len(served) < len(requests):
        end = simulation.time.now  # the others have ended by then
    seconds = end - WARM_UP_SECONDS
    good = sum(1 for request in served if meets(request, slo))
    shares = Counter(request.replica for request in requests)
    computing = [name for name, replica in simulation.replicas.items() if shares[name] or not setup.prefill]
    capacity = sum(replica.shape.kv_blocks for replica in simulation.replicas.values())
    block = simulation.shapes[0].block_size
    tokens = sum(request.traced.input_tokens for request in requests)
    largest = max(shares.values(), default=0) / max(1, len(requests))
    errors = [
        abs(request.predicted - request.ttft) / request.ttft
        for request in served
        if request.predicted is not None and request.ttft
    ]
    return Result(
        trace=trace.name,
        policy=setup.policy,
        latency_model=setup.latency.name,
        latency_source=setup.latency.source,
        replicas=setup.replicas,
        prefill=setup.prefill,
        decode=setup.decode,
        routers=setup.routers,
        seed=setup.seed,
        requests=len(requests),
        failed=len(requests) - len(served),
        seconds=seconds,
        arrivals_per_second=len(requests) / trace.seconds if trace.seconds else 0.0,
        hashed=trace.hashed,
        hit_rate=sum(request.cached_tokens for request in served) / tokens if tokens else 0.0,
        hit_rate_bound=hit_rate_bound(trace, capacity, block, setup.models),
        hit_rate_unlimited=hit_rate_bound(trace, 1 << 60, block, setup.models),
        ttft_seconds=Percentiles.of(ttft),
        tpot_seconds=Percentiles.of([request.tpot for request in served if request.tpot is not None]),
        slo=slo,
        goodput=good / seconds if seconds else 0.0,
        goodput_share=good / max(1, len(requests)),
        throughput=len(served) / seconds if seconds else 0.0,
        tokens_per_second=sum(request.traced.output_tokens for request in served) / seconds if seconds else 0.0,
        largest_share=largest,
        imbalance=largest * max(1, len(computing)),
        busiest=max(replica.busy_seconds for replica in simulation.replicas.values()) / max(seconds, 1e-9),
        decision_ms=Percentiles.of([each * 1e3 for router in simulation.routers for each in router.decision_seconds]),
        prediction_error=Percentiles.of(errors),
        preemptions=sum(replica.engine.scheduler.counters.preemptions for replica in simulation.replicas.values()),
        transfers=sum(replica.engine.exchange.fetcher.counters.done for replica in simulation.replicas.values()),
        fetched=sum(request.fetched for request in requests),
        prefilled=sum(request.prefilled for request in requests),
        wall_seconds=wall_seconds,
        requests_per_minute=len(requests) / wall_seconds * 60 if wall_seconds else 0.0,
        per_replica=[
            {
                "replica": name,
                "requests": shares[name],
                "busy_share": replica.busy_seconds / max(seconds, 1e-9),
                "steps": replica.steps,
            }
            for name, replica in simulation.replicas.items()
        ],
        setup=_setup_document(simulation, options or {}),
    )


def meets(request: ReplayedRequest, slo: Slo) -> bool:
    """Whether it was fast enough."""
    return (request.ttft or 0.0) <= slo.ttft and (request.tpot or 0.0) <= slo.tpot
