"""Matrices of codes in the tensors of published formats: AWQ, GPTQ, those of compressed-tensors, and MXFP4 and NVFP4.

A value is (code - zero) * scale, of its group of inputs. Codes of 4 or 8 bits are packed into words of 32 bits, the
first one in the lowest bits, along the inputs or the outputs of a matrix X.weight [out, in]:

    AWQ                X.qweight [in, out / 8], X.qzeros [groups, out / 8], X.scales [groups, out]
    GPTQ               X.qweight [in * bits / 32, out], X.qzeros [groups, out * bits / 32], X.scales, maybe X.g_idx [in]
    pack-quantized     X.weight_packed [out, in * bits / 32], X.weight_scale [out, groups], X.weight_shape [2],
                       maybe X.weight_zero_point [out * bits / 32, groups], X.weight_g_idx [in]
    int-quantized      X.weight [out, in] int8, X.weight_scale [out, 1] or a single number

Without zeros, codes in e2m1, two in a byte along the inputs, the first one in its low half. A scale in uint8 is the
exponent of a power of two, plus 127:

    mxfp4-pack         X.weight_packed [out, in / 2], X.weight_scale [out, in / 32] uint8
    nvfp4-pack         X.weight_packed [out, in / 2], X.weight_scale [out, in / 16] e4m3, which the single
                       X.weight_global_scale divides
    NVFP4 of modelopt  X.weight [out, in / 2], X.weight_scale [out, in / 16] e4m3, times the single X.weight_scale_2
    MXFP4 of gpt-oss   X_blocks [experts, out, in / 32, 16], X_scales [experts, out, in / 32] of X [experts, in, out]
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

import torch
from torch import Tensor

from headrace_base.errors import ModelLoadError
from headrace_kernels.packed import Codes, Form, Kind
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.quantized.config import STORED, QuantizationScheme, Stored, check_complete
from headrace_worker.model.sharding.cuts import Cut
from headrace_worker.model.weights import SafetensorsWeights

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
_SIZES = (4, 8)  # bits of a code


class CodedMatrix(ABC):
    """A matrix of codes. Subclasses name its tensors, and read spans of them.

    Raises ModelLoadError for a tensor that is missing or has another shape than the others require.
    """

    stored: ClassVar[Stored]
    optional: ClassVar[tuple[str, ...]] = ()
    index_name: ClassVar[str] = ""  # tensor with the group of each input
    kind: ClassVar[Kind] = Kind.INTEGER

    shape: tuple[int, int]
    bits: int
    groups: int

    def __init__(
        self, stored: SafetensorsWeights, names: Container[str], owner: str, scheme: QuantizationScheme
    ) -> None:
        """names: of all stored tensors. owner: X of those of this matrix."""
        self._tensors, self._owner, self._scheme = stored, owner, scheme
        check_complete(self.stored, owner, names)
        first, others, _ = self.stored
        self.present = {name for name in (first, *others, *self.optional) if f"{owner}.{name}" in names}
        self._measure()
        if self.bits not in _SIZES or not self.groups or self.shape[1] % self.groups:
            raise self._unfit(f"{self.bits} bits and {self.groups} groups of {self.shape[1]} inputs")

    def form(self, codes: Codes) -> Form:
        """How a part of its codes is packed for a CPU."""
        if self.kind is Kind.E2M1:
            return Form.E2M1
        return Form.CODES4 if self.bits == 4 and codes.group % 8 == 0 else Form.CODES8

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.shape[1] // self.groups

    def has_whole_groups(self, inputs: Span) -> bool:
        """Whether each group has all of its inputs or none among these; of one group any are a group."""
        return self.groups == 1 or not any(edge % self.group for edge in inputs)

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
        groups = (0, 1) if self.groups == 1 else (inputs[0] // self.group, inputs[1] // self.group)
        codes, scale = self._codes(outputs, inputs), self._scale(outputs, groups)
        if not bool(scale.isfinite().all()):
            raise ModelLoadError(f"The scales of {self._owner!r} are not finite: the checkpoint is damaged.")
        if order is not None:
            codes = codes[:, order]
        zeros = self._zeros(outputs, groups)
        if isinstance(zeros, Tensor) and zeros.numel() and bool((zeros == zeros.flatten()[0]).all()):
            zeros = int(zeros.flatten()[0])
        if isinstance(zeros, int):
            return Codes(codes, smallest(scale), None, zeros, self.kind)
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
        shape = self._tensors.shape(self._name(name))
        if len(shape) != dims:
            raise self._unfit(f"{name!r} of shape {list(shape)}")
        return shape

    def _read(self, name: str, *spans: Span) -> Tensor:
        return self._tensors.read(self._name(name), tuple(Cut(dim, (span,)) for dim, span in enumerate(spans)))

    def _words(self, name: str, dim: int, along: Span, across: Span) -> Tensor:
        """uint8: the codes `along` the dimension in which they are packed, and `across` the other one."""
        per_word = 32 // self.bits
        words = along[0] // per_word, -(-along[1] // per_word)
        packed = self._read(name, *((words, across) if dim == 0 else (across, words)))
        start = along[0] - words[0] * per_word
        return unpack(packed, self.bits, dim).narrow(dim, start, along[1] - along[0])

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self._tensors.shape(self._name(name))) != shape:
            raise ModelLoadError(
                f"{self._name(name)!r} is {list(found)}, but {self._name(self.stored.first)!r} requires {list(shape)}: "
                "config.json and weights do not belong together."
            )

    def _unfit(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"The quantized matrix {self._owner!r} has {what}, which is not read: config.json and weights may not "
            "belong together."
        )


class Awq(CodedMatrix):
    """Words of outputs in an order of their own."""

    stored = STORED["awq"]

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

    stored, optional, index_name = STORED["gptq"], ("g_idx",), "g_idx"

    def _measure(self) -> None:
        words, outputs = self._shape("qweight")
        self.bits = self._scheme.bits
        inputs = words * 32 // self.bits
        # A matrix may have another number of bits than the config's.
        if "g_idx" in self.present:
            inputs = self._shape("g_idx", 1)[0]
            self.bits = words * 32 // max(1, inputs)
        elif (bits := self._shape("qzeros")[1] * 32 // max(1, outputs)) in _SIZES:
            self.bits, inputs = bits, words * 32 // bits
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

    stored = STORED["packed"]
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

    stored = STORED["int8"]

    def _measure(self) -> None:
        outputs, inputs = self._shape("weight")
        self.bits, self.groups, self.shape = 8, 1, (outputs, inputs)
        if self._tensors.shape(self._name("weight_scale")) not in ((), (1,)):
            self._expect("weight_scale", (outputs, 1))

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return self._read("weight", outputs, inputs).view(torch.uint8) ^ 128

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        if len(self._tensors.shape(self._name("weight_scale"))) < 2:
            return self._read("weight_scale").reshape(1, 1).repeat(outputs[1] - outputs[0], 1)
        return self._read("weight_scale", outputs, groups)

    def _zeros(self, _outputs: Span, _groups: Span) -> int:
        return 128


class Mxfp4(CodedMatrix):
    """Bytes of two inputs, and a scale for each 32."""

    stored, kind = STORED["mxfp4"], Kind.E2M1
    inputs_of_scale: ClassVar[int] = 32
    scale_dtype: ClassVar[str] = "U8"

    def _measure(self) -> None:
        outputs, half = self._shape(self.stored.first)
        self.bits, self.shape, self.groups = 4, (outputs, 2 * half), 2 * half // self.inputs_of_scale
        if 2 * half % self.inputs_of_scale:
            raise self._unfit(f"{2 * half} inputs")
        self._expect("weight_scale", (outputs, self.groups))
        if (found := self._tensors.dtype(self._name("weight_scale"))) != self.scale_dtype:
            raise self._unfit(f"scales in {found}")

    def _codes(self, outputs: Span, inputs: Span) -> Tensor:
        return _halves(self._read(self.stored.first, outputs, (inputs[0] // 2, inputs[1] // 2)))

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return powers(self._read("weight_scale", outputs, groups))

    def _zeros(self, _outputs: Span, _groups: Span) -> int:
        return 0


class Nvfp4(Mxfp4):
    """A scale for each 16 inputs, and one of all scales."""

    stored = STORED["nvfp4"]
    inputs_of_scale, scale_dtype = 16, "F8_E4M3"

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return self._read("weight_scale", outputs, groups).float() / self._of_all("weight_global_scale")

    def _of_all(self, name: str) -> Tensor:
        scale = self._read(name).float()
        if scale.numel() != 1:
            raise self._unfit(f"{name!r} of shape {list(scale.shape)}")
        return scale.reshape(())


class ModeloptNvfp4(Nvfp4):
    """The same under modelopt's names, with the reciprocal of the scale of all scales."""

    stored = STORED["modelopt-nvfp4"]

    def _scale(self, outputs: Span, groups: Span) -> Tensor:
        return self._read("weight_scale", outputs, groups).float() * self._of_all("weight_scale_2")


