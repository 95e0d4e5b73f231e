"""One answer to generate: what every attempt of it and every decision about it is made from."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_proto.replica_pb2 import Sampling


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """The same for every attempt. `label` is the client's request id: for logs, never a key (R12)."""

    label: str
    model: str
    revision: str
    tenant_salt: bytes
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    index: int = 0  # in the response
    priority: int = 0
    deadline_seconds: float | None = None  # since `ChoiceRun.begin`
