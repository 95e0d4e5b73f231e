"""The metrics of replicas: one entry of a table each, with the value that it has."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.replica_state import ReplicaState
from headrace_router.text.model_card import ModelCard

LABELS = ("model_name", "replica")

Read = Callable[[ReplicaState[ModelCard], ModelFacts], float]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value as it is now."""

    name: str
    text: str
    read: Read


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum since the replica's start. `field` of the message headrace.v1.Counters."""

    name: str
    text: str
    field: str


GAUGES = (
    Gauge("vllm:num_requests_running", "Requests in the running batch", lambda replica, _: replica.load.running),
    Gauge("vllm:num_requests_waiting", "Requests waiting at the replica", lambda replica, _: replica.load.waiting),
    Gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1", lambda replica, _: replica.load.kv_usage),
    Gauge("headrace_kv_blocks", "KV blocks of the pool", lambda _, facts: facts.kv_blocks),
    Gauge(
        "headrace_kv_blocks_free",
        "KV blocks that a new request can get, cached ones included",
        lambda replica, _: replica.load.free_blocks,
    ),
    Gauge("headrace_waiting_tokens", "Prefill tokens not computed yet", lambda replica, _: replica.load.waiting_tokens),
    Gauge(
        "headrace_predicted_step_seconds",
        "Predicted time of the next step",
        lambda replica, _: replica.load.predicted_step_ms / 1e3,
    ),
    Gauge(
        "headrace_step_error_seconds",
        "Mean absolute error of the predicted step time",
        lambda replica, _: replica.load.step_model.error_ms / 1e3,
    ),
    Gauge(
        "headrace_attempts_in_flight",
        "Attempts of this router at the replica",
        lambda replica, _: len(replica.attempts),
    ),
    Gauge(
        "headrace_replica_ready",
        "Whether this router sends new requests there",
        lambda replica, _: float(replica.ready),
    ),
    Gauge(
        "headrace_replica_slow",
        "Whether this router avoids it, because its steps take much longer than those of its peers",
        lambda replica, _: float(replica.speed.slow),
    ),
)

COUNTERS = (
    Counter("vllm:prompt_tokens", "Prompt tokens of answers, each prompt once, as in their usage", "prompt_tokens"),
    Counter("vllm:generation_tokens", "Tokens sampled", "generation_tokens"),
    Counter("vllm:prefix_cache_queries", "Tokens looked up in this replica's prefix cache", "prefix_cache_queries"),
    Counter(
        "vllm:prefix_cache_hits",
        "Tokens found there; blocks fetched from other replicas are no hits",
        "prefix_cache_hits",
    ),
    Counter("vllm:num_preemptions", "Requests preempted", "preemptions"),
    Counter("headrace_steps", "Engine steps, idle ticks included", "steps"),
    Counter("headrace_kv_fetches", "Prompts whose KV blocks were requested from another replica", "fetches"),
    Counter("headrace_kv_fetches_failed", "Fetches that failed; the prompt was computed here", "fetches_failed"),
    Counter("headrace_kv_fetched_bytes", "Bytes of KV blocks received from other replicas", "fetched_bytes"),
    Counter(
        "headrace_kv_fetch_seconds",
        "Seconds from the request to the last block, of completed fetches",
        "fetch_seconds",
    ),
    Counter("headrace_kv_grants", "Prompts computed, or sent, for other replicas", "grants"),
    Counter("headrace_not_finite", "Attempts that ended since the model's output was not finite", "not_finite"),
)
