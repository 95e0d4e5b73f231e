from headrace_proto import replica_pb2 as _replica_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterReport(_message.Message):
    __slots__ = ("router_id", "replicas", "accounts", "models")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    replicas: _containers.RepeatedCompositeFieldContainer[HeardReplica]
    accounts: _containers.RepeatedCompositeFieldContainer[RequestAccount]
    models: _containers.RepeatedCompositeFieldContainer[ModelPlacement]
    def __init__(self, router_id: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[HeardReplica, _Mapping]]] = ..., accounts: _Optional[_Iterable[_Union[RequestAccount, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelPlacement, _Mapping]]] = ...) -> None: ...

class ModelPlacement(_message.Message):
    __slots__ = ("model", "policy", "prompt_tokens", "cached_tokens", "placements", "cache_placements", "unknown_caches")
    class UnknownCachesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_CACHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    policy: str
    prompt_tokens: int
    cached_tokens: int
    placements: int
    cache_placements: int
    unknown_caches: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., policy: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., placements: _Optional[int] = ..., cache_placements: _Optional[int] = ..., unknown_caches: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RequestAccount(_message.Message):
    __slots__ = ("request_id", "document")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    document: str
    def __init__(self, request_id: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class HeardReplica(_message.Message):
    __slots__ = ("replica_id", "generation", "heard")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    generation: int
    heard: bool
    def __init__(self, replica_id: _Optional[str] = ..., generation: _Optional[int] = ..., heard: _Optional[bool] = ...) -> None: ...

class RouterReportReply(_message.Message):
    __slots__ = ("explain",)
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    explain: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, explain: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: RouterInfo
    def __init__(self, router: _Optional[_Union[RouterInfo, _Mapping]] = ...) -> None: ...

class RouterInfo(_message.Message):
    __slots__ = ("id", "pid", "node", "http", "grpc", "metrics")
    ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    id: str
    pid: int
    node: str
    http: str
    grpc: str
    metrics: str
    def __init__(self, id: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., http: _Optional[str] = ..., grpc: _Optional[str] = ..., metrics: _Optional[str] = ...) -> None: ...

class MemberList(_message.Message):
    __slots__ = ("epoch", "version", "members", "models")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    models: _containers.RepeatedCompositeFieldContainer[ModelEntry]
    def __init__(self, epoch: _Optional[bytes] = ..., version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelEntry, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("identity", "address", "state")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    identity: _replica_pb2.ReplicaIdentity
    address: str
    state: _replica_pb2.ReplicaState
    def __init__(self, identity: _Optional[_Union[_replica_pb2.ReplicaIdentity, _Mapping]] = ..., address: _Optional[str] = ..., state: _Optional[_Union[_replica_pb2.ReplicaState, str]] = ...) -> None: ...

class ModelEntry(_message.Message):
    __slots__ = ("name", "aliases", "created", "revision", "drained")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    created: int
    revision: str
    drained: bool
    def __init__(self, name: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., created: _Optional[int] = ..., revision: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...
