"""The model that replicas pretend to run, and how its cache is spread over their ranks."""

from dataclasses import dataclass

from headrace_worker.layout import CacheGroupSpec, CacheLayout
from headrace_worker.model.sharding.cuts import kv_heads
from headrace_worker.transfer.shards import KvShards, RankShard

BLOCK = 4
VOCABULARY = 1000
MAX_MODEL_LEN = 256


def follow(tag: int, token: int) -> int:
    """What stands for all tokens up to here, `tag` standing for those before."""
    return hash((tag, token))


def draw(tag: int) -> int:
    """The token that the model draws after what `tag` stands for."""
    return tag % (VOCABULARY - 10) + 10


def answer(prompt: list[int], count: int) -> list[int]:
    """The undisturbed output."""
    tag = 0
    for token in prompt:
        tag = follow(tag, token)
    tokens = []
    for _ in range(count):
        tokens.append(draw(tag))
        tag = follow(tag, tokens[-1])
    return tokens


@dataclass(frozen=True, slots=True)
class Model:
    """Two layers per cache group, so many KV heads; `windows` as in a cache layout."""

    windows: tuple[int, ...]
    heads: int

    @property
    def layout(self) -> CacheLayout:
        groups = len(self.windows)
        return CacheLayout(
            BLOCK,
            tuple(CacheGroupSpec(g, (g, groups + g), 1, 8, window) for g, window in enumerate(self.windows)),
            4,
        )

    def fits(self, tp: int) -> bool:
        return self.heads >= tp or tp % self.heads == 0

    def shards(self, tp: int, pp: int) -> KvShards:
        """With pp 2 each stage has one layer of every group."""
        groups = range(len(self.windows))
        stages = (
            [[(g, len(groups) + g) for g in groups]]
            if pp == 1
            else [[(s * len(groups) + g,) for g in groups] for s in range(2)]
        )
        ranks = [RankShard(tuple(stage), kv_heads(self.heads, place, tp)) for stage in stages for place in range(tp)]
        return KvShards(BLOCK, 8, "float32", self.windows, tuple(ranks))
