"""The metrics of replicas: one entry of a table each, with the value that it has."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace_proto.replica_pb2 import Load, ModelFacts
from headrace_router.core.replica_state import ReplicaState
from headrace_router.text.model_card import ModelCard

LABELS = ("model_name", "replica")


@dataclass(frozen=True, slots=True)
class LoadGauge:
    """A value of what a replica reports: read in the thread that renders a scrape."""

    name: str
    text: str
    read: Callable[[Load, ModelFacts], float]


@dataclass(frozen=True, slots=True)
class StateGauge:
    """A value of what this router knows: read on the event loop, of all replicas at once, so it must be quick."""

    name: str
    text: str
    read: Callable[[ReplicaState[ModelCard]], float]


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum since the replica's start. `field` of the message headrace.v1.Counters."""

    name: str
    text: str
    field: str


LOAD_GAUGES = (
    LoadGauge("vllm:num_requests_running", "Requests in the running batch", lambda load, _: load.running),
    LoadGauge("vllm:num_requests_waiting", "Requests waiting at the replica", lambda load, _: load.waiting),
    LoadGauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1", lambda load, _: load.kv_usage),
    LoadGauge("headrace_kv_blocks", "KV blocks of the pool", lambda _, facts: facts.kv_blocks),
    LoadGauge(
        "headrace_kv_blocks_free",
        "KV blocks that a new request can get, cached ones included",
        lambda load, _: load.free_blocks,
    ),
    LoadGauge("headrace_waiting_tokens", "Prefill tokens not computed yet", lambda load, _: load.waiting_tokens),
    LoadGauge(
        "headrace_predicted_step_seconds",
        "Predicted time of the next step",
        lambda load, _: load.predicted_step_ms / 1e3,
    ),
    LoadGauge(
        "headrace_step_error_seconds",
        "Mean absolute error of the predicted step time",
        lambda load, _: load.step_model.error_ms / 1e3,
    ),
)

STATE_GAUGES = (
    StateGauge(
        "headrace_attempts_in_flight",
        "Attempts of this router at the replica",
        lambda replica: len(replica.attempts),
    ),
    StateGauge(
        "headrace_replica_ready",
        "Whether this router sends new requests there",
        lambda replica: float(replica.ready),
    ),
    StateGauge(
        "headrace_replica_cache_known",
        "Whether this router knows which KV blocks the replica holds",
        lambda replica: float(not replica.unknown_cache),
    ),
    StateGauge(
        "headrace_replica_slow",
        "Whether this router avoids it, because its steps take much longer than those of its peers",
        lambda replica: float(replica.speed.slow),
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
    Counter("headrace_kv_blocks_stored", "KV blocks copied to host memory before their eviction", "blocks_stored"),
    Counter("headrace_kv_blocks_loaded", "KV blocks copied back from host memory", "blocks_loaded"),
    Counter("headrace_kv_load_seconds", "Seconds that requests waited for these blocks", "load_seconds"),
    Counter("headrace_kv_blocks_saved", "KV blocks written to disk", "blocks_saved"),
    Counter("headrace_kv_blocks_filled", "KV blocks read from disk", "blocks_filled"),
    Counter("headrace_kv_grants", "Prompts computed, or sent, for other replicas", "grants"),
    Counter("headrace_not_finite", "Attempts that ended since the model's output was not finite", "not_finite"),
)
