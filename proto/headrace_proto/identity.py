"""The identity of one process in its cluster: mutual TLS on every internal connection."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.x509.oid import NameOID

from headrace_proto.component import Certificate, Component
from headrace_proto.errors import HeadraceError
from headrace_proto.reloading_credentials import reloading_credentials

_SUITE = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_INFO = b"headrace 2026 sealed message v2"


class SealedMessageError(HeadraceError):
    """A sealed message was made for another process, or was changed."""


class _Saved(msgspec.Struct, frozen=True):
    key: str
    certificate: Certificate


class Identity:
    """A private key that stays in this process, and the certificate that `install` sets and replaces.

    The connections that are open continue when the certificate is replaced; new ones use the new certificate.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """key: none = a new one."""
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        self._clock = clock
        self._renew_at = 0.0
        self._expires = 0.0
        self._certificate: Certificate | None = None

    @classmethod
    def restore(cls, saved: bytes) -> "Identity":
        """The inverse of `save`. Its certificate is due at once: its age is not known."""
        decoded = msgspec.msgpack.decode(saved, type=_Saved)
        key = serialization.load_pem_private_key(decoded.key.encode(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        identity = cls(key)
        identity.install(decoded.certificate)
        identity._renew_at = identity._clock()
        return identity

    def save(self) -> bytes:
        """Key and certificate: for a pipe to a child process, never for an argument, a log or a file of others."""
        return msgspec.msgpack.encode(_Saved(self._key_pem, self.certificate))

    @property
    def certificate(self) -> Certificate:
        """What was installed last."""
        if self._certificate is None:
            raise HeadraceError("this process has no certificate of its cluster yet; it gets one when it is started")
        return self._certificate

    @property
    def name(self) -> str:
        """The name in the certificate: peers know this process by it."""
        leaf = x509.load_pem_x509_certificate(self.certificate.chain.encode())
        return "".join(str(part.value) for part in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME))

    @property
    def request(self) -> bytes:
        """The certificate request for the authority, as PEM."""
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def install(self, certificate: Certificate) -> None:
        """Uses a certificate for all connections from now on. From any thread."""
        self._renew_at = self._clock() + certificate.renew_seconds
        leaf = x509.load_pem_x509_certificate(certificate.chain.encode())
        self._expires = leaf.not_valid_after_utc.timestamp()
        self._certificate = certificate

    @property
    def expired(self) -> bool:
        """Whether peers refuse the certificate by its date. Connections that are open continue."""
        return time.time() > self._expires

    def is_due(self, authorities: Sequence[bytes]) -> bool:
        """Whether another certificate is needed. authorities: the fingerprints of the valid ones."""
        # The clock of renewals may have stood still while the machine slept; the date is what peers check.
        late = self._clock() >= self._renew_at or self.expired
        return late or self.certificate.authorities != tuple(authorities)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that accepts members of the cluster only; `CallerInterceptor` decides which may call what."""
        return reloading_credentials(lambda: self.certificate, self._server_configuration, require_client=True)

    def channel(self, address: str, peer: Component, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel to a process that proves to be `peer`; until then nothing but the handshake is sent."""
        certificate = self.certificate
        credentials = grpc.ssl_channel_credentials(
            certificate.trust.encode(), self._key_pem.encode(), certificate.chain.encode()
        )
        named = (*options, ("grpc.ssl_target_name_override", peer.dns_name))
        return grpc.aio.secure_channel(address, credentials, options=named)

    def unseal(self, sealed: bytes) -> bytes:
        """The message that `seal` encrypted for this process. Raises SealedMessageError."""
        try:
            return _SUITE.decrypt(sealed, self._key, info=_INFO)
        except InvalidTag as error:
            raise SealedMessageError(
                "a sealed message cannot be read: it was made for another process; start this one again"
            ) from error

    @property
    def _key_pem(self) -> str:
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return self._key.private_bytes(*form).decode()

    def _server_configuration(self, certificate: Certificate) -> Any:
        pair = (self._key_pem.encode(), certificate.chain.encode())
        return grpc.ssl_server_certificate_configuration([pair], certificate.trust.encode())


def seal(request: bytes, message: bytes) -> bytes:
    """Encrypts a message for the process that made a certificate request, over a network that others may read.

    HPKE (RFC 9180) in its base mode. It does not authenticate the sender: Ray does.
    """
    receiver = x509.load_pem_x509_csr(request).public_key()
    assert isinstance(receiver, ec.EllipticCurvePublicKey)
    return _SUITE.encrypt(message, receiver, info=_INFO)
