"""PackedWeight: a matrix whose values stay in few bits, in panels of 16 outputs, as the CPU's kernels read them.

A value is `scale * code + minimum`, with one scale and minimum per group of inputs. A panel has the scales of its
groups [G, 16], then the minima [G, 16] where they are stored, then the codes; whole ones less the centre of their
range, as signed numbers:

    float32         [in, 16]
    bfloat16        [in / 2, 16, 2]
    8 bits, e4m3    [in, 16]
    4 bits, e2m1    [in / 8, 16, 4]: a byte has the codes of two inputs, the first one in its low half

Outputs are padded to whole panels by zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

import torch
from torch import Tensor

WIDTH = 16  # outputs of a panel


class Form(IntEnum):
    """How values are stored; the numbers are those of `cpu/src/packed.cpp`."""

    FLOAT32 = 0
    BFLOAT16 = 1
    CODES8 = 2
    CODES4 = 3
    E4M3 = 4
    E2M1 = 5

    @property
    def bits(self) -> int:
        """The bits of a value without its group's scale."""
        return (32, 16, 8, 4, 8, 4)[self]


class Kind(Enum):
    """What codes are."""

    INTEGER = "integer"
    E4M3 = "e4m3"  # as torch.float8_e4m3fn
    E2M1 = "e2m1"  # 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative


