"""A certificate authority of a test's own."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace_base.settings import TLS_NAME

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for localhost, 127.0.0.1 and members of a cluster; `file` has its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.days = (-1, 1)  # from now, of the validity of what it issues
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.file = folder / f"{name}.pem"
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        self.file.chmod(0o600)

    def issue(self, name: str, *, cert: Path | None = None, key: Path | None = None) -> tuple[Path, Path]:
        """The files of a new certificate and its key. name: its common name."""
        cert, key = cert or self._folder / f"{name}.pem", key or self._folder / f"{name}.key"
        private = ec.generate_private_key(ec.SECP256R1())
        hosts = [x509.DNSName("localhost"), x509.DNSName(TLS_NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(_name(name), self._name, private.public_key(), self.days)
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        clear, pkcs8 = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8
        _replace(key, private.private_bytes(serialization.Encoding.PEM, pkcs8, clear))
        _replace(cert, _pem(builder.sign(self._key, hashes.SHA256())))
        return cert, key


def common_name(certificate: bytes) -> str:
    """Of a certificate in DER."""
    subject = x509.load_der_x509_certificate(certificate).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def passphrase_key() -> bytes:
    """A key in PEM that needs a passphrase."""
    locked = serialization.BestAvailableEncryption(b"passphrase")
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    beside.touch(mode=0o600)
    beside.write_bytes(content)
    beside.replace(path)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: tuple[int, int] = (-1, 1)
) -> x509.CertificateBuilder:
    first, last = (datetime.datetime.now(datetime.UTC) + day * DAY for day in days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
