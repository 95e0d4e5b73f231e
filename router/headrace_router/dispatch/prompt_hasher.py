"""The KV blocks of prompts, as the replicas of a model hash them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace_router.access.auth import Tenant
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks


@dataclass(frozen=True, slots=True)
class Prompt:
    """Its tokens, and its blocks by each scheme."""

    token_ids: list[int]
    blocks: Mapping[HashScheme, PromptBlocks]


@dataclass(frozen=True, slots=True)
class PromptHasher:
    """For the prompts of a tenant, whose salt is in every hash."""

    schemes: Collection[HashScheme]
    tenant: Tenant

    def prompt(self, token_ids: list[int]) -> Prompt:
        """Slow: call it off the event loop."""
        return Prompt(token_ids, {scheme: scheme.blocks(self.tenant.salt, token_ids) for scheme in self.schemes})
