"""One rank's part of a chunk as bytes: a piece per layer, then a trailer that identifies it.

A piece is [2, blocks, heads, block_size, head_dim]: keys, then values. Both sides know its size, so that no peer
decides how much is allocated.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

TRAILER_BYTES = 32
_TRAILER = struct.Struct("<QIIQQ")


@dataclass(frozen=True, slots=True)
class Trailer:
    """Identity and checksum of a chunk's part: `complete` unless its fetch was dropped meanwhile."""

    fetch: int
    chunk: int
    complete: bool
    num_bytes: int
    checksum: int  # XXH3 of all pieces in order

    def encode(self) -> Tensor:
        """[32] uint8."""
        packed = _TRAILER.pack(self.fetch, self.chunk, self.complete, self.num_bytes, self.checksum)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def decode(cls, raw: Tensor) -> "Trailer":
        """From [32] uint8."""
        fetch, chunk, complete, num_bytes, checksum = _TRAILER.unpack(raw.numpy().tobytes())
        return cls(fetch, chunk, complete == 1, num_bytes, checksum)


class PieceChecksum:
    """Counts the bytes of pieces and computes their checksum."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._hash = xxhash.xxh3_64()

    def add(self, piece: Tensor) -> None:
        """A contiguous piece in host memory."""
        raw = piece.reshape(-1).view(torch.uint8).numpy().data
        self._hash.update(raw)
        self.num_bytes += len(raw)

    @property
    def checksum(self) -> int:
        return int(self._hash.intdigest())


def new_piece(pool: Tensor, blocks: int, heads: int) -> Tensor:
    """An unfilled piece [2, blocks, heads, P, D] in host memory for a pool [2, B, K, P, D]."""
    _, _, _, positions, size = pool.shape
    return torch.empty((2, blocks, heads, positions, size), dtype=pool.dtype, pin_memory=pool.is_cuda)


def read_blocks(pool: Tensor, blocks: Sequence[int], heads: tuple[int, int]) -> Tensor:
    """Copies blocks of a pool [2, B, K, P, D] into a piece in host memory. `heads`: range within the pool's heads."""
    index = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
    found = pool[:, :, heads[0] : heads[1]].index_select(1, index)
    if not found.is_cuda:
        return found
    piece = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)  # pragma: no cover - needs a GPU
    piece.copy_(found, non_blocking=True)
    torch.cuda.current_stream(pool.device).synchronize()
    return piece


def write_blocks(pool: Tensor, blocks: Sequence[int], heads: tuple[int, int], piece: Tensor) -> None:
    """Copies a piece into blocks of a pool [2, B, K, P, D]; on a GPU waits until the copy is complete."""
    index = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
    pool[:, :, heads[0] : heads[1]].index_copy_(1, index, piece.to(pool.device, non_blocking=True))
    if pool.is_cuda:  # pragma: no cover - needs a GPU
        torch.cuda.current_stream(pool.device).synchronize()
