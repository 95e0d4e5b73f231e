"""Sizes that a rank holds and reads; and that its tensors are parts of the whole ones."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.model.gguf import GgufWeights
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.sharding.cuts import Cut, in_units
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.weights import cut_tensor

WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 4}


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def held(module: nn.Module) -> int:
    """Bytes of all parameters, each once."""
    return sum(entry.nbytes for entry in {entry.data_ptr(): entry for entry in module.parameters()}.values())


SPLITS = ((2, 1, False), (4, 1, False), (1, 2, False), (2, 2, False))


@pytest.mark.parametrize(
    ("family", "tp", "pp", "ep"),
    [(family, *split) for family in ("llama", "qwen3", "mixtral") for split in SPLITS]
    + [("mixtral", 2, 1, True), ("mixtral", 2, 2, True)]
    + [("qwen3_next", 4, 1, False), ("qwen3_5_text", 2, 1, False), ("qwen3_5_text", 4, 2, False)],
)
def test_each_rank_holds_and_reads_its_share(
    family: str,
    tp: int,
    pp: int,
    ep: bool,
    save_tiny: Callable[..., Path],
    load_ranks: Callable[..., Any],
) -> None:
    sizes = WIDE | {"num_hidden_layers": 8 if family == "qwen3_5_text" else 4}  # stages of equal layers
    folder = save_tiny(family, **sizes, num_key_value_heads=4, tie_word_embeddings=False)
    (whole,), *_ = load_ranks(folder, 1, 1, plan=SurgeryPlan.none())
    assert whole.weight_bytes == whole.read_bytes == held(whole.module)
    assert 0.95 < whole.read_bytes / file_bytes(folder) <= 1
    stages = load_ranks(folder, tp, pp, ep=ep, plan=SurgeryPlan.none())
    ranks = [rank for stage in stages for rank in stage]
    for rank in ranks:
        share = rank.weight_bytes / whole.weight_bytes
        assert share == pytest.approx(1 / (tp * pp), rel=0.06)
        assert held(rank.module) == rank.weight_bytes
        assert rank.read_bytes == rank.weight_bytes
        assert rank.layout.block_bytes * tp * pp == whole.layout.block_bytes
        assert rank.layout.state_bytes * tp * pp == whole.layout.state_bytes
    replicated = sum(rank.weight_bytes for rank in ranks) - whole.weight_bytes
    assert 0 <= replicated < 0.06 * whole.weight_bytes


def test_only_the_blocks_of_a_gguf_that_a_rank_needs_are_read(load_ranks: Callable[..., Any]) -> None:
    (whole,), *_ = load_ranks("smollm2", 1, 1, plan=SurgeryPlan.none())
    ranks = load_ranks("smollm2", 2, 1, plan=SurgeryPlan.none())[0]
    # Nine heads over three KV heads: one rank has two KV heads with their queries, the other one.
    assert [rank.layout.groups[0].num_kv_heads for rank in ranks] == [2, 1]
    shares = [rank.weight_bytes / whole.weight_bytes for rank in ranks]
    assert all(0.45 < share < 0.55 for share in shares) and 1 <= sum(shares) < 1.01
    read = [rank.read_bytes / whole.read_bytes for rank in ranks]
    assert all(0.45 < share < 0.55 for share in read) and 1 <= sum(read) < 1.01


def test_parts_of_gguf_tensors_are_parts_of_the_whole() -> None:
    weights = GgufWeights(GgufFile(resolve("smollm2").path))
    layer = "model.layers.3."
    for name, cuts in {
        "model.embed_tokens.weight": (Cut(0, ((24576, 24600),)),),
        f"{layer}self_attn.q_proj.weight": (Cut(0, ((192, 384),)),),
        f"{layer}self_attn.k_proj.weight": (Cut(0, ((64, 192),)),),
        f"{layer}self_attn.o_proj.weight": (Cut(1, ((384, 576),)),),
        f"{layer}mlp.down_proj.weight": (Cut(1, ((7, 45), (700, 1537 - 1))),),  # not at the edges of blocks
        f"{layer}mlp.up_proj.weight": (Cut(0, ((0, 3), (9, 11))), Cut(1, ((31, 33),))),
        f"{layer}input_layernorm.weight": (Cut(0, ((1, 5),)),),
    }.items():
        assert torch.equal(weights.read(name, cuts), cut_tensor(weights.read(name), cuts)), name


def test_a_stage_boundary_costs_two_reductions_a_layer(
    save_tiny: Callable[..., Path], sharded: Callable[..., Any]
) -> None:
    replica = sharded(save_tiny("llama"), 2, 2)
    replica.run([[5, 6, 7]], 1)
    first, last = (stage[0].parallel.tp.calls for stage in replica.models)
    assert [kind for kind, _ in first] == ["reduce"] * (1 + 2 * 2)  # embedding, two layers
    assert [kind for kind, _ in last] == ["reduce"] * 2 + ["gather"]  # one layer, head
    assert last[-1][1] == (1, 1, 159)  # logits of the sampled row only: half of the vocabulary, rounded up


def test_shares_in_units() -> None:
    def sizes(size: int, ranks: int, unit: int) -> list[int]:
        spans = [in_units(size, rank, ranks, unit, "inner dimensions") for rank in range(ranks)]
        assert spans[0][0] == 0 and spans[-1][1] == size
        assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(spans))
        return [stop - start for start, stop in spans]

    assert sizes(768, 4, 128) == [256, 256, 128, 128]  # Qwen3-30B-A3B in blocks of 128
    assert sizes(18_944, 8, 128) == [2432] * 4 + [2304] * 4  # Qwen2.5-7B
    assert sizes(96, 2, 40) == [48, 48]  # no whole units
    assert sizes(256, 4, 128) == [64] * 4  # fewer units than ranks
    with pytest.raises(ModelUnsupportedError, match="tp 3 does not divide the 256 inner dimensions"):
        sizes(256, 3, 128)
