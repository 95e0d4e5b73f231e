"""The model that the replicas simulate, and the distribution of its cache over their ranks."""

from dataclasses import dataclass

from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.core.transfer.shards import STATE_WINDOW, GroupShard, KvGroup, KvShards, RankShard
from headrace_worker.model.sharding.cuts import kv_heads

BLOCK = 4
VOCABULARY = 1000
MAX_MODEL_LEN = 256


def next_tag(tag: int, token: int) -> int:
    """The tag of a sequence: a hash of all its tokens; `tag` is that of the tokens before."""
    return hash((tag, token))


def next_token(tag: int) -> int:
    """The token that the model samples after the sequence with this tag."""
    return tag % (VOCABULARY - 10) + 10


def expected_answer(prompt: list[int], count: int) -> list[int]:
    """The expected output."""
    tag = 0
    for token in prompt:
        tag = next_tag(tag, token)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(tag))
        tag = next_tag(tag, tokens[-1])
    return tokens


@dataclass(frozen=True, slots=True)
class Model:
    """Two layers per cache group, `heads` KV heads; `windows` as in a cache layout. states: and a recurrent layer."""

    windows: tuple[int, ...]
    heads: int
    states: bool = False

    @property
    def layout(self) -> CacheLayout:
        groups = len(self.windows)
        return CacheLayout(
            BLOCK,
            tuple(CacheGroupSpec(g, (g, groups + g), 1, 8, window) for g, window in enumerate(self.windows)),
            4,
            (StateSpec(2 * groups, "recurrent", (2, 2)),) if self.states else (),
        )

    def fits(self, tp: int) -> bool:
        return self.heads >= tp or tp % self.heads == 0

    def shards(self, tp: int, pp: int) -> KvShards:
        """With pp 2 each stage has one layer of every group."""
        groups = range(len(self.windows))
        stages: list[list[tuple[int, ...]]] = (
            [[(g, len(groups) + g) for g in groups]]
            if pp == 1
            else [[(s * len(groups) + g,) for g in groups] for s in range(2)]
        )
        ranks = []
        for number, stage in enumerate(stages):
            kept = [GroupShard((2 * len(groups),) if number == pp - 1 else (), (0, 1))] if self.states else []
            for place in range(tp):
                heads = kv_heads(self.heads * tp, self.heads, place, tp)
                ranks.append(RankShard((*(GroupShard(layers, heads) for layers in stage), *kept)))
        kinds = [KvGroup(window, (BLOCK * 8 * 4,) * 2) for window in self.windows]
        kinds += [KvGroup(STATE_WINDOW, (16,))] if self.states else []
        return KvShards(BLOCK, "float32", tuple(kinds), tuple(ranks))
