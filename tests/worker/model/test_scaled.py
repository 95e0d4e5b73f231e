"""Linears of 8-bit numbers, as on a GPU that has products of them: which they are, and their results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_kernels.rounded import NO_PRODUCTS, Products
from headrace_worker import accuracy
from headrace_worker.model import load as loading
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.scaled import ScaledLinear
from support.ranks.families import tiny_options
from support.worker import quantized
from support.worker.quantized import save_quantized
from support.worker.tiny_models import replica_config, save_random

BOTH = Products(outputs=True, blocks=True)
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The folder of a tiny model in FP8, in blocks of 128 x 128 or with another scale."""

    def make(kind: str, **changes: Any) -> Path:
        monkeypatch.setattr(quantized, "BLOCK", (128, 128))
        monkeypatch.setitem(quantized.FORMATS["fp8-block"], "weight_block_size", [128, 128])
        made = save_random(tiny_options("llama") | WHOLE_BLOCKS | changes, tmp_path / "made")
        save_quantized(made, tmp_path, kind)
        return tmp_path / "quantized"

    return make


def _scaled(model: torch.nn.Module) -> list[ScaledLinear]:
    return [module for module in model.modules() if isinstance(module, ScaledLinear)]


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-tensor", "compressed-tensors"])
def test_results_are_those_of_rounded_inputs(
    kind: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(kind)
    monkeypatch.setattr(loading, "products_of", lambda _device: BOTH)
    found = accuracy.check(replica_config(folder), "The same numbers, in eight bits. " * 12, 200)
    assert found.execution == "cpu in float32, inputs in 8 bits" and found.bound == accuracy.EIGHT_BITS
    print("XX", found.dense)
    monkeypatch.setattr(accuracy, "_round_inputs", lambda _module, inputs, groups: inputs)
    rounding = accuracy.check(replica_config(folder), "The same numbers, in eight bits. " * 12, 200)

    assert rounding.dense.divergence > 100 * found.dense.divergence, "the reference rounds inputs, too"


@pytest.mark.parametrize(("kind", "in_blocks"), [("fp8-block", True), ("fp8-tensor", False)])
def test_norms_and_activations_round(kind: str, in_blocks: bool, checkpoint: Callable[..., Path]) -> None:
    model = load(replica_config(checkpoint(kind)), plan=SurgeryPlan(products=BOTH))
    linears = _scaled(model.module)
    assert len(linears) == 3 * 4 and {linear.in_blocks for linear in linears} == {in_blocks}
    assert len(model.rounded) == 3 * 7 and set(model.rounded.values()) == {in_blocks}
    rounding = [module for module in model.module.modules() if getattr(module, "rounding", None) is not None]
    assert len(rounding) == 3 * 3 and {module.rounding for module in rounding} == {in_blocks}
    assert model.arithmetic == "float32/w8a8"


def test_what_has_no_such_product_is_dequantized(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("fp8-block", intermediate_size=320)  # no whole blocks
    config = replica_config(folder)
    some = load(config, plan=SurgeryPlan(products=BOTH))
    assert len(_scaled(some.module)) == 3 * 2 and len(some.rounded) == 3 * 4
    for products in (NO_PRODUCTS, Products(outputs=True, blocks=False)):
        plain = load(config, plan=SurgeryPlan(products=products))
        assert not _scaled(plain.module) and not plain.rounded and plain.arithmetic == "float32"