FORMATS: dict[str, type[CodedMatrix]] = {
    "awq": Awq,
    "gptq": Gptq,
    "packed": Packed,
    "int8": Int8,
    "mxfp4": Mxfp4,
    "nvfp4": Nvfp4,
    "modelopt-nvfp4": ModeloptNvfp4,
}


class Mxfp4Experts:
    """The matrices of all experts of a layer: X [experts, in, out], of X_blocks and X_scales.

    Raises ModelLoadError where these do not belong together.
    """

    GROUP = 32

    def __init__(self, stored: SafetensorsWeights, blocks: str, scales: str) -> None:
        self._stored, self._blocks, self._scales = stored, blocks, scales
        shape = stored.shape(blocks)
        if len(shape) != 4 or shape[3] != self.GROUP // 2 or stored.shape(scales) != shape[:3]:
            raise ModelLoadError(
                f"{scales!r} is {list(stored.shape(scales))}, but {blocks!r} {list(shape)} requires "
                f"{list(shape[:3])}, and blocks of 16 bytes: config.json and weights do not belong together."
            )
        self.shape = shape[0], shape[2] * self.GROUP, shape[1]

    def codes(self, expert: int, outputs: Span, inputs: Span) -> Codes:
        """The codes of one expert, [outputs, inputs]. inputs: whole groups."""
        spans = ((expert, expert + 1), outputs, (inputs[0] // self.GROUP, inputs[1] // self.GROUP))
        cuts = tuple(Cut(dim, (span,)) for dim, span in enumerate(spans))
        scale = powers(self._stored.read(self._scales, cuts)[0])
        if not bool(scale.isfinite().all()):
            raise ModelLoadError(f"The scales {self._scales!r} are not finite: the checkpoint is damaged.")
        codes = _halves(self._stored.read(self._blocks, cuts)[0].flatten(-2))
        return Codes(codes, smallest(scale), kind=Kind.E2M1)


def smallest(scale: Tensor) -> Tensor:
    """The same numbers in float16 if that has all of them, else in float32."""
    half = scale.half()
    return half if scale.dtype is torch.float16 or torch.equal(half.float(), scale.float()) else scale.float()


def powers(scale: Tensor) -> Tensor:
    """Exponents of two in uint8, plus 127, as float32; 255 stands for no number."""
    values = torch.exp2(scale.float() - 127)
    return values.masked_fill(scale == 255, torch.nan)


def _halves(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> codes [..., 2n], the first one of a byte in its low half."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words with neighbours along `dim`, the first one in the lowest bits -> uint8, 32 / bits times as long."""
    words = packed.movedim(dim, -1).clone(memory_format=torch.contiguous_format)
    stored = words.view(torch.uint8)  # the lowest bits of a word are its first byte
    return (stored if bits == 8 else _halves(stored)).movedim(-1, dim)
