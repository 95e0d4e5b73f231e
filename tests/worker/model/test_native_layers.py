"""Adjacent layers in one C++ call: the bits of the layers one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace_kernels.cpu import library
from headrace_kernels.meta import AttentionMeta
from headrace_worker.model.attention import LayerCache, StepContext, step_context
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.layers import FusedLayer
from headrace_worker.model.surgery.native import NativeLayers
from support.worker.tiny_models import replica_config

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="no C++ compiler")

BLOCK, BLOCKS = 4, 12
# Two prefills of other lengths, and a decode step: [query length, keys].
SEQUENCES = [(7, 7), (1, 9), (3, 12)]
TOKENS = sum(queries for queries, _ in SEQUENCES)


FAMILIES = ("llama-16", "llama-bias-16", "qwen2-16", "qwen3", "mistral-16", "phi3-16", "granite-16")
ALTERNATING = ("gemma2",)  # layers that differ in kind from the one before


@pytest.fixture(params=FAMILIES + ALTERNATING)
def native(request: pytest.FixtureRequest, half: Callable[[str], Path]) -> NativeLayers:
    """The layers of a family's tiny model."""
    folder = half(request.param)
    model = load(replica_config(folder))
    found = [module for module in model.module.modules() if isinstance(module, NativeLayers)]
    if request.param in ALTERNATING:
        assert [len(one.layers) for one in found] == [1] * 4
    else:
        assert len(found) == 1 and len(found[0].layers) == 3, "all layers are in one call"
        assert "Layers: 3 in one C++ call." in model.notes
    return found[0]


def step_of(native: NativeLayers, window: int = 0) -> StepContext:
    """A step over a cache of random keys and values; the same every time."""
    generator = torch.Generator().manual_seed(5)
    attention = first(native).self_attn
    shape = (2, BLOCKS, attention.kv_heads, BLOCK, attention.head_dim)
    layers = {i: LayerCache.of(0, torch.randn(shape, generator=generator), window) for i in range(len(native.layers))}
    tables = torch.randperm(BLOCKS, generator=generator).to(torch.int32).view(len(SEQUENCES), -1)
    starts, slots = [0], []
    for row, (queries, keys) in enumerate(SEQUENCES):
        starts.append(starts[-1] + queries)
        slots += [int(tables[row, p // BLOCK]) * BLOCK + p % BLOCK for p in range(keys - queries, keys)]
    lens = torch.tensor([keys for _, keys in SEQUENCES], dtype=torch.int32)
    meta = AttentionMeta(torch.tensor(starts, dtype=torch.int32), lens, tables, torch.tensor(slots), 7, 12)
    return StepContext(layers, [meta])


def inputs(native: NativeLayers) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Hidden states [1, T, N], and cos and sin [1, T, D]."""
    generator = torch.Generator().manual_seed(6)
    attention, norm = first(native).self_attn, first(native).first_norm
    angles = torch.randn(1, TOKENS, attention.head_dim // 2, generator=generator).repeat(1, 1, 2)
    return torch.randn(1, TOKENS, len(norm.weight), generator=generator), (angles.cos(), angles.sin())


def same(step: StepContext, other: StepContext, layer: int) -> bool:
    """Whether its keys and values are the same in both."""
    pairs = zip(step.layers[layer].parts, other.layers[layer].parts, strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def first(native: NativeLayers) -> FusedLayer:
    layer = native.layers[0]
    assert isinstance(layer, FusedLayer)
    return layer


@pytest.mark.parametrize("window", [0, 5])
def test_every_bit_is_that_of_the_layers_one_by_one(native: NativeLayers, window: int) -> None:
    hidden, rotary = inputs(native)
    step, alone = step_of(native, window), step_of(native, window)
    given = hidden.clone()
    with torch.no_grad(), step_context(step):
        found = native(hidden, rotary)
    assert torch.equal(hidden, given), "its input is not written to"
    with torch.no_grad(), step_context(alone):
        for layer in native.layers:
            hidden = layer(hidden, rotary)
    assert torch.equal(found, hidden)
    assert all(same(step, alone, i) for i in step.layers)
    assert step.attended == alone.attended == set(range(len(native.layers)))


def test_each_layer_is_announced_when_its_keys_are_written(native: NativeLayers) -> None:
    hidden, rotary = inputs(native)
    step, plain = step_of(native), step_of(native)
    slots = step.metas[0].slots
    announced: list[int] = []

    def written(layer: int, values: Tensor) -> None:
        stored = step.layers[layer].parts[1][slots // BLOCK, :, slots % BLOCK]
        assert torch.equal(values, stored)
        later = [other for other in step.layers if other > layer]
        assert all(same(step, plain, i) for i in later), "it was not computed yet"
        announced.append(layer)

    step.written = written
    with torch.no_grad(), step_context(step):
        found = native(hidden, rotary)
    assert announced == list(range(len(native.layers)))
    with torch.no_grad(), step_context(plain):
        assert torch.equal(found, native(hidden, rotary))


def test_the_plan_disables_it(half: Callable[[str], Path]) -> None:
    model = load(replica_config(half("llama-16")), plan=SurgeryPlan(native=False))
    assert not any(isinstance(module, NativeLayers) for module in model.module.modules())
