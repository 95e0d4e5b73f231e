"""Quantized tensors of a checkpoint under the names that the model has for their values.

A matrix in e4m3 has scales beside it: one, one of each output, or one of each block. It is read as codes, and so are
matrices of other codes (`formats.py`) where a part is whole groups of inputs; or as values, which are made of the part
that is read. Scales of inputs and of keys and values are not used: inputs are not rounded here.
"""

from collections.abc import Container, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from headrace_base.errors import ModelLoadError
from headrace_kernels.packed import Codes, Form, Kind, concatenate
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.packable import PackableExperts, PackableMatrix
from headrace_worker.model.quantized.config import SCALES, QuantizationScheme, no_scale
from headrace_worker.model.quantized.formats import FORMATS, CodedMatrix, Mxfp4Experts
from headrace_worker.model.sharding.cuts import Cuts, spans_of
from headrace_worker.model.weights import SafetensorsWeights, join

_UNUSED = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"),
    *("prob_output_scale", "kv_scale", "input_zero_point", "output_zero_point"),
)
_AT_ONCE = 1 << 24  # values
_LEAST_GROUP = 8  # inputs, with scales of a quarter of the memory of their codes
_NAN = 0x7F  # without its sign


class QuantizedWeights:
    """A checkpoint with quantized matrices. Raises ModelLoadError for scales that are missing or have another shape."""

    def __init__(self, stored: SafetensorsWeights, scheme: QuantizationScheme, wanted: Container[str] = ()) -> None:
        """wanted: names that the model has."""
        self._stored, self._scheme = stored, scheme
        self._scales: dict[str, str] = {}
        self._coded: dict[str, CodedMatrix] = {}
        self._experts: dict[str, Mxfp4Experts] = {}
        names, used = set(stored), set[str]()
        format = FORMATS.get(scheme.kind)
        for name in stored:
            owner, _, leaf = name.rpartition(".")
            if format is not None and leaf == format.stored.first and stored.dtype(name) in format.stored.dtypes:
                matrix = format(stored, names, owner, scheme)
                self._coded[f"{owner}.weight"] = matrix
                used |= {f"{owner}.{part}" for part in matrix.present}
                bias = f"{owner}.bias"  # packers write one of zeros where the model has none
                if bias in names and bias not in wanted and not bool(stored.read(bias).any()):
                    used.add(bias)
            elif leaf == "weight" and stored.dtype(name) == "F8_E4M3":
                self._scales[name] = self._scale_of(name, names)
            elif scheme.kind == "mxfp4-experts" and leaf.endswith("_blocks"):
                owner = name.removesuffix("_blocks")
                if (scales := f"{owner}_scales") not in names:
                    raise no_scale(name)
                self._experts[owner] = Mxfp4Experts(stored, name, scales)
                used |= {name, scales}
        used |= set(self._scales.values())
        quantized = bool(self._scales or self._coded)
        unused = {name for name in names if name.rpartition(".")[2] in _UNUSED and quantized}
        # Zero points of e4m3 and int8 matrices: they are 0.
        zeros = {name for name in names - used if name.endswith(".weight_zero_point")}
        unused |= {name for name in zeros if quantized and not bool(stored.read(name).any())}
        left_out = used | unused
        self._names = [*(name for name in stored if name not in left_out), *self._coded, *self._experts]

    @property
    def read_bytes(self) -> int:
        return self._stored.read_bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._coded.get(name) or self._experts.get(name)
        return self._stored.shape(name) if found is None else found.shape

    def read(self, name: str, cuts: Cuts = ()) -> Tensor:
        """The values in float32, of a tensor that is not quantized as it is stored."""
        if name in self._coded:
            return self._values(self._coded[name], cuts)
        if name in self._experts:
            return self._expert_values(self._experts[name], cuts)
        return self._scaled(name, cuts) if name in self._scales else self._stored.read(name, cuts)

    def read_codes(self, name: str, cuts: Cuts = ()) -> PackableMatrix | PackableExperts | None:
        """Without values; None where a tensor has no codes, or is cut within their groups."""
        if name in self._scales:
            return self._e4m3(name, cuts)
        if name in self._experts:
            return self._expert_codes(self._experts[name], cuts)
        matrix = self._coded.get(name)
        if matrix is None:
            return None
        outputs, inputs = (spans_of(cuts, dim, size) for dim, size in enumerate(matrix.shape))
        order = matrix.order()
        whole = inputs == ((0, matrix.shape[1]),)
        if len(inputs) > 1 or not matrix.has_whole_groups(inputs[0]) or (order is not None and not whole):
            return None
        parts = [matrix.codes(span, inputs[0], order) for span in outputs]
        codes = parts[0] if len(parts) == 1 else concatenate(parts)
        return PackableMatrix(codes, matrix.form(codes), order)

    def _values(self, matrix: CodedMatrix, cuts: Cuts) -> Tensor:
        """Any part of a matrix of codes."""
        ranges = [spans_of(cuts, dim, size) for dim, size in enumerate(matrix.shape)]
        order = matrix.order()

        def part(spans: tuple[Span, ...]) -> Tensor:
            outputs, (start, end) = spans
            group = matrix.shape[1] if order is not None else matrix.group
            first, last = start // group * group, -(-end // group) * group
            values = matrix.codes(outputs, (first, last), order).dense()
            values = values if order is None else values[:, order.argsort()]
            return values[:, start - first : end - first]

        return join(ranges, part)

    def _expert_codes(self, stack: Mxfp4Experts, cuts: Cuts) -> PackableExperts | None:
        experts, inputs, outputs = (spans_of(cuts, dim, size) for dim, size in enumerate(stack.shape))
        if len(inputs) > 1 or any(edge % stack.GROUP for edge in inputs[0]):
            return None
        matrices = []
        for expert in _places(experts).tolist():
            parts = [stack.codes(expert, span, inputs[0]) for span in outputs]
            matrices.append(PackableMatrix(parts[0] if len(parts) == 1 else concatenate(parts), Form.E2M1))
        return PackableExperts(matrices, transposed=True)

    def _expert_values(self, stack: Mxfp4Experts, cuts: Cuts) -> Tensor:
        """Any part of a stack of experts [experts, inputs, outputs]."""

        def part(spans: tuple[Span, ...]) -> Tensor:
            experts, (start, end), outputs = spans
            first, last = start // stack.GROUP * stack.GROUP, -(-end // stack.GROUP) * stack.GROUP
            values = [stack.codes(expert, outputs, (first, last)).dense().T for expert in range(*experts)]
            return torch.stack(values)[:, start - first : end - first]

        return join([spans_of(cuts, dim, size) for dim, size in enumerate(stack.shape)], part)

    def _e4m3(self, name: str, cuts: Cuts) -> PackableMatrix | None:
        """A part of a matrix in e4m3, with scales of the largest groups of inputs that no block's edge divides."""
        outputs, inputs = (spans_of(cuts, dim, size) for dim, size in enumerate(self._stored.shape(name)))
        scale, (rows, columns) = self._scales_of(name)
        (start, end), *more = inputs
        group = gcd(columns, start, end) if columns < self._stored.shape(name)[1] else end - start
        if more or group < _LEAST_GROUP:
            return None
        by_group = scale[:, torch.arange(start, end, group) // columns]
        return PackableMatrix(
            Codes(
                self._numbers(name, cuts).view(torch.uint8), by_group[_places(outputs) // rows].contiguous(),
                kind=Kind.E4M3,
            ),
            Form.E4M3,
        )  # fmt: skip

    def _scaled(self, name: str, cuts: Cuts) -> Tensor:
        """The values of a part of a matrix in e4m3."""
        codes = self._numbers(name, cuts)
        scale, (rows, columns) = self._scales_of(name)
        outputs, inputs = (_places(spans_of(cuts, dim, size)) for dim, size in enumerate(self._stored.shape(name)))
        values = torch.empty(codes.shape)
        by_column = scale[:, inputs // columns]
        step = max(1, _AT_ONCE // codes.shape[1])
        for first in range(0, len(outputs), step):
            part = slice(first, first + step)
            values[part] = codes[part].float() * by_column[outputs[part] // rows]
        return values

    def _numbers(self, name: str, cuts: Cuts) -> Tensor:
        codes = self._stored.read(name, cuts)
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise ModelLoadError(f"Tensor {name!r} has values that are not a number: the checkpoint is damaged.")
        return codes

    def _scales_of(self, name: str) -> tuple[Tensor, tuple[int, int]]:
        """Scales in float32, two dimensions, and the outputs and inputs of one of them."""
        scale = self._stored.read(self._scales[name]).float()
        if not bool(scale.isfinite().all()):
            raise ModelLoadError(f"{self._scales[name]!r} has scales that are not finite: the checkpoint is damaged.")
        whole = self._stored.shape(name)
        if scale.numel() == 1:
            return scale.reshape(1, 1), (whole[0], whole[1])
        if scale.dim() == 4:  # as modelopt writes those of blocks
            scale = scale[:, 0, :, 0]
        return (scale.reshape(-1, 1), (1, whole[1])) if self._scheme.block is None else (scale, self._scheme.block)

    def _scale_of(self, name: str, names: set[str]) -> str:
        owner = name.removesuffix("weight")
        found = next((owner + scale for scale in SCALES if owner + scale in names), None)
        if found is None:
            raise no_scale(name)
        shape, scales = self._stored.shape(name), self._stored.shape(found)
        if len(shape) != 2:
            raise ModelLoadError(f"Tensor {name!r} in e4m3 has shape {list(shape)}: only matrices are read.")
        allowed: list[tuple[int, ...]] = [(), (1,), (1, 1)]
        what = "one scale or one of each output"
        if (block := self._scheme.block) is not None:
            blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
            allowed += [(blocks[0], 1, blocks[1], 1), blocks]
            what = f"blocks of {block[0]} × {block[1]}"
        else:
            allowed += [(shape[0],), (shape[0], 1)]
        if scales not in allowed:
            raise ModelLoadError(
                f"{found!r} is {list(scales)}, but its weight {list(shape)} with {what} requires {list(allowed[-1])}: "
                "config.json and weights do not belong together."
            )
        return found


def _places(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(*span) for span in spans])
