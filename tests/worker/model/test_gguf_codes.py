"""GGUF's quantization blocks as codes: every value is that of the gguf package, bit for bit."""

import mmap

import gguf
import numpy as np
import pytest
import torch

from headrace_kernels import ops
from headrace_kernels.packed import pack_codes, pack_dense
from headrace_worker.model.gguf_codes import format_of, read_codes
from headrace_worker.model.gguf_file import GgufTensor
from headrace_worker.model.gguf_tensors import packed_bytes
from headrace_worker.model.packable import PackableLinear, PackableMatrix, PackedLinear, merge_packable

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where float16 are


def blocks(name: str, rows: int, count: int) -> np.ndarray:
    """Random blocks, with finite scales."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    chance = np.random.default_rng(7)
    raw = chance.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for place in _HALVES.get(name, (0,)):
        scales = chance.normal(0, 0.1, (rows, count, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = blocks(name, 19, 6)
    found, known = read_codes(kind, raw), format_of(kind)
    expected = torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))
    assert torch.equal(found.dense(), expected)
    assert known is not None and found.group == known.group and int(found.codes.max()) < 1 << known.form.bits
    x = torch.randn(3, expected.shape[1])
    packed = pack_codes(found, known.form)
    assert torch.equal(ops.packed_rows(packed, torch.arange(19)), expected)
    _assert_close(ops.packed_matmul(x, packed), ops.packed_matmul(x, pack_dense(expected)))


@pytest.mark.parametrize("name", KINDS)
def test_the_memory_of_a_matrix_is_known_from_its_header(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    known = format_of(kind)
    assert known is not None
    matrix = PackableMatrix(read_codes(kind, blocks(name, 32, 8)), known.form)
    tensor = GgufTensor("a", tuple(matrix.shape), int(kind), 0, mmap.mmap(-1, 1))
    assert matrix.nbytes == matrix.packed().nbytes == packed_bytes(tensor)


def test_linears_of_different_kinds_are_merged_without_changing_a_value() -> None:
    parts = []
    for name in ("Q4_K", "Q6_K", "Q4_0", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        known = format_of(kind)
        assert known is not None
        count = 2 if name.endswith("K") else 16  # blocks of a row of 512 values
        parts.append(PackableLinear(PackableMatrix(read_codes(kind, blocks(name, 16, count)), known.form), None))
    merged = PackableLinear(merge_packable([part.matrix for part in parts]), None)
    assert merged is not None
    values = torch.cat([part.matrix.dense() for part in parts])
    assert torch.allclose(merged.matrix.dense(), values, rtol=1e-6, atol=1e-7)
    x = torch.randn(3, 512)
    expected = ops.packed_matmul(x, pack_dense(merged.matrix.dense()))
    _assert_close(PackedLinear(merged)(x), expected)


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of sums in float32."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=4e-6 * float(expected.abs().max()))


def test_other_kinds_have_no_format() -> None:
    assert format_of(gguf.GGMLQuantizationType.F16) is None and format_of(gguf.GGMLQuantizationType.IQ4_NL) is None
