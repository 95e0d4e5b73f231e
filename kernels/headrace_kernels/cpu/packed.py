"""Products with packed weights in C++: float32 on a CPU; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.cpu.library import load
from headrace_kernels.packed import Form, PackedWeight
from headrace_kernels.reference import packed as reference

_matmul, _rows = load().headrace_packed_matmul, load().headrace_packed_rows


def packed_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, bf16: bool = False) -> Tensor:
    if x.dtype is not torch.float32 or not x.is_cpu or not weight.data.is_contiguous():
        return reference.packed_matmul(x, weight, bias, bf16)
    rows = x.reshape(-1, weight.inputs).contiguous()
    out = torch.empty(len(rows), weight.outputs)
    _matmul(
        out.data_ptr(),
        rows.data_ptr(),
        len(rows),
        weight.data.data_ptr(),
        weight.outputs,
        weight.inputs,
        int(weight.form),
        weight.group,
        weight.wide,
        weight.minima,
        float(weight.offset),
        float(weight.centre),
        bias.data_ptr() if bias is not None else None,
        bf16 and weight.form is not Form.FLOAT32,
        torch.get_num_threads(),
    )
    return out.view(*x.shape[:-1], weight.outputs)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    """See ``headrace_kernels.ops.packed_rows``. Raises KernelArgumentError for a row that does not exist."""
    if not weight.data.is_cpu or not weight.data.is_contiguous():
        return reference.packed_rows(weight, index)
    ids = index.to(torch.int64).contiguous()
    out = torch.empty(*index.shape, weight.inputs)
    wrong = _rows(
        out.data_ptr(), ids.data_ptr(), ids.numel(), weight.data.data_ptr(), weight.outputs, weight.inputs,
        int(weight.form), weight.group, weight.wide, weight.minima, float(weight.offset),
        float(weight.centre),
    )  # fmt: skip
    if wrong:
        raise KernelArgumentError(
            f"packed_rows: a row that is none of {weight.outputs}. This is a bug: please report it."
        )
    return out
