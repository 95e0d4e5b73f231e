"""What is known of a replica: as the controller lists it, as it describes itself, and its newest load. Pure."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    ROLE_PREFILL,
    Load,
    ModelFacts,
    ReplicaIdentity,
    Role,
)
from headrace_router.core.prefix.hash_scheme import HashScheme
from headrace_router.core.sampling_options import default_options

C = TypeVar("C")  # the owner's type of what it keeps per model: tokenizer, template


class KnownReplica(Generic[C]):
    """Facts; what this router does with the replica is in `ReplicaState`."""

    def __init__(self, member: Member) -> None:
        self.listing: Member | None = member  # the newest entry of the member list; None = no longer a member
        self.address = member.address
        self.identity: ReplicaIdentity = member.identity
        self.model = self.revision = ""  # until it is described
        self.defaults: Mapping[str, float] = {}  # of options that requests may omit
        self.facts: ModelFacts | None = None
        self.card: C | None = None
        self.load = Load()
        self.scheme: HashScheme | None = None  # of its blocks
        self.rows = self.step_tokens = 0  # see `Candidate`
        self._kv_blocks = self._block_size = 0

    def apply(self, facts: ModelFacts, card: C) -> None:
        """Applies what it reports of itself. card: what the owner made of the facts."""
        self.identity, self.facts, self.card = facts.identity, facts, card
        self.model, self.revision = facts.identity.model, facts.identity.revision
        self.defaults = default_options(facts)
        self.scheme = HashScheme.of(facts)
        self.rows, self.step_tokens = facts.max_num_seqs, facts.max_num_batched_tokens
        self._kv_blocks, self._block_size = facts.kv_blocks, facts.identity.kv_layout.block_size

    @property
    def replica_id(self) -> str:
        return self.identity.replica_id or self.address

    @property
    def build(self) -> tuple[str, int]:
        """Id and generation: during a rollout two builds of a replica may be ready."""
        return self.replica_id, self.identity.generation

    @property
    def role(self) -> Role:
        """As the controller lists it; without a controller, as the replica reports it."""
        listed = self.listing.identity.role if self.listing is not None else None
        return listed or self.identity.role

    @property
    def is_prefill(self) -> bool:
        return self.role == ROLE_PREFILL

    @property
    def leaving(self) -> bool:
        """Whether it is drained: the end of its attempts is no failure."""
        return self.load.draining or (self.listing is not None and self.listing.state == REPLICA_STATE_DRAINING)

    @property
    def kv_tokens(self) -> float:
        """Tokens in its KV cache, as far as its facts are known."""
        return self.load.kv_usage * self._kv_blocks * self._block_size

    @property
    def free_tokens(self) -> float:
        """Tokens that its KV cache has room for; 0 = not known."""
        return self.load.free_blocks * self._block_size
