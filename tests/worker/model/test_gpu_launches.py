"""How many kernels a GPU would run for a decoder layer of a step."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_kernels import AttentionMeta
from headrace_kernels.rounded import Products
from headrace_worker.model.attention import LayerCache, StepContext, step_context
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.layers import FusedLayer, JoinedLayers
from support.ranks.families import tiny_options
from support.worker.quantized import save_quantized
from support.worker.tiny_models import replica_config, save_random

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from support.kernels.recording_kernels import recorded_kernels

HAS_PRODUCTS = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
_FREE = ("empty", "_unsafe_view", "detach", "promote_types")  # of torch's operations, beside views


class _Launches(TorchDispatchMode):
    """Counts torch's operations that run a kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        views = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not views and not any(name in str(func) for name in _FREE):
            self._counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama-16", "qwen3"])
def test_nine_kernels_for_a_layer(family: str, half: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms with additions, four products, rotation with the store, attention, activation."""
    added = _kernels_of_two_layers(half(family), SurgeryPlan(linears=False, native=False), monkeypatch)
    assert added.total() == 2 * 9, added


@pytest.mark.skipif(not HAS_PRODUCTS, reason="this version of torch has no products of 8-bit numbers on CPUs")
def test_ten_kernels_for_a_layer_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention returns is rounded alone; all else by the norms and the activation."""
    save_quantized(save_random(tiny_options("llama") | {"hidden_size": 64}, tmp_path / "made"), tmp_path, "fp8-tensor")
    plan = SurgeryPlan(linears=False, native=False, products=Products(outputs=True, blocks=True))
    added = _kernels_of_two_layers(tmp_path / "quantized", plan, monkeypatch)
    assert added.total() == 2 * 10 and added["round_rows"] == 2 and added["aten._scaled_mm_v2.default"] == 8, added


def _kernels_of_two_layers(folder: Path, plan: SurgeryPlan, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each is launched by two layers of three."""
    counts: Counter[str] = Counter()
    model = load(replica_config(folder, dtype="bfloat16"), plan=plan)
    assert "Layers: 3 joined." in model.notes
    recorded_kernels(monkeypatch, lambda variant: counts.update([str(variant[0])]))
    (joined,) = [module for module in model.module.modules() if isinstance(module, JoinedLayers)]
    layers = [layer for layer in joined.layers if isinstance(layer, FusedLayer)]

    def launches(number: int) -> Counter[str]:
        attention = layers[0].self_attn
        pool = torch.zeros(2, 2, attention.kv_heads, 16, attention.head_dim, dtype=torch.bfloat16)
        starts = torch.arange(3, dtype=torch.int32)
        tables, slots = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 19])
        rows = torch.arange(2, dtype=torch.int32)
        meta = AttentionMeta(starts, torch.full((2,), 4, dtype=torch.int32), tables, slots, 1, 16, rows)
        hidden = torch.randn(1, 2, layers[0].first_norm.weight.shape[0], dtype=torch.bfloat16)
        rotary = torch.randn(1, 2, attention.head_dim, dtype=torch.bfloat16)
        counts.clear()
        step = StepContext({layer: LayerCache.of(0, pool, 0) for layer in range(3)}, [meta])
        with torch.no_grad(), step_context(step), _Launches(counts):
            JoinedLayers(layers[:number])(hidden, (rotary, rotary))
        return counts.copy()

    one, three = launches(1), launches(3)
    assert one["plan"] == three["plan"] == 1, "made once for all layers"
    return three - one
