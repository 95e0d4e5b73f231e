"""--quantization: which matrices are rounded while a checkpoint is loaded, how, and when it is refused."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.packed import Form
from headrace_kernels.rounded import Products
from headrace_worker import accuracy
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.load import load
from headrace_worker.model.packable import PackedEmbedding, PackedLinear
from headrace_worker.model.quantized.online import to_fp8, to_int8
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.scaled import ScaledLinear
from headrace_worker.model.weights import SafetensorsWeights
from support.ranks.families import tiny_options
from support.worker.quantized import GROUPS_OF_32, save_quantized
from support.worker.tiny_models import replica_config, save_random

FORMS = {"fp8": Form.E4M3, "int8": Form.CODES8}
TEXT = "What is rounded while it is loaded. " * 12


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny unquantized model."""
    return save_random(tiny_options(request.param) | GROUPS_OF_32, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("method", FORMS)
def test_linears_and_experts_are_rounded(folder: Path, method: str) -> None:
    model, plain = load(replica_config(folder, quantization=method)), load(replica_config(folder))
    forms = {name: part.packed.form for name, part in model.module.named_modules() if isinstance(part, PackedLinear)}
    others = {name for name, form in forms.items() if form is not FORMS[method]}
    assert all(name.endswith(("lm_head", "gate.proj")) for name in others) and len(others) < len(forms) / 2
    assert all(part.matrix.form is Form.FLOAT32 for part in model.module.modules() if isinstance(part, PackedEmbedding))
    assert model.weight_bytes < 0.6 * plain.weight_bytes and model.arithmetic == f"float32/online-{method}"
    values = load(replica_config(folder, quantization=method), plan=SurgeryPlan.none()).module.state_dict()
    for name, tensor in load(replica_config(folder), plan=SurgeryPlan.none()).module.state_dict().items():
        difference = (values[name] - tensor).abs().max() / tensor.abs().max()
        rounded = tensor.dim() > 1 and not any(part in name for part in ("embed", "lm_head", "gate.weight", "router"))
        assert (0 < difference < 0.04) if rounded and not name.endswith("bias") else difference == 0, name


def test_values() -> None:
    x = torch.randn(48, 96) * torch.logspace(-3, 2, 48)[:, None]
    x[3] = 0
    by_output = to_fp8(x).dense()
    assert bool(((by_output - x).abs() <= x.abs() * 2**-4 + x.abs().amax(1, keepdim=True) / 448 * 2**-10).all())
    in_groups = to_int8(x).dense()
    largest = x.view(48, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert bool(((in_groups - x).abs() <= largest / 127 * 0.51 + 1e-9).all())


@pytest.mark.parametrize("method", FORMS)
def test_a_rounded_model_is_within_its_bound(folder: Path, method: str) -> None:
    found = accuracy.check(replica_config(folder, quantization=method), TEXT, 200, original=str(folder))
    assert found.bound == accuracy.EXACT and found.is_right, found
    assert found.original is not None and found.original.divergence > found.dense.divergence


def test_one_matrix_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are gone before those of the next matrix are read."""
    alive: list[weakref.ref[torch.Tensor]] = []
    read = SafetensorsWeights.read

    def watched(self: SafetensorsWeights, name: str, *cuts: Any) -> torch.Tensor:
        if name.endswith("proj.weight"):
            assert not any(one() is not None for one in alive)
        tensor = read(self, name, *cuts)
        if name.endswith("proj.weight"):
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SafetensorsWeights, "read", watched)
    load(replica_config(folder, quantization="int8"))
    assert len(alive) >= 3 * 4


def test_products_of_8_bits(folder: Path) -> None:
    """As on a GPU: linears round their inputs; experts are dequantized."""
    plan = SurgeryPlan(products=Products(outputs=True, blocks=False))
    model = load(replica_config(folder, quantization="fp8"), plan=plan)
    scaled = [part for part in model.module.modules() if isinstance(part, ScaledLinear)]
    assert len(scaled) >= 3 * 2 and model.arithmetic == "float32/online-fp8/w8a8"
    assert set(model.rounded.values()) == {False}


def test_refusals(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    save_quantized(tiny("llama"), tmp_path, "awq")
    sentence = "--quantization fp8 is for unquantized checkpoints, and this one is "
    for source, what in ((tmp_path / "quantized", "awq"), ("smollm2", "a GGUF")):
        config = replica_config(source, quantization="fp8")
        with pytest.raises(ModelUnsupportedError, match=f"{sentence}{what}: leave it out"):
            check_options(config, read_headers(resolve(str(source))))
        with pytest.raises(ModelUnsupportedError, match=sentence):
            load(config)
    with pytest.raises(ModelUnsupportedError, match="runs in bfloat16: leave --dtype out"):
        load(replica_config(tiny("llama"), quantization="int8", dtype="bfloat16"))
