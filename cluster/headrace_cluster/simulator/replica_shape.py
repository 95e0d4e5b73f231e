"""What all replicas of a simulated cluster have in common, as routers and peers receive it."""

from dataclasses import dataclass

from headrace_cluster.simulator.latency_model import LatencyModel
from headrace_proto.block_hash import derive_key
from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    CacheGroup,
    KvLayout,
    ModelFacts,
    ReplicaIdentity,
    Role,
)
from headrace_worker.core.kv.manager import ModelScope
from headrace_worker.core.layout import LAYOUT_VERSION, CacheGroupSpec, CacheLayout

KEY = derive_key(b"simulation")
REVISION = "r"
DTYPE = "bfloat16"
VOCABULARY = 1 << 31
OUTPUT_TOKEN = 1 << 30  # output tokens begin here: position p of a row is OUTPUT_TOKEN + p


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Sizes and limits of a replica; `kv_blocks` are the blocks of its whole cache, running requests included."""

    latency: LatencyModel
    block_size: int
    kv_blocks: int
    max_model_len: int
    max_waiting: int = 4096
    model: str = "m"

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.block_size, (CacheGroupSpec(0, (0,), 1, 8, 0),), 2)

    @property
    def scope(self) -> ModelScope:
        return ModelScope(self.model, REVISION, DTYPE, DTYPE)

    def facts(self, name: str, boot_id: bytes, generation: int, role: Role) -> ModelFacts:
        """What a replica reports of itself when a router connects."""
        layout = KvLayout(
            version=LAYOUT_VERSION,
            block_size=self.block_size,
            groups=[CacheGroup(index=0, num_layers=1, num_kv_heads=1, head_dim=8, window=0)],
        )
        identity = ReplicaIdentity(
            replica_id=name,
            generation=generation,
            boot_id=boot_id,
            model=self.model,
            revision=REVISION,
            dtype=DTYPE,
            kv_dtype=DTYPE,
            kv_layout=layout,
            role=role,
        )
        return ModelFacts(
            identity=identity,
            max_model_len=self.max_model_len,
            vocab_size=VOCABULARY,
            kv_blocks=self.kv_blocks,
            max_num_seqs=self.latency.max_num_seqs,
            max_num_batched_tokens=self.latency.max_num_batched_tokens,
            cache_key=KEY,
        )


def member(facts: ModelFacts, *, draining: bool = False) -> Member:
    """As the controller lists it."""
    state = REPLICA_STATE_DRAINING if draining else REPLICA_STATE_READY
    return Member(address=facts.identity.replica_id, identity=facts.identity, state=state)
