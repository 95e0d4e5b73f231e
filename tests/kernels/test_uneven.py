"""Attention to keys and values of different sizes, and to latents: every backend against the definition.

Memory is NaN where nothing was written.
"""

import pytest
import torch
from torch import Tensor

from headrace_kernels import catalog
from headrace_kernels.arguments import KernelArgumentError
from support.kernels.attention_case import Case, make_attention_case

BACKENDS = catalog.UNEVEN_ATTENTION.available()
MIXES = {
    "decode": [(1, 5), (1, 16), (1, 33), (1, 700)],
    "mixed": [(1, 31), (20, 20), (7, 39), (1, 1), (16, 48), (3, 1100)],
}


def _in_slots(part: Tensor, places: int) -> Tensor:
    """The same [B, K, P, D] as a view of memory in which each block has so many layers, and this one is the last."""
    memory = torch.full((part.shape[0], places, *part.shape[1:]), float("nan"))
    memory[:, -1] = part
    return memory[:, -1]


def _latents(lens: list[tuple[int, int]], heads: int, size: int) -> Case:
    case = make_attention_case(lens, heads=heads, kv_heads=1, head_dim=size)
    case.values[:] = case.keys
    return case


# Many heads are slow in Triton's interpreter.
@pytest.mark.parametrize(
    ("backend", "mix", "heads", "size", "values"),
    [
        (backend, mix, *sizes)
        for backend in BACKENDS
        for mix in MIXES
        for sizes in ((4, 48, 32), (128, 32, 16), (130, 64, 64), (3, 40, 33))
        if backend != "triton" or mix == "decode" or sizes[0] < 64
    ],
)
def test_latents_contain_their_values(backend: str, mix: str, heads: int, size: int, values: int) -> None:
    case = _latents(MIXES[mix], heads, size)
    keys = _in_slots(case.pool[0], 2)
    attend = catalog.UNEVEN_ATTENTION.named(backend)
    out = attend(case.query, keys, keys[..., :values], case.meta, scale=0.2)
    torch.testing.assert_close(out, case.naive(0.2).float()[..., :values], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("size", "values", "window"), [(48, 32, 0), (64, 16, 9), (24, 20, 5)])
def test_values_of_their_own_size(backend: str, deterministic: bool, size: int, values: int, window: int) -> None:
    case = make_attention_case(MIXES["mixed"], heads=6, kv_heads=2, head_dim=size)
    parts = _in_slots(case.pool[0], 3), _in_slots(case.pool[1, ..., :values], 2)
    sinks = torch.linspace(-1, 2, 6)
    out = catalog.UNEVEN_ATTENTION.named(backend)(
        case.query, *parts, case.meta, scale=0.2, window=window, sinks=sinks, deterministic=deterministic
    )
    expected = case.naive(0.2, window, sinks=sinks).float()[..., :values]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", catalog.PAGED_ATTENTION.available())
def test_layers_that_share_a_slot(backend: str) -> None:
    """What one of them writes and reads is not what the others have."""
    case = make_attention_case(MIXES["mixed"], heads=6, kv_heads=2, head_dim=32)
    memory = torch.full((2, case.pool.shape[1], 3, *case.pool.shape[2:]), float("nan"))
    memory[:, :, 1] = case.pool
    pool, key, value = memory[:, :, 1], torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, pool, case.meta, scale=0.2)
    torch.testing.assert_close(out, case.naive(0.2).float(), atol=2e-6, rtol=1e-5)
    size, last = pool.shape[3], pool.shape[1] - 1
    catalog.WRITE_KV.named(backend)(key, value, pool, torch.tensor([last * size + 1, -1, size]))
    assert torch.equal(pool[0, last, :, 1], key[0]) and torch.equal(pool[1, 1, :, 0], value[2])
    assert memory[:, 1:, 0].isnan().all() and memory[:, 1:, 2].isnan().all()


@pytest.mark.parametrize("backend", catalog.SELECT_KEYS.available())
@pytest.mark.parametrize(("heads", "size", "count"), [(16, 32, 10), (3, 48, 600), (64, 16, 64), (5, 24, 7)])
def test_the_keys_with_the_highest_scores(backend: str, heads: int, size: int, count: int) -> None:
    """Of numbers so small that all sums are exact, and many are equal."""
    case = _latents(MIXES["mixed"], 1, size)
    keys = _in_slots(case.pool[0].nan_to_num().round(), 2)
    tokens = len(case.query)
    query = torch.randint(-2, 3, (tokens, heads, size)).float()
    weights = torch.randint(-3, 4, (tokens, heads)).float()
    places, numbers = catalog.SELECT_KEYS.named(backend)(query, weights, keys, case.meta, count)
    block_size, flat = keys.shape[2], keys[:, 0].flatten(0, 1)
    token = 0
    for table, (new, length) in zip(case.meta.block_tables.long(), MIXES["mixed"], strict=True):
        own = [int(table[i // block_size]) * block_size + i % block_size for i in range(length)]
        for last in range(length - new + 1, length + 1):
            scores = ((flat[own[:last]] @ query[token].T).clamp(min=0) @ weights[token]).tolist()
            best = sorted(sorted(range(last), key=lambda i: (-scores[i], i))[:count])
            assert numbers[token] == len(best)
            assert places[token, : len(best)].tolist() == [own[i] for i in best]
            token += 1


@pytest.mark.parametrize("backend", catalog.WRITE_PART.available())
def test_stores(backend: str) -> None:
    part, rows = torch.full((4, 2, 8, 6), float("nan")), torch.randn(5, 2, 6)
    catalog.WRITE_PART.named(backend)(rows, part, torch.tensor([9, -1, 31, 10, 8]))
    flat = part.transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[[9, 31, 10, 8]], rows[[0, 2, 3, 4]])
    assert flat[11:31].isnan().all() and flat[1:8].isnan().all(), "a skipped token may be in the null block alone"


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no C++ compiler: apt-get install g++")
def test_shapes_that_do_not_fit_are_refused() -> None:
    case = _latents([(1, 5)], 4, 48)
    attend, keys = catalog.UNEVEN_ATTENTION.named("cpu"), case.pool[0]
    for wrong in (keys[..., :32], keys[0], keys[:, :, :-1]):
        with pytest.raises(KernelArgumentError):
            attend(case.query, wrong, keys[..., :32], case.meta, scale=1.0)
    with pytest.raises(KernelArgumentError):
        attend(case.query, keys, keys[:-1], case.meta, scale=1.0)
