"""How a replica hashes its KV blocks, so that a router computes the same hashes from a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from headrace_proto.block_hash import BlockHasher, CacheScope
from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.prefix.prefix_index import digests_of
from headrace_router.core.prefix.prompt_blocks import GroupBlocks, PromptBlocks

NO_ADAPTER = ""
MAX_BLOCKS = 1 << 18  # of one prompt, in all cache groups: each is hashed and looked up


@dataclass(frozen=True, slots=True)
class HashScheme:
    """The same for all replicas of a model with one dtype, layout and cluster secret. The key is secret."""

    key: bytes
    model: str
    revision: str
    dtype: str
    kv_dtype: str
    layout_version: int
    block_size: int
    windows: tuple[int, ...]  # by cache group; 0 = all

    @classmethod
    def of(cls, facts: ModelFacts) -> Self | None:
        """None for a replica without a prefix cache, or whose prompts have too many blocks."""
        identity, layout = facts.identity, facts.identity.kv_layout
        if not facts.cache_key or not layout.block_size:
            return None
        if len(layout.groups) * -(-facts.max_model_len // layout.block_size) > MAX_BLOCKS:
            return None
        groups = sorted(layout.groups, key=lambda group: group.index)
        return cls(
            facts.cache_key,
            identity.model,
            identity.revision,
            identity.dtype,
            identity.kv_dtype,
            layout.version,
            layout.block_size,
            tuple(group.window for group in groups),
        )

    def blocks(self, tenant_salt: bytes, token_ids: Sequence[int]) -> PromptBlocks:
        """The full blocks of a tenant's prompt. About 1 ms for 8,192 tokens: call it off the event loop."""
        hasher = BlockHasher(self.key)
        groups = []
        for group, window in enumerate(self.windows):
            scope = CacheScope(
                tenant_salt=tenant_salt,
                model=self.model,
                revision=self.revision,
                adapter=NO_ADAPTER,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                layout_version=self.layout_version,
                block_size=self.block_size,
                group=group,
            )
            hashes = hasher.chain(hasher.root(scope), token_ids, self.block_size)
            groups.append(GroupBlocks(window, digests_of(hashes)))
        return PromptBlocks(self.block_size, tuple(groups))
