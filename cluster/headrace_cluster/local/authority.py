"""The authority of one cluster, which certifies its processes.

The cluster's secret is all that an operator keeps: the authority's key is derived from it, so that every controller of
the cluster is the same authority, and no file has a key. Two secrets may be valid at a time: the first one signs, both
are trusted.
"""

import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property

from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_proto.block_hash import derive_key
from headrace_proto.component import Certificate, Component
from headrace_proto.errors import HeadraceError

LIFETIME_SECONDS = 30 * 86400.0  # of a certificate: without a controller, members accept new connections this long
RENEW_SECONDS = LIFETIME_SECONDS / 3  # after this time a certificate is replaced

_SALT = b"headrace 2026 cluster authority v1"
_TENANT_CONTEXT = "headrace 2026 tenant salts v1"
_ALWAYS = (datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31))


class CertificateRequestError(HeadraceError):
    """A certificate request is malformed, or its sender does not have the key."""


class ClusterAuthority:
    """Certifies the processes of one cluster. Only `serve`, the controller and an operator's commands have it."""

    def __init__(self, secrets: Sequence[bytes], clock: Callable[[], float] = time.time) -> None:
        """secrets: the cluster's, the one that signs first. clock: unix seconds."""
        self._signing_secret = secrets[0]
        self._clock = clock
        self._roots = [_Root(secret) for secret in secrets]
        self.fingerprints = tuple(root.fingerprint for root in self._roots)

    @cached_property
    def trust(self) -> str:
        """The certificates of every valid secret, as PEM."""
        return "".join(root.certificate for root in self._roots)

    @cached_property
    def cache_key(self) -> bytes:
        """32 bytes for `BlockHasher`, the same for all replicas."""
        return derive_key(self._signing_secret)

    @cached_property
    def tenant_key(self) -> bytes:
        """32 bytes from which routers derive the tenants' salts, the same for all routers."""
        return blake3(self._signing_secret, derive_key_context=_TENANT_CONTEXT).digest()

    def certify(self, request: bytes, component: Component, name: str) -> Certificate:
        """A certificate for the key of a PEM request, of which nothing else counts.

        Raises CertificateRequestError.
        """
        root = self._roots[0]
        now = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_common_name(name[:64]))
            .issuer_name(root.subject)
            .public_key(_requested_key(request))
            .serial_number(x509.random_serial_number())
            .not_valid_before(_ALWAYS[0])  # the clock of another machine may be slow by any time
            .not_valid_after(now + datetime.timedelta(seconds=LIFETIME_SECONDS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(component.dns_name)]), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.key.public_key()), critical=False)
            .sign(root.key, hashes.SHA256())
        )
        return Certificate(
            chain=_pem(certificate) + self._cross_certificates,
            trust=self.trust,
            authorities=self.fingerprints,
            renew_seconds=RENEW_SECONDS,
        )

    @cached_property
    def _cross_certificates(self) -> str:
        """The root that signs, certified by the other ones: a process that was cut off while the secret changed, and
        trusts only these, can verify the controller and then renew.
        """
        signing, *others = self._roots
        return "".join(_root_certificate(signing, issuer, path_length=0) for issuer in others)

    def is_member(self, certificate: bytes) -> bool:
        """Whether a PEM certificate is of one of the valid secrets, and has not expired."""
        try:
            parsed = x509.load_pem_x509_certificate(certificate)
        except ValueError:
            return False
        now = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        return now <= parsed.not_valid_after_utc and any(root.has_signed(parsed) for root in self._roots)


class _Root:
    """The authority of one secret: the same key and name wherever it is derived."""

    def __init__(self, secret: bytes) -> None:
        # Each peer that connects receives a signature of this key and can test guesses of the secret with it: a slow
        # derivation makes each guess expensive. 48 bytes, so that the remainder is uniform.
        derived = hashlib.scrypt(secret, salt=_SALT, n=1 << 14, r=8, p=1, dklen=48)
        curve = ec.SECP256R1()
        self.key = ec.derive_private_key(int.from_bytes(derived) % (curve.group_order - 1) + 1, curve)
        public = self.key.public_key()
        encoded = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.fingerprint = blake3(encoded).digest(16)
        # A name of its own: verifiers look for the issuer of a certificate by name.
        self.subject = _common_name(f"headrace authority {self.fingerprint.hex()}")
        self.certificate = _root_certificate(self, self, path_length=1)

    def has_signed(self, certificate: x509.Certificate) -> bool:
        try:
            self.key.public_key().verify(
                certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256())
            )
        except InvalidSignature:
            return False
        return True


def _root_certificate(root: _Root, issuer: _Root, path_length: int) -> str:
    """path_length: authorities that may follow it in a chain."""
    public = root.key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(root.subject)
        .issuer_name(issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(issuer.key, hashes.SHA256())
    )
    return _pem(certificate)


def _requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    sentence = "the certificate request is not valid: it must be PEM with a P-256 key, signed with that key"
    try:
        parsed = x509.load_pem_x509_csr(request)
        key = parsed.public_key()
        if not parsed.is_signature_valid:
            raise CertificateRequestError(sentence)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise CertificateRequestError(sentence) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRequestError(sentence)
    return key


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
