"""Preflight and loading agree: both refuse the same models with the same sentence, and their sizes match."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.errors import HeadraceError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.headers import read_headers
from headrace_worker.model.preflight import build_without_weights
from headrace_worker.model.source import resolve

NAMES = (
    "llama-bias",
    "qwen2",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "glm4",
    "cohere2",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("family", NAMES)
def test_preflight_and_loading_agree(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    load_ranks: Callable[..., Any],
    replica_config: Callable[..., ReplicaConfig],
) -> None:
    folder = save_tiny(family)
    refused = ""
    ranks = []
    try:
        ranks = [rank for stage in load_ranks(folder, tp, pp) for rank in stage]
    except HeadraceError as error:
        refused = str(error)
    headers = read_headers(resolve(str(folder)))
    config = replica_config(folder, tp=tp, pp=pp)
    if refused:
        with pytest.raises(HeadraceError) as caught:
            build_without_weights(config)
        assert str(caught.value) == refused
        return
    footprint = build_without_weights(config)
    assert footprint.weight_bytes <= max(rank.weight_bytes for rank in ranks)
    assert footprint.layout.block_bytes == max(rank.layout.block_bytes for rank in ranks)
    assert footprint.max_positions == ranks[0].facts.max_positions
    assert headers.elements * 4 <= sum(rank.weight_bytes for rank in ranks), "counted from below"
    if len(ranks) == 1:
        assert footprint.weight_bytes == ranks[0].weight_bytes
