"""One answer to generate: what every attempt of it and every decision about it is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_proto.replica_pb2 import Sampling
from headrace_router.core.prefix.hash_scheme import HashScheme
from headrace_router.core.prefix.prompt_blocks import PromptBlocks


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """The same for every attempt. `label` is the client's request id: for logs, never a key."""

    label: str
    model: str
    revision: str
    tenant_salt: bytes
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    index: int = 0  # in the response
    priority: int = 0
    deadline_seconds: float | None = None  # since `ChoiceRun.begin`
    session: str = ""  # of the client, if it named one
    blocks: Mapping[HashScheme, PromptBlocks] = field(default_factory=dict)  # of the prompt; none where not needed
