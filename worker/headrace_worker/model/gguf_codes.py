"""Quantization blocks of GGUF files as codes with scales, without changing a value.

The formats are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h): simple ones have 32 values and a scale
in float16, K-quants 256 values whose scales are products of a float16 and a small integer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

from headrace_kernels.packed import Codes, Form


@dataclass(frozen=True)
class CodeFormat:
    """form: that the codes fit into. group: values with one scale. read: of blocks [rows, blocks, bytes]."""

    form: Form
    group: int
    read: Callable[[Tensor], Codes]


def format_of(kind: gguf.GGMLQuantizationType) -> CodeFormat | None:
    """None where the values stay no codes."""
    return _FORMATS.get(kind)


def read_codes(kind: gguf.GGMLQuantizationType, raw: np.ndarray) -> Codes:
    """raw: [rows, bytes] of whole blocks, of a kind that has a format."""
    blocks = torch.from_numpy(np.require(raw, requirements=["C", "W"]))
    return _FORMATS[kind].read(blocks.view(len(raw), -1, gguf.GGML_QUANT_SIZES[kind][1]))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a place of each block: [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """[…, n] -> […, 2 n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor) -> Tensor:
    """[…, n] -> […, 8 n], the lowest bit of each byte first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _parts(values: Tensor, count: int) -> Tensor:
    """[…, n] -> […, count, n / count]."""
    return values.reshape(*values.shape[:-1], count, -1)


def _rows(values: Tensor) -> Tensor:
    """[rows, blocks, …] -> [rows, n]."""
    return values.reshape(len(values), -1).contiguous()


def _simple(*, minimum: bool, fifth: bool) -> Callable[[Tensor], Codes]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum, fifth bits of the codes, the other four bits."""

    def read(blocks: Tensor) -> Codes:
        place = 4 if minimum else 2
        codes = _nibbles(blocks[..., -16:])
        if fifth:
            codes = codes | _bits(blocks[..., place : place + 4]) << 4
        least = _halves(blocks, 2) if minimum else None
        return Codes(_rows(codes), _halves(blocks, 0), least, 0 if minimum else 16 if fifth else 8)

    return read


def _eight(blocks: Tensor) -> Codes:
    """Q8_0: scale, signed codes."""
    return Codes(_rows(blocks[..., 2:] ^ 128), _halves(blocks, 0), None, 128)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes with eight scales and eight minima of six bits each: two of [rows, blocks, 8]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], -1)
    return scales.float(), minima.float()


def _k(*, fifth: bool) -> Callable[[Tensor], Codes]:
    """Q4_K and Q5_K: scale of the scales, scale of the minima, both, fifth bits, the other four bits."""

    def read(blocks: Tensor) -> Codes:
        scales, minima = _k_scales(blocks[..., 4:16])
        codes = _nibbles(_parts(blocks[..., -128:], 4)).reshape(*blocks.shape[:2], 8, 32)
        if fifth:  # bit j of byte i is the fifth one of the i-th value of part j
            bits = blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
            codes = codes | bits.transpose(-1, -2) << 4
        scale = _halves(blocks, 0).float()[..., None] * scales
        least = -(_halves(blocks, 2).float()[..., None] * minima)
        return Codes(_rows(codes), _rows(scale), _rows(least))

    return read


def _six_k(blocks: Tensor) -> Codes:
    """Q6_K: the lower four bits, the upper two, sixteen signed scales, their scale."""
    low = _nibbles(_parts(blocks[..., :128], 2)).reshape(*blocks.shape[:2], 2, 4, 32)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = _parts(blocks[..., 128:192], 2)[..., None, :] >> shifts & 3
    scale = _halves(blocks, 208).float()[..., None] * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Codes(_rows(low | high << 4), _rows(scale), None, 32)


_Kind = gguf.GGMLQuantizationType
_FORMATS = {
    _Kind.Q4_0: CodeFormat(Form.CODES4, 32, _simple(minimum=False, fifth=False)),
    _Kind.Q4_1: CodeFormat(Form.CODES4, 32, _simple(minimum=True, fifth=False)),
    _Kind.Q5_0: CodeFormat(Form.CODES8, 32, _simple(minimum=False, fifth=True)),
    _Kind.Q5_1: CodeFormat(Form.CODES8, 32, _simple(minimum=True, fifth=True)),
    _Kind.Q8_0: CodeFormat(Form.CODES8, 32, _eight),
    _Kind.Q4_K: CodeFormat(Form.CODES4, 32, _k(fifth=False)),
    _Kind.Q5_K: CodeFormat(Form.CODES8, 32, _k(fifth=True)),
    _Kind.Q6_K: CodeFormat(Form.CODES8, 16, _six_k),
}
