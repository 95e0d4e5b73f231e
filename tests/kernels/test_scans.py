"""State space models: the functions of transformers; bits that do not depend on the batch, the pieces, the backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.jamba.modeling_jamba import mamba_selective_scan

from headrace_kernels import catalog
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.meta import StateMeta

H, E, G = 6, 5, 2  # heads, channels of each, groups


def _meta(lengths: list[int], reads: list[int], writes: list[int]) -> StateMeta:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return StateMeta(*(torch.as_tensor(values).to(torch.int32) for values in (starts, reads, writes)))


def _ssd(tokens: int, size: int) -> dict[str, torch.Tensor]:
    """Arguments with a row for each token; some are parts of wider rows, as in a model."""
    mixed = torch.randn(tokens, H * E + 2 * G * size)
    x, key, query = mixed.split([H * E, G * size, G * size], 1)
    return {
        "x": x.view(tokens, H, E),
        "dt": torch.randn(tokens, H) * 4,
        "key": key.view(tokens, G, size),
        "query": query.view(tokens, G, size),
    }


def _selective_scan(tokens: int, size: int) -> dict[str, torch.Tensor]:
    channels = H * E
    x, gate = torch.randn(tokens, 2 * channels).split(channels, 1)
    key, query = torch.randn(tokens, 2 * size).split(size, 1)
    return {"x": x, "dt": torch.randn(channels, tokens).t() * 4, "key": key, "query": query, "gate": gate}


# The op, its arguments by token, the shape of its state, and its other arguments.
SCANS: dict[str, tuple[Any, Callable[[int, int], dict[str, torch.Tensor]], tuple[int, ...], Callable[[int], Any]]] = {
    "ssd": (
        catalog.SSD,
        _ssd,
        (H, E),
        lambda size: {
            "decay": -torch.rand(H) * 2,
            "skip": torch.randn(H),
            "dt_bias": torch.randn(H),
            "dt_limit": (0.01, 3.0),
        },
    ),
    "selective_scan": (
        catalog.SELECTIVE_SCAN,
        _selective_scan,
        (H * E,),
        lambda size: {
            "decay": -torch.rand(H * E, size) * 2,
            "skip": torch.randn(H * E),
            "dt_bias": torch.randn(H * E),
        },
    ),
}
# In torch the bits of softplus depend on the place in a tensor where sizes are no multiples of a vector.
EXACT = [(name, backend) for name, (op, *_) in SCANS.items() for backend in op.available() if backend != "torch"]


@pytest.mark.parametrize("backend", catalog.SSD.available())
def test_ssd_is_that_of_transformers(backend: str) -> None:
    torch.manual_seed(0)
    for size in (1, 7, 16, 40):
        rows, options = _ssd(21, size), SCANS["ssd"][3](size)
        pool = torch.zeros(2, H, E, size)
        found = catalog.SSD.named(backend)(**rows, pool=pool, meta=_meta([21], [0], [1]), **options)
        x, dt, key, query = (rows[name][None] for name in ("x", "dt", "key", "query"))
        expected, state = mamba2_chunk_scan(
            x, dt, options["decay"], key, query, 8, D=options["skip"], dt_bias=options["dt_bias"], dt_softplus=True,
            dt_limit=options["dt_limit"], return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(found, expected[0], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(pool[1], state[0], atol=2e-4, rtol=2e-4)
        assert not pool[0].any()


@pytest.mark.parametrize("backend", catalog.SELECTIVE_SCAN.available())
def test_selective_scan_is_that_of_transformers(backend: str) -> None:
    torch.manual_seed(1)
    for size in (1, 7, 16, 40):
        rows, options = _selective_scan(21, size), SCANS["selective_scan"][3](size)
        pool = torch.zeros(2, H * E, size)
        found = catalog.SELECTIVE_SCAN.named(backend)(**rows, pool=pool, meta=_meta([21], [0], [1]), **options)
        x, dt, key, query, gate = (rows[name].t()[None] for name in ("x", "dt", "key", "query", "gate"))
        expected, state = mamba_selective_scan(
            x, dt, options["decay"], key, query, D=options["skip"], z=gate, delta_bias=options["dt_bias"],
            delta_softplus=True, return_last_state=True,
        )  # fmt: skip
        torch.testing.assert_close(found, expected[0].t(), atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(pool[1], state[0], atol=2e-4, rtol=2e-4)
        assert not pool[0].any()


@pytest.mark.parametrize(("name", "backend"), EXACT)
@pytest.mark.parametrize("size", [7, 16, 40])
def test_a_state_continues_whatever_the_pieces_and_the_batch_are(name: str, backend: str, size: int) -> None:
    """Bit by bit: in pieces, from a slot into another one, beside other sequences and empty ones."""
    torch.manual_seed(2)
    op, make, shape, others = SCANS[name]
    run, rows, options = op.named(backend), make(13, size), others(size)
    whole, pool = torch.zeros(2, *shape, size), torch.zeros(8, *shape, size)
    expected = run(**rows, pool=whole, meta=_meta([13], [0], [1]), **options)
    start, read = 0, 0
    for count, write in ((1, 3), (2, 5), (7, 5), (3, 2)):
        part = slice(start, start + count)
        beside = {key: torch.cat([other, rows[key][part]]) for key, other in make(4, size).items()}
        meta = _meta([4, count, 0], [0, read, 0], [7, write, 0])
        assert torch.equal(run(**beside, pool=pool, meta=meta, **options)[4:], expected[part])
        start, read = start + count, write
    assert torch.equal(pool[2], whole[1])
    # Several pieces of one sequence in one call: each reads the slot that the one before wrote.
    beside = {key: torch.cat([other, rows[key]]) for key, other in make(4, size).items()}
    meta = _meta([4, 2, 1, 10], [0, 0, 3, 4], [7, 3, 4, 6])
    assert torch.equal(run(**beside, pool=pool, meta=meta, **options)[4:], expected)
    assert torch.equal(pool[6], whole[1])
    assert not pool[0].any(), "slot 0 stays the state of nothing"
    thrown_away = run(**rows, pool=pool, meta=_meta([13], [0], [0]), **options)
    assert torch.equal(thrown_away, expected) and not pool[0].any()


@pytest.mark.parametrize(("name", "backend"), [pair for pair in EXACT if pair[1] == "cpu"])
@pytest.mark.parametrize(
    ("lengths", "reads", "writes", "sentence"),
    [
        ([2, 2], [0, 0], [1, 1], "tokens or keys that do not exist"),
        ([4, -1], [0, 0], [1, 1], "tokens or keys that do not exist"),
        ([2, 1], [0, 2], [1, 1], "a slot is outside of the pool"),
        ([2, 1], [0, 0], [1, -1], "a slot is outside of the pool"),
    ],
)
def test_values_that_name_other_memory_are_refused(
    name: str, backend: str, lengths: list[int], reads: list[int], writes: list[int], sentence: str
) -> None:
    op, make, shape, others = SCANS[name]
    pool = torch.zeros(2, *shape, 16)
    with pytest.raises(KernelArgumentError, match=sentence):
        op.named(backend)(**make(3, 16), pool=pool, meta=_meta(lengths, reads, writes), **others(16))
    assert not pool.any()
