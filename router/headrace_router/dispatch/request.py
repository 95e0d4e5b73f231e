"""A validated request, the same for HTTP and gRPC."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from headrace_router.access.auth import Tenant
from headrace_router.answer.parser import AnswerParser
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks
from headrace_router.text.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """The tokens of a prompt, and its blocks by each scheme."""

    token_ids: list[int]
    blocks: Mapping[HashScheme, PromptBlocks]


@dataclass(frozen=True, slots=True)
class PromptHasher:
    """Hashes the KV blocks of a tenant's prompts as the replicas do. The tenant's salt is in every hash."""

    schemes: Collection[HashScheme]
    tenant: Tenant

    def prompt(self, token_ids: list[int]) -> HashedPrompt:
        """Slow: call it off the event loop."""
        return HashedPrompt(token_ids, {scheme: scheme.blocks(self.tenant.salt, token_ids) for scheme in self.schemes})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The input of a generation. `label` is the client's request id: for logs, never a key."""

    card: ModelCard
    label: str
    choices: list[ChoiceRequest]
    stop: tuple[str, ...] = ()
    echoes: tuple[str, ...] = ()  # the prompt's text per choice, when the answer repeats it
    parser: Callable[[], AnswerParser] | None = None  # for each choice, where an answer is more than text
    calls_before: int = 0  # of tools in the chat: some models count them
    special: bool = False  # special tokens stay in the text

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once for all of its choices, as OpenAI counts."""
        return sum(len(choice.prompt_token_ids) for choice in self.choices if is_first(choice))


def is_first(choice: ChoiceRequest) -> bool:
    """Whether it is the first of the choices of its prompt."""
    return choice.sampling.choice_index == 0
