"""Products with packed weights in plain torch: the values are unpacked for each call."""

import torch
from torch import Tensor
from torch.nn import functional

from headrace_kernels.packed import WIDTH, Codes, Form, Kind, PackedWeight

_KINDS = {Form.E4M3: Kind.E4M3, Form.E2M1: Kind.E2M1}


def packed_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, bf16: bool = False) -> Tensor:
    if bf16 and weight.form is not Form.FLOAT32:
        x = x.bfloat16().float()
    return functional.linear(x, unpack(weight).to(x.dtype), bias)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    panels, inverse = torch.unique(index.flatten() // WIDTH, return_inverse=True)
    few = PackedWeight(weight.data[panels], len(panels) * WIDTH, *_described(weight))
    return unpack(few)[inverse * WIDTH + index.flatten() % WIDTH].view(*index.shape, weight.inputs)


def unpack(weight: PackedWeight) -> Tensor:
    """The values [out, in] in float32."""
    data, inputs = weight.data, weight.inputs
    if weight.form is Form.FLOAT32:
        return _outputs(data.view(torch.float32).view(-1, inputs, WIDTH), weight)
    if weight.form is Form.BFLOAT16:
        pairs = data.view(torch.bfloat16).view(-1, inputs // 2, WIDTH, 2)
        return _outputs(pairs.transpose(2, 3).reshape(-1, inputs, WIDTH), weight).float()
    groups, width = inputs // weight.group, 4 if weight.wide else 2
    size = groups * WIDTH * width
    scale = _numbers(data[:, :size], weight)
    minimum = _numbers(data[:, size : 2 * size], weight) if weight.minima else None
    raw = data[:, size * (2 if weight.minima else 1) :]
    if weight.form.bits == 8:
        codes = raw.reshape(-1, inputs, WIDTH)
    else:
        quads = raw.reshape(-1, inputs // 8, WIDTH, 4)
        codes = torch.stack([quads & 15, quads >> 4], -1).transpose(2, 3).transpose(3, 4).reshape(-1, inputs, WIDTH)
    codes = codes + weight.centre & 255 >> 8 - weight.form.bits
    kind = _KINDS.get(weight.form, Kind.INTEGER)
    return Codes(_outputs(codes, weight), scale, minimum, weight.offset, kind).dense()


def _numbers(raw: Tensor, weight: PackedWeight) -> Tensor:
    """One scale or minimum per group and output: [out, groups]."""
    dtype = torch.float32 if weight.wide else torch.float16
    return _outputs(raw.contiguous().view(dtype).view(-1, weight.inputs // weight.group, WIDTH), weight)


def _outputs(panels: Tensor, weight: PackedWeight) -> Tensor:
    """[panels, n, 16] -> [out, n]."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[: weight.outputs]


def _described(weight: PackedWeight) -> tuple[int, Form, int, bool, bool, int, int]:
    return weight.inputs, weight.form, weight.group, weight.wide, weight.minima, weight.offset, weight.centre
