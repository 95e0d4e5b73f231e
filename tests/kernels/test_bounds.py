"""What the native backends do with arguments that they were not written for: torch computes them, or they are refused.

Kernels compute addresses from shapes, lengths, tables and slots. With AddressSanitizer: test_sanitizers.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_kernels import DrawOptions, catalog
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.meta import StateMeta
from support.kernels.attention_case import Case, make_attention_case

ATTENTION = catalog.PAGED_ATTENTION.available()
NATIVE = [name for name in ATTENTION if name != "torch"]
needs_cpp = pytest.mark.skipif("cpu" not in NATIVE, reason="no C++ compiler: apt-get install g++")
Change = Callable[[Case], None]


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 1), (65, 1), (71, 1), (256, 2)])
def test_any_number_of_query_heads_per_kv_head(backend: str, heads: int, kv_heads: int) -> None:
    case = make_attention_case([(1, 20), (9, 25), (1, 600)], heads=heads, kv_heads=kv_heads)
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.3)
    torch.testing.assert_close(out, case.naive(0.3).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ATTENTION)
def test_sequences_without_keys_give_zeros(backend: str) -> None:
    case = make_attention_case([(1, 20), (9, 25), (1, 3)])
    case.meta.seq_lens[1] = 0
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.3)
    assert not out[1:10].any()
    torch.testing.assert_close(out[[0, 10]], case.naive(0.3).float()[[0, 10]], atol=2e-6, rtol=1e-5)


def _wide_meta(case: Case) -> None:
    meta = case.meta
    case.meta = dataclasses.replace(
        meta,
        query_starts=meta.query_starts.long(),
        seq_lens=meta.seq_lens.long(),
        block_tables=meta.block_tables.clamp(max=0x7FFF).long(),
    )


def _strided_meta(case: Case) -> None:
    meta = case.meta
    case.meta = dataclasses.replace(
        meta,
        query_starts=torch.stack([meta.query_starts, meta.query_starts + 7], 1)[:, 0],
        block_tables=meta.block_tables.T.contiguous().T,
    )


def _strided_pool(case: Case) -> None:
    case.pool = case.pool.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("change", [_wide_meta, _strided_meta, _strided_pool])
def test_other_types_and_strides_have_the_same_result(backend: str, change: Change) -> None:
    case = make_attention_case([(1, 20), (9, 25), (1, 3)], heads=4)
    change(case)
    out = catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.3)
    torch.testing.assert_close(out, case.naive(0.3).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", catalog.WRITE_KV.available())
def test_stores_with_other_types_and_strides(backend: str) -> None:
    key, value = torch.randn(2, 5, 2, 16)
    slots = torch.randperm(12)[:5]
    expected = torch.zeros(2, 3, 2, 4, 16)
    catalog.WRITE_KV.named("torch")(key, value, expected, slots)
    strided = torch.zeros(2, 3, 4, 2, 16).transpose(2, 3)
    catalog.WRITE_KV.named(backend)(key, value, strided, slots)
    assert torch.equal(strided, expected)
    pool = torch.zeros_like(expected)
    catalog.WRITE_KV.named(backend)(key, value.half(), pool, slots.int())
    assert torch.equal(pool, torch.stack([expected[0], expected[1].half().float()]))


def _set(name: str, value: object) -> Change:
    return lambda case: setattr(case.meta, name, value)


def _entry(name: str, place: Any, value: int) -> Change:
    return lambda case: getattr(case.meta, name).__setitem__(place, value)


@needs_cpp
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_entry("query_starts", 1, -1), "tokens or keys"),
        (_entry("query_starts", 3, 12), "tokens or keys"),
        (_entry("seq_lens", 1, 2**31 - 1), "table"),
        (_entry("block_tables", (1, 0), -1), "table"),
        (_entry("block_tables", (1, 1), 2**30), "table"),
    ],
)
def test_values_that_name_other_memory_are_refused_by_the_cpp_attention(change: Change, sentence: str) -> None:
    case = make_attention_case([(1, 20), (9, 25), (1, 3)])
    change(case)
    with pytest.raises(KernelArgumentError, match=sentence):
        catalog.PAGED_ATTENTION.named("cpu")(case.query, case.pool, case.meta, scale=0.3)


@needs_cpp
def test_slots_outside_of_the_pool_are_refused_by_the_cpp_store() -> None:
    pool, key = torch.zeros(2, 3, 2, 4, 16), torch.ones(2, 2, 16)
    for slot in (12, 2**62):
        with pytest.raises(KernelArgumentError, match="slot is outside"):
            catalog.WRITE_KV.named("cpu")(key, key, pool, torch.tensor([0, slot]))
    assert not pool.any()


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize(
    "change",
    [
        _set("query_starts", torch.tensor([0, 1, 10], dtype=torch.int32)),
        _set("seq_lens", torch.tensor([20, 25], dtype=torch.int32)),
        _set("block_tables", torch.zeros(2, 4, dtype=torch.int32)),
        lambda case: setattr(case, "query", case.query[:, :3]),
        lambda case: setattr(case, "query", case.query[..., :8]),
        lambda case: setattr(case, "pool", case.pool[0]),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_attention(backend: str, change: Change) -> None:
    case = make_attention_case([(1, 20), (9, 25), (1, 3)])
    change(case)
    with pytest.raises(KernelArgumentError, match=r"attention: .* do not fit"):
        catalog.PAGED_ATTENTION.named(backend)(case.query, case.pool, case.meta, scale=0.3)


_HEADS, _TABLE = torch.zeros(3, 4, 16), torch.zeros(3, 8)
_POOL, _SLOTS = torch.zeros(2, 3, 4, 8, 16), torch.zeros(3, dtype=torch.int64)
_KEYS = torch.zeros(3, dtype=torch.int64)
_SAMPLING = DrawOptions(torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.int64))
_STATES = torch.zeros(2, 4, 16, 16)
_SEQUENCE = StateMeta(*(torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [0], [1])))
UNFIT: list[tuple[Any, tuple[Any, ...]]] = [
    (catalog.WRITE_KV, (_HEADS, _HEADS[:, :3], _POOL, _SLOTS)),
    (catalog.WRITE_KV, (_HEADS, _HEADS, _POOL, _SLOTS[:2])),
    (catalog.ROPE_WRITE_KV, (_HEADS, _HEADS, _HEADS[:2], _TABLE, _TABLE, _POOL, _SLOTS)),
    (catalog.ROPE_WRITE_KV, (_HEADS, _HEADS, _HEADS, _TABLE, _TABLE[:, :6], _POOL, _SLOTS)),
    (catalog.RMS_NORM, (_TABLE, torch.ones(9), 1e-5)),
    (catalog.ADD_RMS_NORM, (_TABLE, _TABLE, torch.ones(7), 1e-5)),
    (catalog.SILU_MUL, (_TABLE[:, :7],)),
    (catalog.GATED_RMS_NORM, (_TABLE, _TABLE[:2], torch.ones(8), 1e-5)),
    (catalog.GATED_RMS_NORM, (_TABLE, _TABLE, torch.ones(8), 1e-5, 3)),
    (catalog.SSD, (_HEADS, _TABLE[:, :3], torch.zeros(4), _HEADS[:, :2], _HEADS[:, :2], _STATES, _SEQUENCE)),
    (catalog.SSD, (_HEADS, _TABLE[:, :4], torch.zeros(4), _HEADS[:, :3], _HEADS[:, :3], _STATES, _SEQUENCE)),
    (catalog.SSD, (_HEADS, _TABLE[:, :4], torch.zeros(4), _HEADS, _HEADS, _STATES.half(), _SEQUENCE)),
    (catalog.SELECTIVE_SCAN, (_TABLE, _TABLE, _TABLE.t(), _TABLE[:, :2], _TABLE[:, :2], _TABLE[None], _SEQUENCE)),
    (catalog.DRAW, (_TABLE, _KEYS[:2], _KEYS, _SAMPLING)),
    (catalog.DRAW, (_TABLE, _KEYS, _KEYS.int(), _SAMPLING)),
    (catalog.DRAW, (_TABLE, _KEYS, _KEYS, DrawOptions(torch.zeros(3, 2), _SAMPLING.integers))),
]


@pytest.mark.parametrize(("op", "arguments"), UNFIT, ids=lambda value: getattr(value, "name", ""))
def test_shapes_that_do_not_fit_are_refused(op: Any, arguments: tuple[Any, ...]) -> None:
    for backend in op.available():
        if backend != "torch":
            with pytest.raises(KernelArgumentError, match="do not fit"):
                op.named(backend)(*arguments)
