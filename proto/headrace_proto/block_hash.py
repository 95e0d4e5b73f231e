"""The identity of a KV-cache block, computed identically by routers (for placement) and replicas (for sharing).

Definition. All integers are little-endian; ``field(b)`` is the byte length of b as u32 followed by b.

* The key is ``blake3.derive_key("headrace 2026 block hash v1", cluster_secret)``: 32 bytes, the same on every node of
  a cluster and over restarts, unknown to clients, so that no client can construct a collision or a lookup.
* The root of a chain is the keyed BLAKE3, cut to 16 bytes, of the fields of `CacheScope` in the order they are
  declared, strings as UTF-8, integers as u64.
* The hash of block i is the keyed BLAKE3, cut to 16 bytes, of ``parent || u32 token ids``, where parent is the hash
  of block i - 1, or the root for block 0. Only full blocks have a hash.

Two blocks with equal hashes therefore hold the KV entries of the same tokens after the same prefix, of the same
model, revision, adapter, dtypes, layout and tenant. A replica still compares token ids on a hit.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from sys import byteorder

from blake3 import blake3

HASH_BYTES = 16
_CONTEXT = "headrace 2026 block hash v1"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Everything besides the tokens that a block's content depends on, or that limits which requests may share it."""

    tenant_salt: bytes
    model: str
    revision: str
    adapter: str
    dtype: str
    kv_dtype: str
    layout_version: int
    block_size: int
    group: int


def derive_key(cluster_secret: bytes) -> bytes:
    """The 32-byte hash key of a cluster."""
    return blake3(cluster_secret, derive_key_context=_CONTEXT).digest()


class BlockHasher:
    """Chains block hashes under one key. Stateless but for the key; safe to share between threads."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def root(self, scope: CacheScope) -> bytes:
        """The parent of a chain's first block: 16 bytes."""
        parts = bytearray()
        for entry in fields(scope):
            value = getattr(scope, entry.name)
            if isinstance(value, int):
                raw = value.to_bytes(8, "little")
            else:
                raw = value.encode() if isinstance(value, str) else value
            parts += len(raw).to_bytes(4, "little") + raw
        return blake3(bytes(parts), key=self._key).digest(HASH_BYTES)

    def block(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of one full block of token ids after `parent`: 16 bytes."""
        return blake3(parent + pack_tokens(token_ids), key=self._key).digest(HASH_BYTES)

    def chain(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """Hashes of all full blocks of a token sequence, first block first."""
        hashes: list[bytes] = []
        parent = root
        for end in range(block_size, len(token_ids) + 1, block_size):
            parent = self.block(parent, token_ids[end - block_size : end])
            hashes.append(parent)
        return hashes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as consecutive little-endian u32."""
    packed = array("I", token_ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