E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Codes:
    """A matrix in few bits, not packed yet. `stack` makes one of several, [X, out, in], with a `shape` and a `group`.

    codes [out, in] uint8. scale, minimum [out, in / group] float16 or float32, of one dtype; without a minimum it is
    -offset * scale. Only integers have a minimum or an offset.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    offset: int = 0
    kind: Kind = Kind.INTEGER

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.codes.shape[-1] // self.scale.shape[-1]

    def dense(self) -> Tensor:
        """The values [out, in] in float32. Products are exact, sums rounded once: as the gguf package computes them."""
        outputs, inputs = self.codes.shape
        codes = self._numbers().view(outputs, self.scale.shape[1], self.group)
        scale = self.scale.float()[:, :, None]
        values = (
            (codes - self.offset) * scale if self.minimum is None else codes * scale + self.minimum.float()[:, :, None]
        )
        return values.view(outputs, inputs)

    def _numbers(self) -> Tensor:
        """The codes [out, in] in float32."""
        if self.kind is Kind.E4M3:
            return self.codes.contiguous().view(torch.float8_e4m3fn).float()
        if self.kind is Kind.E2M1:
            return torch.tensor(E2M1_NUMBERS, device=self.codes.device)[self.codes.int()]
        return self.codes.float()

    def to(self, device: torch.device) -> "Codes":
        """The same on a device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), minimum=minimum)

    def rows(self, index: Tensor | slice) -> "Codes":
        """Some of the outputs, in this order."""
        minimum = None if self.minimum is None else self.minimum[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], minimum=minimum)

    def columns(self, start: int, end: int) -> "Codes":
        """The inputs [start, end), which are whole groups. Raises ValueError."""
        if start % self.group or end % self.group:
            raise ValueError(f"inputs {start} to {end} are no whole groups of {self.group}")
        groups = slice(start // self.group, end // self.group)
        minimum = None if self.minimum is None else self.minimum[:, groups]
        return replace(self, codes=self.codes[:, start:end], scale=self.scale[:, groups], minimum=minimum)


def concatenate(parts: Sequence[Codes]) -> Codes:
    """The outputs of all parts, in order, whose codes are of one kind. Where parts differ otherwise they get the finest
    groups, and scales (of integers minima, too) in float32.
    """
    return _join(parts, torch.cat)


def stack(parts: Sequence[Codes]) -> Codes:
    """Several matrices [X, out, in], as `concatenate`."""
    return _join(parts, torch.stack)


def _join(parts: Sequence[Codes], join: Callable[[list[Tensor]], Tensor]) -> Codes:
    first = parts[0]
    kinds = {(part.group, part.scale.dtype, part.minimum is None, part.offset) for part in parts}
    if len(kinds) > 1:
        group = min(part.group for part in parts)
        parts = [_general(part, group) for part in parts]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Codes(
        join([part.codes for part in parts]),
        join([part.scale for part in parts]),
        join(minima) if minima else None,
        first.offset if len(kinds) == 1 else 0,
        first.kind,
    )


def _general(codes: Codes, group: int) -> Codes:
    """The same values with scales and minima in float32 for smaller groups."""
    times = codes.group // group
    scale = codes.scale.float().repeat_interleave(times, 1)
    if codes.kind is not Kind.INTEGER:
        return replace(codes, scale=scale)
    minimum = None if codes.minimum is None else codes.minimum.float().repeat_interleave(times, 1)
    return Codes(codes.codes, scale, scale * -codes.offset if minimum is None else minimum)


@dataclass(frozen=True)
class PackedWeight:
    """data [panels, bytes of a panel] uint8; the other fields describe it, see the module."""

    data: Tensor
    outputs: int
    inputs: int
    form: Form
    group: int
    wide: bool = False  # scales are float32
    minima: bool = False  # are stored
    offset: int = 0
    centre: int = 0  # what is subtracted from stored codes

    @property
    def nbytes(self) -> int:
        """The bytes of the data."""
        return self.data.numel()


def pack_dense(weight: Tensor) -> PackedWeight:
    """weight [out, in], float32 or bfloat16; of bfloat16 an even number of inputs."""
    outputs, inputs = weight.shape
    if weight.dtype is torch.bfloat16:
        pairs = _panels(weight).view(-1, WIDTH, inputs // 2, 2).transpose(1, 2)
        return PackedWeight(_bytes(pairs), outputs, inputs, Form.BFLOAT16, inputs)
    return PackedWeight(_bytes(_panels(weight.float()).transpose(1, 2)), outputs, inputs, Form.FLOAT32, inputs)


def pack_codes(codes: Codes, form: Form) -> PackedWeight:
    """form: for this kind of codes. A group of 4-bit codes has a multiple of eight inputs. Raises ValueError."""
    outputs, inputs = codes.codes.shape
    if form.bits == 4 and codes.group % 8:
        raise ValueError(f"a group of {codes.group} inputs is no multiple of 8")
    parts = [_bytes(_panels(codes.scale).transpose(1, 2))]
    if codes.minimum is not None:
        parts.append(_bytes(_panels(codes.minimum).transpose(1, 2)))
    centre = _centre(codes, form)
    panels = _panels(codes.codes - centre & 255 >> 8 - form.bits)
    if form.bits == 8:
        parts.append(_bytes(panels.transpose(1, 2)))
    else:
        pairs = panels.view(-1, WIDTH, inputs // 8, 4, 2)
        parts.append(_bytes((pairs[..., 0] | pairs[..., 1] << 4).transpose(1, 2)))
    return PackedWeight(
        torch.cat(parts, 1),
        outputs,
        inputs,
        form,
        codes.group,
        wide=codes.scale.dtype is torch.float32,
        minima=codes.minimum is not None,
        offset=codes.offset,
        centre=centre,
    )


def _centre(codes: Codes, form: Form) -> int:
    """The centre of the codes' range: far from zero, sums of codes would lose digits against those of the minima."""
    if codes.kind is not Kind.INTEGER:
        return 0
    if form is Form.CODES4:
        return 8
    largest = int(codes.codes.max()) if codes.codes.numel() else 0
    centre = codes.offset if codes.minimum is None else (1 << largest.bit_length()) // 2
    return centre if centre and largest - centre < 128 else 128


def _panels(matrix: Tensor) -> Tensor:
    """[out, n] -> [panels, 16, n], padded by zeros."""
    missing = -matrix.shape[0] % WIDTH
    if missing:
        matrix = torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
    return matrix.reshape(-1, WIDTH, matrix.shape[1])


def _bytes(values: Tensor) -> Tensor:
    """[panels, …] -> [panels, bytes]."""
    return values.contiguous().view(torch.uint8).reshape(values.shape[0], -1)
