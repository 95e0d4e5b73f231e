"""A validated request, the same for HTTP and gRPC (RELIABILITY R5)."""

from dataclasses import dataclass

from headrace_proto.replica_pb2 import Sampling
from headrace_router.access.auth import Tenant
from headrace_router.text.model_card import ModelCard


@dataclass(slots=True)
class Prompt:
    """One prompt; `text` is kept for echo only and is empty when the client sent token ids without echo."""

    token_ids: list[int]
    text: str = ""


@dataclass(slots=True)
class ChoicePlan:
    """One answer to generate: a prompt and the sampling options of this choice."""

    index: int  # in the response
    prompt: Prompt
    sampling: Sampling


@dataclass(slots=True)
class GenerationRequest:
    """The input of a generation. `label` is the client's request id: for logs, never a key (R12)."""

    card: ModelCard
    tenant: Tenant
    label: str
    prompts: list[Prompt]
    choices: list[ChoicePlan]
    stop: tuple[str, ...] = ()
    deadline_seconds: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once for all of its choices, as OpenAI counts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)
