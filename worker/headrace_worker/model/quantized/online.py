"""`--quantization`: matrices of a checkpoint that is not quantized become codes while it is loaded, one after another.

    fp8     e4m3, with a scale for each output: its largest magnitude divided by 448
    int8    in groups of 32 inputs, as Q8_0: their largest magnitude divided by 127, in float16

Linears and routed experts are rounded, not embeddings, heads and routers. Scales are those of the whole matrix, so
values are the same however ranks divide it.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace_kernels.kv_format import SMALLEST_SCALE
from headrace_kernels.packed import Codes, Form, Kind
from headrace_kernels.rounded import LARGEST
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.packable import PackableExperts, PackableMatrix, can_be_packed, is_experts
from headrace_worker.model.sharding.cuts import Cut, Cuts, spans_of
from headrace_worker.model.weights import Weights

GROUP = 32  # inputs with one scale, of int8
_ROUTERS = ("gate", "router", "shared_expert_gate")

Method = Literal["fp8", "int8"]


class Quantizer:
    """Reads matrices as codes, those of one model."""

    def __init__(self, method: Method, model: PreTrainedModel) -> None:
        self._method, self._model = method, model
        self._head = model.get_output_embeddings()

    @property
    def unit(self) -> int:
        """Inputs that ranks do not divide."""
        return GROUP if self._method == "int8" else 1

    def read(self, weights: Weights, name: str, stored: str, cuts: Cuts) -> PackableMatrix | PackableExperts | None:
        """The part of a parameter, stored under another name maybe; None where its values stay."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        if is_experts(owner) and can_be_packed(self._model, name):
            return self._experts(weights, stored, cuts, transposed=bool(getattr(owner, "is_transposed", False)))
        leaf = name.split(".")[-2] if "." in name else ""
        plain = type(owner) is nn.Linear and owner is not self._head and leaf not in _ROUTERS
        if not plain or not can_be_packed(self._model, name):
            return None
        outputs, inputs = (spans_of(cuts, dim, size) for dim, size in enumerate(weights.shape(stored)))
        if not self._may_cut(weights.shape(stored)[1], inputs):
            return None
        return self._matrix(weights.read(stored, (Cut(0, outputs), *self._read_cuts(1, inputs))), inputs)

    def _experts(self, weights: Weights, stored: str, cuts: Cuts, *, transposed: bool) -> PackableExperts | None:
        shape = weights.shape(stored)
        experts, inner, outer = (spans_of(cuts, dim, size) for dim, size in enumerate(shape))
        outputs, inputs = (outer, inner) if transposed else (inner, outer)
        along = (2, 1) if transposed else (1, 2)
        if not self._may_cut(shape[along[1]], inputs):
            return None
        matrices = []
        for index in (index for span in experts for index in range(*span)):
            cuts = (Cut(0, ((index, index + 1),)), Cut(along[0], outputs), *self._read_cuts(along[1], inputs))
            one = weights.read(stored, cuts)[0]
            matrix = self._matrix(one.T if transposed else one, inputs)
            if matrix is None:
                return None
            matrices.append(matrix)
        return PackableExperts(matrices, transposed=transposed)

    def _may_cut(self, size: int, inputs: tuple[Span, ...]) -> bool:
        """Whether a part of this many inputs is one span, and whole groups."""
        (start, stop), *more = inputs
        return not more and (self._method == "fp8" or not any(edge % GROUP for edge in (size, start, stop)))

    def _read_cuts(self, dim: int, inputs: tuple[Span, ...]) -> Cuts:
        """The scale of an output in e4m3 is that of all its inputs."""
        return () if self._method == "fp8" else (Cut(dim, inputs),)

    def _matrix(self, values: Tensor, inputs: tuple[Span, ...]) -> PackableMatrix | None:
        """values [outputs, inputs], as they were read."""
        if not values.is_floating_point():
            return None
        if self._method == "fp8":
            codes = to_fp8(values)
            part = Codes(codes.codes[:, slice(*inputs[0])].contiguous(), codes.scale, kind=Kind.E4M3)
            return PackableMatrix(part, Form.E4M3)
        return PackableMatrix(to_int8(values), Form.CODES8)


def to_fp8(values: Tensor) -> Codes:
    """values [out, in] rounded to e4m3."""
    wide = values.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return Codes((wide / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale, kind=Kind.E4M3)


def to_int8(values: Tensor) -> Codes:
    """values [out, in] rounded to 8 bits; in: a multiple of 32."""
    wide = values.float().reshape(values.shape[0], -1, GROUP)
    scale = (wide.abs().amax(-1) / 127).half()
    inverse = scale.float().reciprocal().masked_fill(scale == 0, 0)
    codes = (wide * inverse[..., None]).round().clamp(-127, 127) + 128
    return Codes(codes.to(torch.uint8).flatten(1), scale, None, 128)
