"""The tensors of a GGUF file under transformers' names.

The llama family stores the rows of q and k in another order (each head's rotary halves interleaved), which is reversed
here.
"""

from collections.abc import Iterator
from math import prod

import gguf
import numpy as np
import torch

from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.gguf_codes import format_of, read_codes
from headrace_worker.model.gguf_config import ROPE_FACTORS, weight_names
from headrace_worker.model.gguf_file import GgufFile, GgufTensor
from headrace_worker.model.gguf_metadata import number, text
from headrace_worker.model.gguf_tensors import check_tensors, storage_of
from headrace_worker.model.packable import PackableMatrix
from headrace_worker.model.sharding.cuts import Cuts, spans_of
from headrace_worker.model.weights import check_name, join

_INTERLEAVED_ROTARY = {"llama"}  # q and k rows are stored permuted


class GgufWeights:
    """Tensors of a GGUF file under transformers' names: dequantized to float32 when read, or as codes."""

    def __init__(self, file: GgufFile) -> None:
        self.read_bytes = 0
        self._file = file
        self._arch = text(file.metadata, "general.architecture")
        check_tensors(file)
        self._by_name: dict[str, GgufTensor] = {name: file.tensors[stored] for name, stored in weight_names(file)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._by_name[name].shape

    def read(self, name: str, cuts: Cuts = ()) -> torch.Tensor:
        check_name(name, self._by_name)
        tensor = self._by_name[name]
        ranges = [spans_of(cuts, dim, size) for dim, size in enumerate(tensor.shape)]
        head = self._permuted_head(name, tensor)
        return join(ranges, lambda spans: self._read_block(tensor, spans, head))

    @property
    def packable(self) -> int:
        """How many matrices have codes, which stay as they are on a CPU."""
        kinds = (storage_of(tensor).kind for tensor in self._by_name.values() if len(tensor.shape) == 2)
        return sum(format_of(kind) is not None for kind in kinds)

    def read_codes(self, name: str, cuts: Cuts = ()) -> PackableMatrix | None:
        """A matrix without its values; None where it has no codes, or is cut within their groups."""
        check_name(name, self._by_name)
        tensor = self._by_name[name]
        storage = storage_of(tensor)
        known = format_of(storage.kind)
        if known is None or len(tensor.shape) != 2:
            return None
        (outputs, inputs) = (spans_of(cuts, dim, size) for dim, size in enumerate(tensor.shape))
        if len(inputs) > 1 or any(edge % storage.block for edge in inputs[0]):
            return None
        row_bytes = storage.row_bytes(tensor)
        raw = np.frombuffer(tensor.buffer, np.uint8, tensor.shape[0] * row_bytes, tensor.offset)
        columns = slice(*(edge // storage.block * storage.block_bytes for edge in inputs[0]))
        parts = [raw.reshape(-1, row_bytes)[slice(*span), columns] for span in outputs]
        self.read_bytes += sum(part.nbytes for part in parts)
        codes = read_codes(storage.kind, np.concatenate(parts))
        if head := self._permuted_head(name, tensor):
            codes = codes.rows(torch.arange(len(codes.codes)).view(-1, head // 2, 2).swapaxes(1, 2).flatten())
        return PackableMatrix(codes, known.form)

    def _permuted_head(self, name: str, tensor: GgufTensor) -> int:
        """Rows of a head whose rows are in another order than transformers has them; 0 for other tensors."""
        permuted = self._arch in _INTERLEAVED_ROTARY and (".q_proj." in name or ".k_proj." in name)
        return self._head_rows(tensor, "q_proj" in name) if permuted else 0

    def _read_block(self, tensor: GgufTensor, spans: tuple[Span, ...], head: int) -> torch.Tensor:
        """One span of each dimension; `head`: rows of a head if they must be reordered to transformers' order."""
        values = self._dequantize(tensor, spans)
        if head:
            # From (pair, half) order to (half, pair) order: transformers rotates halves.
            shape = values.shape
            values = values.reshape(shape[0] // head, head // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        # Unquantized tensors are views of the read-only map.
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary inverse frequencies [head_dim / 2], if the file has them."""
        tensor = self._file.tensors.get(ROPE_FACTORS)
        return None if tensor is None else torch.from_numpy(self._dequantize(tensor).copy())

    def _dequantize(self, tensor: GgufTensor, spans: tuple[Span, ...] | None = None) -> np.ndarray:
        """The elements of one span per dimension (None = all), from the quantization blocks that contain them."""
        shape = tensor.shape
        spans = spans or tuple((0, size) for size in shape)
        storage = storage_of(tensor)
        block, block_bytes, row_bytes = storage.block, storage.block_bytes, storage.row_bytes(tensor)
        count = prod(shape[:-1]) * row_bytes
        raw = np.frombuffer(tensor.buffer, np.uint8, count, tensor.offset).reshape(*shape[:-1], row_bytes)
        first, stop = spans[-1]
        start = first // block  # quantization blocks run along rows
        columns = slice(start * block_bytes, -(-stop // block) * block_bytes)
        chosen = raw[(*(slice(*span) for span in spans[:-1]), columns)]
        self.read_bytes += chosen.nbytes
        rows = np.ascontiguousarray(chosen).reshape(-1, chosen.shape[-1])
        values = np.asarray(gguf.dequantize(rows, storage.kind), dtype=np.float32)
        values = values[:, first - start * block : stop - start * block]
        return values.reshape([end - begin for begin, end in spans])

    def _head_rows(self, tensor: GgufTensor, query: bool) -> int:
        heads = number(self._file.metadata, f"{self._arch}.attention.head_count")
        if not query:
            heads = number(self._file.metadata, f"{self._arch}.attention.head_count_kv", heads)
        return tensor.shape[0] // heads
