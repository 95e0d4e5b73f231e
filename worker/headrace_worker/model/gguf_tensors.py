"""How the tensors of a GGUF file are stored, and whether all of them can be read. Imports no torch."""

from dataclasses import dataclass
from math import prod

import gguf
import numpy as np

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.gguf_file import GgufFile, GgufPart, GgufTensor


@dataclass(frozen=True, slots=True)
class Storage:
    """Quantization blocks along the rows of a tensor."""

    kind: gguf.GGMLQuantizationType
    block: int  # elements
    block_bytes: int

    def row_bytes(self, tensor: GgufTensor) -> int:
        return tensor.shape[-1] // self.block * self.block_bytes


# Bits of a value in memory where matrices of this kind stay packed (gguf_codes.py), with its share of the scales.
_PACKED_BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}


def packed_bytes(tensor: GgufTensor) -> int:
    """The bytes of a tensor on a CPU in float32, where matrices stay packed."""
    bits = _PACKED_BITS.get(storage_of(tensor).kind.name, 32) if len(tensor.shape) == 2 else 32
    return round(prod(tensor.shape) * bits / 8)


def storage_of(tensor: GgufTensor) -> Storage:
    """Raises ModelUnsupportedError for an unknown type."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        return Storage(kind, *gguf.GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError) as error:
        raise _unsupported(tensor) from error


def check_tensors(file: GgufFile) -> None:
    """Checks that every tensor is within its file, apart from others, and has a supported quantization. No value is
    read.

    Raises ModelLoadError, ModelUnsupportedError.
    """
    known: set[gguf.GGMLQuantizationType] = set()
    for part in file.parts:
        _check_places(part)
        for tensor in part.tensors.values():
            storage = storage_of(tensor)
            if storage.kind not in known:
                try:
                    gguf.dequantize(np.zeros((1, storage.block_bytes), np.uint8), storage.kind)
                except NotImplementedError as error:
                    raise _unsupported(tensor) from error
                known.add(storage.kind)


def _check_places(part: GgufPart) -> None:
    taken = part.header_bytes
    for tensor in sorted(part.tensors.values(), key=lambda entry: entry.offset):
        storage = storage_of(tensor)
        if not tensor.shape or tensor.shape[-1] % storage.block:
            raise ModelLoadError(
                f"{part.name} is damaged: {tensor.name} has the shape {list(tensor.shape)}; download it again."
            )
        end = tensor.offset + prod(tensor.shape[:-1]) * storage.row_bytes(tensor)
        if end > len(part.buffer):
            raise ModelLoadError(
                f"{part.name} is cut short: {tensor.name} ends at byte {end:,}, but the file has {len(part.buffer):,}; "
                "download it again."
            )
        if tensor.offset < taken:
            raise ModelLoadError(
                f"{part.name} is damaged: {tensor.name} begins inside another tensor or the header; download it again."
            )
        taken = end


def _unsupported(tensor: GgufTensor) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"GGUF tensor {tensor.name} has an unsupported quantization (type {tensor.type_id}): convert it to Q8_0, "
        "Q6_K, Q4_K or Q4_1."
    )
