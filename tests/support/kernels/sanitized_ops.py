"""Random calls of every C++ op, built with AddressSanitizer and UndefinedBehaviorSanitizer, against the reference.

A separate process, in which the sanitizers' runtimes are loaded first: test_sanitizers.py starts it. An access outside
of a tensor ends it. With the argument `overflow` it makes such an access.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace_kernels.cpu import build

_CHECKS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
vars(build)["_FLAGS"] = (*(flag for flag in build._FLAGS if flag != "-O3"), *_CHECKS)
vars(build)["_TIMEOUT_S"] = 600
os.environ.pop("LD_PRELOAD", None)  # this process has the runtimes; the compiler would be slow with them

from headrace_kernels import catalog  # noqa: E402
from headrace_kernels.arguments import KernelArgumentError  # noqa: E402
from headrace_kernels.cpu.exchange import Exchange, segment_bytes  # noqa: E402
from headrace_kernels.cpu.layers import Branch, LayerPool, Layers, LayerWeights, Norm, Product  # noqa: E402
from headrace_kernels.cpu.library import load  # noqa: E402
from headrace_kernels.meta import AttentionMeta  # noqa: E402
from headrace_kernels.packed import Codes, Form, pack_codes, pack_dense  # noqa: E402
from support.kernels.attention_case import Case, make_attention_case  # noqa: E402

COUNT = 100  # examples of each property
property_test = settings(
    max_examples=COUNT, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31)


def agrees(op: Any, *arguments: Any, tolerance: float = 2e-5, **options: Any) -> None:
    """The C++ backend and the reference return the same for copies of these arguments."""
    results = [
        op.named(name)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments), **options)
        for name in ("cpu", "torch")
    ]
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    lens = [(min(q, s), s) for q, s in draw(st.lists(st.tuples(sizes, st.integers(1, 1200)), min_size=1, max_size=4))]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.one_of(st.integers(1, 9), st.integers(60, 70)))
    window = draw(st.one_of(st.just(0), st.integers(1, 700)))
    case = make_attention_case(
        lens, heads=kv_heads * group, kv_heads=kv_heads, head_dim=draw(st.sampled_from([16, 32, 48, 80, 24])),
        block_size=draw(st.sampled_from([1, 3, 16, 64])), window=window, seed=draw(seeds),
    )  # fmt: skip
    options: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": draw(st.sampled_from([0.0, 20.0]))}
    if draw(st.booleans()):
        options["sinks"] = torch.randn(kv_heads * group)
    torch.set_num_threads(draw(st.integers(1, 3)))
    return case, options


@property_test
@given(attention_cases())
def attention(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, options = drawn
    agrees(catalog.PAGED_ATTENTION, case.query, case.pool, case.meta, **options)


@property_test
@given(attention_cases(), st.data())
def attention_with_wrong_values(drawn: tuple[Case, dict[str, Any]], data: st.DataObject) -> None:
    """Any value anywhere is computed or refused."""
    case, options = drawn
    assume(case.query.shape[2] % 16 == 0 and case.query.shape[1] // case.pool.shape[2] <= 64)
    name = data.draw(st.sampled_from(["query_starts", "seq_lens", "block_tables"]))
    values = getattr(case.meta, name)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
    values[place] = data.draw(st.one_of(st.integers(-3, 200), st.sampled_from([-(2**31), 2**31 - 1, 2**30])))
    try:
        catalog.PAGED_ATTENTION.named("cpu")(case.query, case.pool, case.meta, **options)
    except KernelArgumentError:
        return


@property_test
@given(st.integers(0, 4), st.integers(1, 5), sizes, st.integers(1, 9), st.data())
def stores(blocks: int, heads: int, head_dim: int, block_size: int, data: st.DataObject) -> None:
    room = blocks * block_size
    slots = data.draw(st.lists(st.integers(-2, room + 1), max_size=9, unique=True))
    tokens = len(slots)
    merged = torch.randn(tokens, heads * 2, head_dim)
    pools = [torch.zeros(2, blocks, heads, block_size, head_dim) for _ in range(2)]
    arguments = merged[:, :heads], merged[:, heads:]
    inside = torch.tensor([slot if slot < room else -1 for slot in slots], dtype=torch.int64)
    for pool, name in zip(pools, ("cpu", "torch"), strict=True):
        if blocks:
            catalog.WRITE_KV.named(name)(*arguments, pool, inside)
    assert torch.equal(*pools)
    if max(slots, default=-1) >= room:
        try:
            catalog.WRITE_KV.named("cpu")(*arguments, pools[0], torch.tensor(slots))
        except KernelArgumentError:
            return
        raise AssertionError("a slot outside of the pool was accepted")


@property_test
@given(st.integers(0, 40), sizes, st.integers(0, 5), seeds)
def row_ops(rows: int, width: int, extra: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, width + extra)[:, :width]
    weight = torch.randn(width)
    agrees(catalog.RMS_NORM, x, weight, 1e-5)
    agrees(catalog.ADD_RMS_NORM, x, torch.randn(rows, width), weight, 1e-5)
    agrees(catalog.SILU_MUL, torch.randn(rows, 2 * width + extra)[:, : 2 * width])
    agrees(catalog.GELU_MUL, torch.randn(rows, 2 * width + extra)[:, : 2 * width])
    agrees(catalog.ROW_LOGSUMEXP, x)
    agrees(catalog.ROW_MAX, x)
    keys = torch.randint(-(2**62), 2**62, (rows,))
    agrees(catalog.GUMBEL_NOISE_AT, keys, torch.randint(2**20, (rows, extra)))
    agrees(catalog.GUMBEL_ARGMAX, x, keys)


@property_test
@given(st.sampled_from(list(Form)), st.integers(1, 70), st.integers(1, 4), st.integers(0, 30), st.booleans())
def packed_products(form: Form, outputs: int, groups: int, rows: int, bf16: bool) -> None:
    torch.manual_seed(rows)
    if form < Form.CODES8:
        packed = pack_dense(torch.randn(outputs, groups * 32).to((torch.float32, torch.bfloat16)[form]))
    else:
        codes = torch.randint(0, 1 << form.bits, (outputs, groups * 32), dtype=torch.uint8)
        scale = torch.rand(outputs, groups).half()
        packed = pack_codes(Codes(codes, scale, scale if bf16 else None, 8), form)
    agrees(catalog.PACKED_ROWS, packed, torch.randint(0, outputs, (rows,)))
    agrees(catalog.PACKED_MATMUL, torch.randn(rows, groups * 32), packed, torch.randn(outputs), bf16, tolerance=1e-3)


@property_test
@given(st.integers(0, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.booleans())
def decoder_layers(tokens: int, kv_heads: int, group: int, hidden: int, middle: int, normed: bool) -> None:
    """Two layers; the worker's tests compare their values."""
    heads, width = kv_heads * group, (group + 2) * kv_heads * 16

    def norm(size: int) -> Norm:
        return Norm(torch.rand(size), 1e-5)

    def product(outputs: int, inputs: int) -> Product:
        return Product(pack_dense(torch.randn(outputs, inputs)), torch.randn(outputs) if normed else None)

    layers = [
        LayerWeights(
            norm(hidden), product(width, hidden), norm(16) if normed else None, norm(16) if normed else None,
            product(hidden, heads * 16), norm(hidden), product(2 * middle, hidden), product(hidden, middle),
            heads, kv_heads, 16, 0.25, 0.0, torch.randn(heads) if normed else None,
            Branch(norm(hidden) if normed else None, 0.5), Branch(norm(hidden) if normed else None), normed,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert all(layer.fits() for layer in layers)
    blocks = tokens // 4 + 1
    starts, lens = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    tables, slots = torch.arange(blocks, dtype=torch.int32)[None], torch.arange(tokens)
    meta = AttentionMeta(starts, lens, tables, slots, tokens, tokens)
    pools = [LayerPool(torch.zeros(2, blocks, kv_heads, 4, 16), 0, 0) for _ in layers]
    native = Layers(layers)
    native.bind(pools)
    out, values = native(torch.randn(1, tokens, hidden), [meta], *torch.randn(2, tokens, 16))
    assert bool(out.isfinite().all())
    for layer, value in zip(pools, values, strict=True):
        assert torch.equal(layer.pool[1].transpose(1, 2).reshape(-1, kv_heads, 16)[:tokens], value)


@property_test
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 3), sizes, st.data())
def ropes(tokens: int, heads: int, kv_heads: int, head_dim: int, data: st.DataObject) -> None:
    half = data.draw(st.integers(0, head_dim // 2))
    merged = torch.randn(tokens, heads + kv_heads, head_dim)
    cos, sin = torch.randn(2, tokens, 2 * half)
    value, slots = torch.randn(tokens, kv_heads, head_dim), torch.arange(tokens)
    pools = [torch.zeros(2, tokens + 1, kv_heads, 1, head_dim) for _ in range(2)]
    queries = [
        catalog.ROPE_WRITE_KV.named(name)(
            merged[:, :heads].clone(), merged[:, heads:].clone(), value, cos, sin, pool, slots
        )
        for name, pool in zip(("cpu", "torch"), pools, strict=True)
    ]
    torch.testing.assert_close(*queries, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(*pools, atol=2e-5, rtol=2e-5)


@property_test
@given(st.integers(2, 4), st.integers(0, 300), st.integers(1, 3))
def exchanges(size: int, count: int, lines: int) -> None:
    """Ranks as threads, over a segment with nothing behind it."""
    slot_bytes = 64 * lines
    segment = torch.zeros(segment_bytes(size, slot_bytes), dtype=torch.uint8)
    parts = [torch.randn(count) for _ in range(size)]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            exchange = Exchange(segment.data_ptr(), rank, size, slot_bytes, 60_000)
            mine, out = parts[rank].clone(), torch.empty(size, count)
            assert exchange.gather(mine, out) == 0 and torch.equal(out, torch.stack(parts))
            assert exchange.sum(mine) == 0
            torch.testing.assert_close(mine, torch.stack(parts).sum(0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


PROPERTIES: tuple[Callable[[], None], ...] = (
    attention,
    attention_with_wrong_values,
    stores,
    row_ops,
    packed_products,
    decoder_layers,
    ropes,
    exchanges,
)

if __name__ == "__main__":
    if "overflow" in sys.argv:
        out, x, weight = torch.empty(8), torch.ones(8), torch.ones(4)
        load().headrace_rms_norm(out.data_ptr(), x.data_ptr(), 8, weight.data_ptr(), 1, 8, 1e-5, 1)
    for run_property in PROPERTIES:
        run_property()
        print(run_property.__name__, "ok", flush=True)
