"""Norms, activation and rope: every backend against formulas in float64, on strided and odd-sized inputs."""

import pytest
import torch

from headrace_kernels import catalog

BACKENDS = catalog.RMS_NORM.available()
SHAPES = [(3, 5), (2, 7, 100), (300, 576)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(backend: str, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    out = catalog.RMS_NORM.named(backend)(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(backend: str, shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    kept = x.clone(), residual.clone()
    normed, total = catalog.ADD_RMS_NORM.named(backend)(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, catalog.RMS_NORM.named("torch")(total, weight, 1e-6), atol=1e-6, rtol=1e-5)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("half", [1, 20, 64])
def test_rope_angles(half: int) -> None:
    positions = torch.tensor([[0, 1], [77, 4095], [131071, 5]])[:, 0]  # strided
    frequencies, factor = torch.rand(half), 1.25
    angles = (positions.float()[:, None] * frequencies).double().repeat(1, 2)
    for name in catalog.ROPE_ANGLES.available():
        cos, sin = catalog.ROPE_ANGLES.named(name)(positions, frequencies, factor, torch.float32)
        torch.testing.assert_close(cos.double(), angles.cos() * factor, atol=1e-6, rtol=0)
        torch.testing.assert_close(sin.double(), angles.sin() * factor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(backend: str, shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(shape) * 20, torch.randn(shape)
    gate.view(-1)[0] = -500.0
    expected = (gate.double() * torch.sigmoid(gate.double()) * up.double()).float()
    merged = torch.cat((gate, up), -1)
    torch.testing.assert_close(catalog.SILU_MUL.named(backend)(merged), expected, atol=1e-6, rtol=1e-5)
    inside = torch.cat((up, merged, gate), -1)[..., shape[-1] : 3 * shape[-1]]
    torch.testing.assert_close(catalog.SILU_MUL.named(backend)(inside), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_mul(shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(shape) * 5, torch.randn(shape)
    gate.view(-1)[0] = -500.0
    expected = (torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()).float()
    merged = torch.cat((up, gate, up), -1)[..., shape[-1] :]
    for name in catalog.GELU_MUL.available():
        torch.testing.assert_close(catalog.GELU_MUL.named(name)(merged), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (7, 1), (1, 17)])
def test_sigmoid_and_softplus_have_the_same_bits_everywhere(shape: tuple[int, ...]) -> None:
    x = torch.cat(
        (torch.randn(shape) * 10, torch.tensor([-500.0, 500.0, 0.0, -20.0, 20.0, 1e-6]).expand(*shape[:-1], 6)), -1
    )
    for op, exact in ((catalog.SIGMOID, torch.sigmoid), (catalog.SOFTPLUS, torch.nn.functional.softplus)):
        for name in op.available():
            out = op.named(name)(x)
            torch.testing.assert_close(out, exact(x.double()).float(), atol=1e-9, rtol=2e-6)
            if name != "torch":
                assert torch.equal(op.named(name)(x[..., -3:]), out[..., -3:])
        nan = op.named(op.chosen("cpu"))(torch.tensor([[1.0, torch.nan]]))
        assert nan.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rotary"), [(9, 3, 64, 64), (4, 4, 16, 16), (2, 1, 80, 32)])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_rope_on_slices_of_a_merged_projection(
    backend: str, heads: int, kv_heads: int, size: int, rotary: int, tokens: int
) -> None:
    merged = torch.randn(tokens, heads + 2 * kv_heads, size)
    before = merged.clone()
    angles = torch.randn(tokens, rotary // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    pool = torch.zeros(2, -(-tokens // 16), kv_heads, 16, size)
    query, key, value = merged.split((heads, kv_heads, kv_heads), 1)
    query = catalog.ROPE_WRITE_KV.named(backend)(query, key, value, cos, sin, pool, torch.arange(tokens))
    key = pool[0].transpose(1, 2).flatten(0, 1)[:tokens]
    pairs = torch.view_as_complex(
        torch.stack((before[..., : rotary // 2], before[..., rotary // 2 : rotary]), -1).double()
    )
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, : rotary // 2].to(pairs.dtype)
    expected = torch.cat((rotated.real, rotated.imag, before[..., rotary:].double()), -1).float()
    torch.testing.assert_close(query, expected[:, :heads], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(key, expected[:, heads : heads + kv_heads], atol=2e-6, rtol=1e-5)
    assert torch.equal(merged[:, heads + kv_heads :], before[:, heads + kv_heads :])


def test_rows_do_not_depend_on_the_batch(backend: str) -> None:
    x, weight = torch.randn(200, 577), torch.randn(577)
    out = catalog.RMS_NORM.named(backend)(x, weight, 1e-5)
    assert torch.equal(catalog.RMS_NORM.named(backend)(x[7:8], weight, 1e-5), out[7:8])
