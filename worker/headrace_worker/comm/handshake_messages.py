"""The three messages by which a rank and rank 0 prove to each other that they know the rendezvous token.

rank ── Hello (rank, process id, nonce) ──▶ rank 0, which sends nothing to a connection without a valid one
     ◀── Answer (process id, nonce) ──────
     ── Confirmation ───────────────────▶ made from both nonces: a repeated Hello admits nobody

Each ends with a MAC under a key of its own, over all bytes so far.
"""

import secrets
import struct
from dataclasses import dataclass
from hmac import compare_digest

from headrace_worker.comm.link_keys import MAC_BYTES, LinkKeys, compute_mac, derive_key

_HELLO = struct.Struct("!4sHI16s")
_ANSWER = struct.Struct("!I16s")
_MAGIC = b"HRR1"
HELLO_BYTES = _HELLO.size + MAC_BYTES
ANSWER_BYTES = _ANSWER.size + MAC_BYTES
CONFIRMATION_BYTES = MAC_BYTES


@dataclass(frozen=True, slots=True)
class Handshake:
    """The messages sent and received so far, by an end that knows the token."""

    token: bytes
    transcript: bytes = b""

    def sign(self, purpose: str, message: bytes) -> tuple["Handshake", bytes]:
        """The handshake with `message`, and the message with its MAC."""
        signed = message + self._mac(purpose, message)
        return Handshake(self.token, self.transcript + signed), signed

    def verify(self, purpose: str, signed: bytes) -> tuple["Handshake", bytes] | None:
        """The handshake with the received message, and the message without its MAC; None if that is wrong."""
        message, mac = signed[:-MAC_BYTES], signed[-MAC_BYTES:]
        if not compare_digest(mac, self._mac(purpose, message)):
            return None
        return Handshake(self.token, self.transcript + signed), message

    def keys(self, *, on_rank_0: bool) -> LinkKeys:
        """Of the link, once all messages are exchanged."""
        return LinkKeys.of_session(self.token, self.transcript, on_rank_0=on_rank_0)

    def _mac(self, purpose: str, message: bytes) -> bytes:
        return compute_mac(derive_key(self.token, purpose), self.transcript + message)


def sign_hello(token: bytes, rank: int, pid: int) -> tuple[Handshake, bytes]:
    return Handshake(token).sign("hello", _HELLO.pack(_MAGIC, rank, pid, secrets.token_bytes(16)))


def verify_hello(token: bytes, signed: bytes) -> tuple[Handshake, int, int] | None:
    """Rank and process id of a genuine Hello."""
    verified = Handshake(token).verify("hello", signed)
    if verified is None:
        return None
    magic, rank, pid, _ = _HELLO.unpack(verified[1])
    return (verified[0], rank, pid) if magic == _MAGIC else None


def sign_answer(handshake: Handshake, pid: int) -> tuple[Handshake, bytes]:
    return handshake.sign("answer", _ANSWER.pack(pid, secrets.token_bytes(16)))


def verify_answer(handshake: Handshake, signed: bytes) -> tuple[Handshake, int] | None:
    """Process id of rank 0."""
    verified = handshake.verify("answer", signed)
    return (verified[0], _ANSWER.unpack(verified[1])[0]) if verified is not None else None


def sign_confirmation(handshake: Handshake) -> tuple[Handshake, bytes]:
    return handshake.sign("confirmation", b"")


def verify_confirmation(handshake: Handshake, signed: bytes) -> Handshake | None:
    verified = handshake.verify("confirmation", signed)
    return verified[0] if verified is not None else None
