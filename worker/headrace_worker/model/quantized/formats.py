"""Matrices of integer codes in the tensors of published formats: AWQ, GPTQ, and those of compressed-tensors.

A value is (code - zero) * scale, of its group of inputs. Codes of 4 or 8 bits are packed into words of 32 bits, the
first one in the lowest bits, along the inputs or the outputs of a matrix X.weight [out, in]:

    AWQ                X.qweight [in, out / 8], X.qzeros [groups, out / 8], X.scales [groups, out]
    GPTQ               X.qweight [in * bits / 32, out], X.qzeros [groups, out * bits / 32], X.scales, maybe X.g_idx [in]
    pack-quantized     X.weight_packed [out, in * bits / 32], X.weight_scale [out, groups], X.weight_shape [2],
                       maybe X.weight_zero_point [out * bits / 32, groups], X.weight_g_idx [in]
    int-quantized      X.weight [out, in] int8, X.weight_scale [out, 1] or a single number
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

import torch
from torch import Tensor

from headrace_kernels.packed import Codes, Form
from headrace_proto.errors import ModelLoadError
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.quantized.config import QuantizationScheme
from headrace_worker.model.sharding.cuts import Cut
from headrace_worker.model.weights import SafetensorsWeights

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
_SIZES = (4, 8)  # bits of a code


class CodedMatrix(ABC):
    """A matrix of codes. Subclasses name its tensors, and read spans of them.

    Raises ModelLoadError for a tensor that is missing or has another shape than the others require.
    """

    first: ClassVar[str]  # the tensor that shows that a matrix has this format
    others: ClassVar[tuple[str, ...]]  # that it must have
    optional: ClassVar[tuple[str, ...]] = ()
    index_name: ClassVar[str] = ""  # of the group of each input

    shape: tuple[int, int]
    bits: int
    groups: int

    def __init__(
        self, stored: SafetensorsWeights, names: Container[str], owner: str, scheme: QuantizationScheme
    ) -> None:
        """names: of all stored tensors. owner: X of those of this matrix."""
        self._stored, self._owner, self._scheme = stored, owner, scheme
        for name in self.others:
            if f"{owner}.{name}" not in names:
                raise ModelLoadError(
                    f"Tensor {f'{owner}.{self.first}'!r} has no {name!r} beside it: the checkpoint is incomplete, "
                    "download it again."
                )
        self.present = {name for name in (self.first, *self.others, *self.optional) if f"{owner}.{name}" in names}
        self._measure()
        if self.bits not in _SIZES or not self.groups or self.shape[1] % self.groups:
            raise self._unfit(f"{self.bits} bits and {self.groups} groups of {self.shape[1]} inputs")

    @property
    def form(self) -> Form:
        """How its codes are packed for a CPU."""
        return Form.CODES4 if self.bits == 4 and self.group % 8 == 0 else Form.CODES8

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.shape[1] // self.groups

    def order(self) -> Tensor | None:
        """The inputs [in] in the order of their groups; None where that is their own order."""
        if self.index_name not in self.present:
            return None
        index = self._read(self.index_name).long()
        if index.shape != (self.shape[1],) or not bool(((index >= 0) & (index < self.groups)).all()):
            raise ModelLoadError(
                f"{self._name(self.index_name)!r} has groups outside of 0 to {self.groups - 1}: the checkpoint is "
                "damaged."
            )
        if torch.equal(index, torch.arange(self.shape[1]) // self.group):
            return None
        if not bool((index.bincount(minlength=self.groups) == self.group).all()):
            raise self._unfit(f"groups of other sizes than {self.group}")
        return index.argsort(stable=True)

    def codes(self, outputs: Span, inputs: Span, order: Tensor | None) -> Codes:
        """Some outputs, and inputs of whole groups; in `order` all inputs. Outputs beyond whole words are left out."""
        groups = inputs[0] // self.group, inputs[1] // self.group
        codes, scale = self._codes(outputs, inputs), self._scale(outputs, groups)
        if not bool(scale.isfinite().all()):
            raise ModelLoadError(f"The scales of {self._owner!r} are not finite: the checkpoint is damaged.")
        if order is not None:
            codes = codes[:, order]
        zeros = self._zeros(outputs, groups)
        if isinstance(zeros, Tensor) and zeros.numel() and bool((zeros == zeros.flatten()[0]).all()):
            zeros = int(zeros.flatten()[0])
        if isinstance(zeros, int):
            half = scale.half()
            exact = scale.dtype is torch.float16 or torch.equal(half.float(), scale.float())
            return Codes(codes, half if exact else scale.float(), None, zeros)
        scale = scale.float()
        return Codes(codes, scale, -zeros.float() * scale)

    @abstractmethod
    def _measure(self) -> None:
        """Sets shape, bits and groups."""

    @abstractmethod
    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        """[outputs, inputs] uint8."""

    @abstractmethod
    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        """[outputs, groups] in floating point."""

    @abstractmethod
    def _zeros(self, outputs: Span, groups: Span) -> Tensor | int:
        """[outputs, groups] of integers, or the one of all."""

    def _name(self, name: str) -> str:
        return f"{self._owner}.{name}"

    def _shape(self, name: str, dims: int = 2) -> tuple[int, ...]:
        shape = self._stored.shape(self._name(name))
        if len(shape) != dims:
            raise self._unfit(f"{name!r} of shape {list(shape)}")
        return shape

    def _read(self, name: str, *spans: Span) -> Tensor:
        return self._stored.read(self._name(name), tuple(Cut(dim, (span,)) for dim, span in enumerate(spans)))

    def _words(self, name: str, dim: int, along: Span, across: Span) -> Tensor:
        """uint8: the codes `along` the dimension in which they are packed, and `across` the other one."""
        per_word = 32 // self.bits
        words = along[0] // per_word, -(-along[1] // per_word)
        packed = self._read(name, *((words, across) if dim == 0 else (across, words)))
        start = along[0] - words[0] * per_word
        return unpack(packed, self.bits, dim).narrow(dim, start, along[1] - along[0])

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self._stored.shape(self._name(name))) != shape:
            raise ModelLoadError(
                f"{self._name(name)!r} is {list(found)}, but {self._name(self.first)!r} requires {list(shape)}: "
                "config.json and weights do not belong together."
            )

    def _unfit(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"The quantized matrix {self._owner!r} has {what}, which is not read: config.json and weights may not "
            "belong together."
        )


class Awq(CodedMatrix):
    """Words of outputs in an order of their own."""

    first, others = "qweight", ("qzeros", "scales")

    def _measure(self) -> None:
        inputs, words = self._shape("qweight")
        self.bits, self.groups, self.shape = 4, self._shape("scales")[0], (words * 8, inputs)
        self._expect("scales", (self.groups, self.shape[0]))
        self._expect("qzeros", (self.groups, words))

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return self._outputs("qweight", outputs, inputs)

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return self._read("scales", groups, outputs).T.contiguous()

    def _zeros(self, outputs: Span, groups: Span) -> Tensor:
        return self._outputs("qzeros", outputs, groups)

    def _outputs(self, name: str, outputs: Span, rows: Span) -> Tensor:
        whole = outputs[0] // 8 * 8, -(-outputs[1] // 8) * 8
        codes = self._words(name, 1, whole, rows)
        codes = codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(len(codes), -1)
        return codes[:, outputs[0] - whole[0] : outputs[1] - whole[0]].T.contiguous()


class Gptq(CodedMatrix):
    """Words of inputs; with g_idx inputs may be of any group (act-order)."""

    first, others, optional, index_name = "qweight", ("qzeros", "scales"), ("g_idx",), "g_idx"

    def _measure(self) -> None:
        words, outputs = self._shape("qweight")
        self.bits = self._scheme.bits
        inputs = words * 32 // self.bits
        if "g_idx" in self.present:  # of a matrix with another number of bits than the config's
            inputs = self._shape("g_idx", 1)[0]
            self.bits = words * 32 // max(1, inputs)
        self.groups, self.shape = self._shape("scales")[0], (outputs, inputs)
        self._expect("scales", (self.groups, outputs))
        self._expect("qzeros", (self.groups, -(-outputs * self.bits // 32)))

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return self._words("qweight", 0, inputs, outputs).T.contiguous()

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return self._read("scales", groups, outputs).T.contiguous()

    def _zeros(self, outputs: Span, groups: Span) -> Tensor:
        stored = self._words("qzeros", 1, outputs, groups).T.contiguous()
        return stored.short() + self._scheme.zeros_less


class Packed(CodedMatrix):
    """Words of inputs, as compressed-tensors packs them."""

    first, others = "weight_packed", ("weight_scale", "weight_shape")
    optional, index_name = ("weight_zero_point", "weight_g_idx"), "weight_g_idx"

    def _measure(self) -> None:
        outputs, words = self._shape("weight_packed")
        shape = self._read("weight_shape").tolist()
        self.bits = next((bits for bits in _SIZES if len(shape) == 2 and -(-shape[1] * bits // 32) == words), 0)
        if not self.bits or shape[0] != outputs:
            raise self._unfit(f"a weight_shape of {shape}")
        self.shape, self.groups = (outputs, shape[1]), self._shape("weight_scale")[1]
        self._expect("weight_scale", (outputs, self.groups))
        if "weight_zero_point" in self.present:
            self._expect("weight_zero_point", (-(-outputs * self.bits // 32), self.groups))

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return self._words("weight_packed", 1, inputs, outputs)

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return self._read("weight_scale", outputs, groups)

    def _zeros(self, outputs: Span, groups: Span) -> Tensor | int:
        if "weight_zero_point" not in self.present:
            return 1 << self.bits - 1
        return self._words("weight_zero_point", 0, outputs, groups)


class Int8(CodedMatrix):
    """A byte for each code, and a scale for each output, or one."""

    first, others = "weight", ("weight_scale",)

    def _measure(self) -> None:
        outputs, inputs = self._shape("weight")
        self.bits, self.groups, self.shape = 8, 1, (outputs, inputs)
        if self._stored.shape(self._name("weight_scale")) not in ((), (1,)):
            self._expect("weight_scale", (outputs, 1))

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return self._read("weight", outputs, inputs).view(torch.uint8) ^ 128

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        if len(self._stored.shape(self._name("weight_scale"))) < 2:
            return self._read("weight_scale").reshape(1, 1).repeat(outputs[1] - outputs[0], 1)
        return self._read("weight_scale", outputs, groups)

    def _zeros(self, _outputs: Span, _groups: Span) -> int:
        return 128


FORMATS: dict[str, type[CodedMatrix]] = {"awq": Awq, "gptq": Gptq, "packed": Packed, "int8": Int8}


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words with neighbours along `dim`, the first one in the lowest bits -> uint8, 32 / bits times as long."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (packed.movedim(dim, -1)[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)
    return codes.flatten(-2).movedim(-1, dim)
