"""One rank's part of a chunk as bytes: a piece per layer, then a trailer that identifies it.

A piece is [2, blocks, heads, block_size, head_dim]: keys, then values. Both sides know its size, so that no peer
decides how much is allocated.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest

import torch
from blake3 import blake3
from torch import Tensor

from headrace_worker.device.rank_device import RankDevice

MAC_BYTES = 32
_TRAILER = struct.Struct("<QIIQ")
TRAILER_BYTES = _TRAILER.size + MAC_BYTES


@dataclass(frozen=True, slots=True)
class Trailer:
    """Identity of a chunk's part, and a MAC over it and its pieces; `complete` unless its fetch was dropped."""

    fetch: int
    chunk: int
    complete: bool
    num_bytes: int
    mac: bytes  # [MAC_BYTES]

    def encode(self) -> Tensor:
        """[TRAILER_BYTES] uint8."""
        return torch.frombuffer(bytearray(_identity(self) + self.mac), dtype=torch.uint8)

    def equals(self, other: "Trailer") -> bool:
        """Compared in constant time."""
        return compare_digest(_identity(self) + self.mac, _identity(other) + other.mac)

    @classmethod
    def decode(cls, raw: Tensor) -> "Trailer":
        """From [TRAILER_BYTES] uint8."""
        data = raw.numpy().tobytes()
        fetch, chunk, complete, num_bytes = _TRAILER.unpack_from(data)
        return cls(fetch, chunk, complete == 1, num_bytes, data[_TRAILER.size :])


class PieceMac:
    """Counts the bytes of pieces and computes the MAC of their trailer: BLAKE3, keyed."""

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes, of one direction between two ranks."""
        self.num_bytes = 0
        self._hash = blake3(key=key)

    def add(self, piece: Tensor) -> None:
        """A contiguous piece in host memory."""
        raw = piece.reshape(-1).view(torch.uint8).numpy().data
        self._hash.update(raw)
        self.num_bytes += len(raw)

    def trailer(self, fetch: int, chunk: int, *, complete: bool) -> Trailer:
        """The trailer of the pieces so far; the last call on this object."""
        unsigned = Trailer(fetch, chunk, complete, self.num_bytes, b"")
        self._hash.update(_identity(unsigned))
        return Trailer(fetch, chunk, complete, self.num_bytes, self._hash.digest(MAC_BYTES))


def _identity(trailer: Trailer) -> bytes:
    return _TRAILER.pack(trailer.fetch, trailer.chunk, trailer.complete, trailer.num_bytes)


def new_piece(device: RankDevice, pool: Tensor, blocks: int, heads: int) -> Tensor:
    """An unfilled piece [2, blocks, heads, P, D] in host memory for a pool [2, B, K, P, D]."""
    _, _, _, positions, size = pool.shape
    return device.host_memory((2, blocks, heads, positions, size), pool.dtype)


def upload_index(device: RankDevice, blocks: Sequence[int]) -> Tensor:
    """[blocks] int64 on the device."""
    return device.upload(torch.tensor(blocks, dtype=torch.int64))


def read_blocks(device: RankDevice, pool: Tensor, index: Tensor, heads: tuple[int, int]) -> Tensor:
    """A piece on the device, copied from blocks of a pool [2, B, K, P, D]; waits until the copy is complete.

    `heads`: range within the pool's heads.
    """
    piece = pool[:, :, heads[0] : heads[1]].index_select(1, index)
    device.mark().synchronize()
    return piece


def write_blocks(device: RankDevice, pool: Tensor, index: Tensor, heads: tuple[int, int], piece: Tensor) -> None:
    """Copies a piece on the device into blocks of a pool [2, B, K, P, D]; waits until the copy is complete."""
    pool[:, :, heads[0] : heads[1]].index_copy_(1, index, piece)
    device.mark().synchronize()
