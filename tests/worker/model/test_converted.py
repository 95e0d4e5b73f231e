"""Checkpoints whose projections and convolutions are stored in other pieces: whole, by part, and incomplete."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_base.errors import ModelLoadError
from headrace_worker.model.build_model import build_meta
from headrace_worker.model.converted import converted
from headrace_worker.model.load import load
from headrace_worker.model.sharding.cuts import Cut
from headrace_worker.model.weights import SafetensorsWeights
from support.worker.tiny_models import replica_config

STORED = {"olmo_hybrid": "linear_attn.k_conv1d.weight", "lara_mini": "linear_attn.in_proj.weight"}


@pytest.mark.parametrize("family", STORED)
def test_every_tensor_whole_and_by_part(family: str, tiny: Callable[[str], Path]) -> None:
    folder = tiny(family)
    assert any(STORED[family] in name for name in load_file(folder / "model.safetensors"))
    model = build_meta(AutoConfig.from_pretrained(folder), torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = converted(SafetensorsWeights([folder / "model.safetensors"]), model, shapes)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert {*weights} == {*shapes}
    for name in weights:
        assert weights.shape(name) == shapes[name] and torch.equal(weights.read(name), plain[name]), name
        rows = shapes[name][0]
        spans = ((1, rows // 3), (rows // 2, rows))
        expected = torch.cat([plain[name][slice(*span)] for span in spans])
        assert torch.equal(weights.read(name, (Cut(0, spans),)), expected), name


def test_a_part_is_missing(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copytree(tiny("olmo_hybrid"), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.2.linear_attn.k_conv1d.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks parts of 'model\.layers\.2\.linear_attn\.conv1d\.weight'"):
        load(replica_config(folder))


def test_a_tensor_of_another_size_cannot_be_split(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copytree(tiny("lara_mini"), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj.weight"
    stored[name] = stored[name][:-1].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"in_proj\.weight' of the checkpoint has shape .* the config requires"):
        load(replica_config(folder))
