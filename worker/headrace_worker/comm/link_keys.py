"""Keys between rank 0 and another rank, derived from the rendezvous token. The token itself never leaves a process.

BLAKE3 (github.com/BLAKE3-team/BLAKE3-specs): `derive_key` for keys, the keyed hash as MAC.
"""

from dataclasses import dataclass

from blake3 import blake3

MAC_BYTES = 16
_CONTEXT = "headrace 2026-11-22 rendezvous "


def derive_key(token: bytes, purpose: str) -> bytes:
    """32 bytes; keys of different purposes reveal nothing about each other or the token."""
    return blake3(token, derive_key_context=_CONTEXT + purpose).digest()


def compute_mac(key: bytes, data: bytes) -> bytes:
    """[MAC_BYTES] of `data` under a key of 32 bytes."""
    return blake3(data, key=key).digest(MAC_BYTES)


def compute_key(key: bytes, transcript: bytes) -> bytes:
    """[32] a key for one session."""
    return blake3(transcript, key=key).digest()


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The keys of one link: one per direction."""

    sending: bytes
    receiving: bytes

    @classmethod
    def of_session(cls, token: bytes, transcript: bytes, *, on_rank_0: bool) -> "LinkKeys":
        """`transcript`: the messages of the handshake, which contain a nonce of either end."""
        to_rank_0 = compute_key(derive_key(token, "frames to rank 0"), transcript)
        from_rank_0 = compute_key(derive_key(token, "frames from rank 0"), transcript)
        return cls(from_rank_0, to_rank_0) if on_rank_0 else cls(to_rank_0, from_rank_0)
