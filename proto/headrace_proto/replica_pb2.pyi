from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_UNHEALTHY: _ClassVar[ReplicaState]
    REPLICA_STATE_DEAD: _ClassVar[ReplicaState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[FinishReason]
    FINISH_STOP: _ClassVar[FinishReason]
    FINISH_LENGTH: _ClassVar[FinishReason]
    FINISH_CANCELLED: _ClassVar[FinishReason]
    FINISH_DEADLINE: _ClassVar[FinishReason]
    FINISH_ERROR: _ClassVar[FinishReason]
    FINISH_REFUSED: _ClassVar[FinishReason]
    FINISH_INVALID: _ClassVar[FinishReason]
    FINISH_COMPLETE: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_BOTH: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_UNHEALTHY: ReplicaState
REPLICA_STATE_DEAD: ReplicaState
FINISH_NONE: FinishReason
FINISH_STOP: FinishReason
FINISH_LENGTH: FinishReason
FINISH_CANCELLED: FinishReason
FINISH_DEADLINE: FinishReason
FINISH_ERROR: FinishReason
FINISH_REFUSED: FinishReason
FINISH_INVALID: FinishReason
FINISH_COMPLETE: FinishReason

class ReplicaIdentity(_message.Message):
    __slots__ = ("replica_id", "generation", "boot_id", "model", "revision", "adapters", "dtype", "kv_dtype", "kv_layout", "role")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    generation: int
    boot_id: bytes
    model: str
    revision: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    kv_dtype: str
    kv_layout: KvLayout
    role: Role
    def __init__(self, replica_id: _Optional[str] = ..., generation: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[_Union[KvLayout, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("version", "block_size", "groups")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    def __init__(self, version: _Optional[int] = ..., block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ...) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("index", "num_layers", "num_kv_heads", "head_dim", "window", "state")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    state: bool
    def __init__(self, index: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ..., state: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("known_digest", "facts_only")
    KNOWN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FACTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    known_digest: bytes
    facts_only: bool
    def __init__(self, known_digest: _Optional[bytes] = ..., facts_only: _Optional[bool] = ...) -> None: ...

class DescribeChunk(_message.Message):
    __slots__ = ("facts", "tokenizer_json")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    facts: ModelFacts
    tokenizer_json: bytes
    def __init__(self, facts: _Optional[_Union[ModelFacts, _Mapping]] = ..., tokenizer_json: _Optional[bytes] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("identity", "max_model_len", "vocab_size", "eos_token_ids", "bos_token_id", "chat_template", "named_templates", "special_tokens", "tokenizer_digest", "tokenizer_size", "defaults", "add_bos", "kv_blocks", "max_num_seqs", "max_num_batched_tokens", "tool_parser", "reasoning_parser", "cache_key")
    class NamedTemplatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    NAMED_TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    identity: ReplicaIdentity
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    chat_template: str
    named_templates: _containers.ScalarMap[str, str]
    special_tokens: _containers.ScalarMap[str, str]
    tokenizer_digest: bytes
    tokenizer_size: int
    defaults: GenerationDefaults
    add_bos: bool
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tool_parser: str
    reasoning_parser: str
    cache_key: bytes
    def __init__(self, identity: _Optional[_Union[ReplicaIdentity, _Mapping]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., chat_template: _Optional[str] = ..., named_templates: _Optional[_Mapping[str, str]] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., tokenizer_digest: _Optional[bytes] = ..., tokenizer_size: _Optional[int] = ..., defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., add_bos: _Optional[bool] = ..., kv_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., cache_key: _Optional[bytes] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("hello", "submits", "cancels")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "contract_version", "report_interval_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    contract_version: int
    report_interval_ms: int
    def __init__(self, router_id: _Optional[str] = ..., contract_version: _Optional[int] = ..., report_interval_ms: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt_id", "request_label", "model", "revision", "adapter", "tenant_salt", "prompt_token_ids", "output_token_ids", "sampling", "deadline_ms", "priority", "source", "grammar", "expected_cached_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    request_label: str
    model: str
    revision: str
    adapter: str
    tenant_salt: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    deadline_ms: int
    priority: int
    source: Source
    grammar: str
    expected_cached_tokens: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., request_label: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., grammar: _Optional[str] = ..., expected_cached_tokens: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("replica_id", "address", "cached_only")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    cached_only: bool
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., cached_only: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "choice_index", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs", "prompt_logprobs", "bad_words", "allowed_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    choice_index: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    def __init__(self, attempt_id: _Optional[bytes] = ...) -> None: ...

class ReplicaFrame(_message.Message):
    __slots__ = ("hello", "step", "deltas", "load", "submits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    hello: ReplicaIdentity
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    load: Load
    submits: int
    def __init__(self, hello: _Optional[_Union[ReplicaIdentity, _Mapping]] = ..., step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., submits: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("attempt_id", "first_index", "token_ids", "logprobs", "finish", "error", "cached_tokens", "queue_us", "preemptions", "not_finite", "times", "prompt_logprobs")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: FinishReason
    error: str
    cached_tokens: int
    queue_us: int
    preemptions: int
    not_finite: bool
    times: AttemptTimes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, attempt_id: _Optional[bytes] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., preemptions: _Optional[int] = ..., not_finite: _Optional[bool] = ..., times: _Optional[_Union[AttemptTimes, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class AttemptTimes(_message.Message):
    __slots__ = ("fetch_us", "compute_us", "own_tokens", "beside_tokens", "ahead", "ahead_tokens", "snapshot_tokens", "covered_tokens", "prompt_preempted_us", "decode_us", "prompts_us", "sequences_us", "preempted_us")
    FETCH_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PREEMPTED_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_US_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_US_FIELD_NUMBER: _ClassVar[int]
    fetch_us: int
    compute_us: int
    own_tokens: int
    beside_tokens: int
    ahead: int
    ahead_tokens: int
    snapshot_tokens: int
    covered_tokens: int
    prompt_preempted_us: int
    decode_us: int
    prompts_us: int
    sequences_us: int
    preempted_us: int
    def __init__(self, fetch_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., own_tokens: _Optional[int] = ..., beside_tokens: _Optional[int] = ..., ahead: _Optional[int] = ..., ahead_tokens: _Optional[int] = ..., snapshot_tokens: _Optional[int] = ..., covered_tokens: _Optional[int] = ..., prompt_preempted_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., prompts_us: _Optional[int] = ..., sequences_us: _Optional[int] = ..., preempted_us: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "free_blocks", "waiting_tokens", "predicted_step_ms", "step_model", "draining", "counters", "sources", "load_token_ms")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    free_blocks: int
    waiting_tokens: int
    predicted_step_ms: float
    step_model: StepModel
    draining: bool
    counters: Counters
    sources: _containers.RepeatedCompositeFieldContainer[SourceSpeed]
    load_token_ms: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., free_blocks: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., predicted_step_ms: _Optional[float] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., draining: _Optional[bool] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[SourceSpeed, _Mapping]]] = ..., load_token_ms: _Optional[float] = ...) -> None: ...

class SourceSpeed(_message.Message):
    __slots__ = ("address", "per_token_ms", "bytes_per_second")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    address: str
    per_token_ms: float
    bytes_per_second: float
    def __init__(self, address: _Optional[str] = ..., per_token_ms: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions", "steps", "fetches", "fetches_failed", "fetched_bytes", "fetch_seconds", "grants", "not_finite", "idle_steps", "blocks_stored", "blocks_loaded", "load_seconds", "blocks_saved", "blocks_filled")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FAILED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    IDLE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SAVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FILLED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    steps: int
    fetches: int
    fetches_failed: int
    fetched_bytes: int
    fetch_seconds: float
    grants: int
    not_finite: int
    idle_steps: int
    blocks_stored: int
    blocks_loaded: int
    load_seconds: float
    blocks_saved: int
    blocks_filled: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., steps: _Optional[int] = ..., fetches: _Optional[int] = ..., fetches_failed: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_seconds: _Optional[float] = ..., grants: _Optional[int] = ..., not_finite: _Optional[int] = ..., idle_steps: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_loaded: _Optional[int] = ..., load_seconds: _Optional[float] = ..., blocks_saved: _Optional[int] = ..., blocks_filled: _Optional[int] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("base_ms", "per_prefill_token_ms", "per_decode_sequence_ms", "per_kv_token_ms", "error_ms")
    BASE_MS_FIELD_NUMBER: _ClassVar[int]
    PER_PREFILL_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PER_DECODE_SEQUENCE_MS_FIELD_NUMBER: _ClassVar[int]
    PER_KV_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MS_FIELD_NUMBER: _ClassVar[int]
    base_ms: float
    per_prefill_token_ms: float
    per_decode_sequence_ms: float
    per_kv_token_ms: float
    error_ms: float
    def __init__(self, base_ms: _Optional[float] = ..., per_prefill_token_ms: _Optional[float] = ..., per_decode_sequence_ms: _Optional[float] = ..., per_kv_token_ms: _Optional[float] = ..., error_ms: _Optional[float] = ...) -> None: ...

class CacheWatchRequest(_message.Message):
    __slots__ = ("router_id", "interval_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    interval_ms: int
    def __init__(self, router_id: _Optional[str] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class CacheFrame(_message.Message):
    __slots__ = ("boot_id", "sequence", "snapshot", "snapshot_end", "events")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    sequence: int
    snapshot: bool
    snapshot_end: bool
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, boot_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("group", "stored", "removed", "cleared", "offloaded")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    group: int
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    cleared: bool
    offloaded: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, group: _Optional[int] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., cleared: _Optional[bool] = ..., offloaded: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class ReplicaHealth(_message.Message):
    __slots__ = ("identity", "state", "step", "load", "routers")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    identity: ReplicaIdentity
    state: ReplicaState
    step: int
    load: Load
    routers: int
    def __init__(self, identity: _Optional[_Union[ReplicaIdentity, _Mapping]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., step: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., routers: _Optional[int] = ...) -> None: ...

class TransferFrame(_message.Message):
    __slots__ = ("hello", "message")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    hello: TransferHello
    message: bytes
    def __init__(self, hello: _Optional[_Union[TransferHello, _Mapping]] = ..., message: _Optional[bytes] = ...) -> None: ...

class TransferHello(_message.Message):
    __slots__ = ("contract_version", "identity", "shards")
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    contract_version: int
    identity: ReplicaIdentity
    shards: bytes
    def __init__(self, contract_version: _Optional[int] = ..., identity: _Optional[_Union[ReplicaIdentity, _Mapping]] = ..., shards: _Optional[bytes] = ...) -> None: ...
