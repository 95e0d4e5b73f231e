"""Rows rounded to e4m3 for products of 8-bit numbers: a scale for each row, or for each 128 entries of it.

The scale is the largest magnitude of its entries divided by 448. Entry = number * scale.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_kernels import kv_format

GROUP = 128  # entries with one scale, unless a row has a single one
LARGEST = kv_format.LARGEST[torch.float8_e4m3fn]


class Products(NamedTuple):
    """Which products of 8-bit numbers a device computes: of weights with a scale for each output, and in blocks."""

    outputs: bool
    blocks: bool


NO_PRODUCTS = Products(False, False)


def products_of(device: torch.device) -> Products:
    """By compute capability: outputs from 8.9 on (8.9 itself needs torch 2.12), blocks on 9.0 with CUDA 12.9."""
    if device.type != "cuda" or torch.version.cuda is None:
        return NO_PRODUCTS
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    outputs = capability >= (9, 0) or (capability == (8, 9) and release >= (2, 12))
    return Products(outputs, capability == (9, 0) and cuda >= (12, 9))


@dataclass(frozen=True, slots=True)
class Rounded:
    """The rounded rows of a tensor of `shape` [..., N].

    codes [R', N] float8_e4m3fn, scale [R', 1] or [R', N / 128] float32. R' >= R rows: where there are scales of groups,
    their number is a multiple of four and neighbouring rows' scales are neighbours, as the products of torch require.
    """

    codes: Tensor
    scale: Tensor
    shape: torch.Size

    def float(self) -> Tensor:
        """The rounded values [..., N] in float32."""
        rows, groups = self.shape[:-1].numel(), self.scale.shape[1]
        grouped = self.codes[:rows].float().view(rows, groups, self.shape[-1] // groups)
        return (grouped * self.scale[:rows, :, None]).view(self.shape)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [out, in] of a product with rounded rows.

    codes [out, in] float8_e4m3fn. scale float32: [out, 1]; or of blocks of 128 x 128, [in / 128, out / 128] with
    contiguous columns, padded to a multiple of four rows. Its inputs are rounded in the same way.
    """

    codes: Tensor
    scale: Tensor
    in_blocks: bool

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def empty_rounded(shape: torch.Size, device: torch.device, *, groups: bool) -> Rounded:
    """Space for the rounded rows of a tensor of `shape`; the rows that were added are not set."""
    rows, size = shape[:-1].numel(), shape[-1]
    if not groups:
        codes = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=device)
        return Rounded(codes, torch.empty(rows, 1, device=device), shape)
    padded = -(-rows // 4) * 4
    codes = torch.empty(padded, size, dtype=torch.float8_e4m3fn, device=device)
    return Rounded(codes, torch.empty(size // GROUP, padded, device=device).T, shape)


def scaled_weight(codes: Tensor, scale: Tensor) -> ScaledWeight | None:
    """codes [out, in] uint8, of e4m3; scale [out, groups]. None unless scales are of outputs, or of whole blocks of
    128 x 128, and the sizes allow products of 8-bit numbers.
    """
    outputs, inputs = codes.shape
    numbers = codes.contiguous().view(torch.float8_e4m3fn)
    if scale.shape[1] == 1:
        fits = outputs % 16 == 0 and inputs % 16 == 0
        return ScaledWeight(numbers, scale.float().contiguous(), False) if fits else None
    if scale.shape[1] * GROUP != inputs or outputs % GROUP:
        return None
    blocks = scale.float().view(outputs // GROUP, GROUP, -1)
    if not bool((blocks == blocks[:, :1]).all()):
        return None
    padded = torch.zeros(outputs // GROUP, -(-scale.shape[1] // 4) * 4, device=scale.device)
    padded[:, : scale.shape[1]] = blocks[:, 0]
    return ScaledWeight(numbers, padded.T, True)
