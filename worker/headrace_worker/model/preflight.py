"""Whether a model can be split as asked, found out without weights and before any rank is started.

python -m headrace_worker.model.preflight < CONFIG     CONFIG: a msgpack ReplicaConfig; prints a sentence and exits
                                                       with 1 when it cannot be.
"""

import sys

import msgspec
import torch
from torch import Tensor

from headrace_proto.errors import HeadraceError
from headrace_worker.config import ReplicaConfig
from headrace_worker.model.build import build_meta, check_rope, read_config
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.sharding import shard
from headrace_worker.model.source import resolve
from headrace_worker.parallel.context import ParallelContext

REFUSED = 1


class _Place:
    """A rank's place among others that do not exist: cutting a model talks to nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([tensor] * self.size, dim)


def check_split(config: ReplicaConfig) -> None:
    """Raises the HeadraceError that the ranks would raise once they build their part of the model."""
    source = resolve(config.source, config.load_format, config.revision)
    gguf = GgufFile(source.path) if source.is_gguf else None
    model_config = read_config(source, gguf, config.trust_remote_code)
    check_rope(model_config, config.max_model_len)
    # Uneven splits differ between the first and the last place; stages differ at their ends.
    for stage, place in {(0, 0), (config.pp - 1, config.tp - 1)}:
        parallel = ParallelContext(_Place(place, config.tp), stage, config.pp, config.ep)
        model = build_meta(model_config, torch.float32, config.trust_remote_code)
        cache_layout(model.config, config.block_size, torch.float32.itemsize, parallel)
        shard(model, parallel, torch.device("meta"))


def main() -> int:
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReplicaConfig)
    try:
        check_split(config)
    except HeadraceError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
