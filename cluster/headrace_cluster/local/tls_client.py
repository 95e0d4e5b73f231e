"""Connections of our own clients: over TLS a server's certificate is always verified."""

import http.client
import re
import ssl
from pathlib import Path

from headrace_cluster.errors import CertificateError
from headrace_cluster.local.state import ServeState

_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME, for which Python has no name
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def reachable(host: str) -> str:
    """The host to which a client on this machine connects for a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)


def tls_of(server: ServeState) -> ssl.SSLContext | None:
    """For clients of a server on this machine; None if it uses no TLS. Raises CertificateError."""
    return pinned(Path(server.tls_cert)) if server.tls_cert else None


def pinned(cert: Path) -> ssl.SSLContext:
    """Accepts one certificate alone, whatever names it has: the first one in the file of a server on this machine.

    Raises CertificateError.
    """
    try:
        found = _CERTIFICATE.search(cert.read_text(encoding="ascii"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # no other certificate is accepted, so its names are not needed
        # Its dates are not needed, either: the file is the server's own.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        context.load_verify_locations(cadata=found[0] if found is not None else "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no certificate in PEM"
        raise CertificateError(f"the server's certificate {cert} cannot be read: {reason}") from error
    return context


def trusted(ca: Path | None, client_cert: Path | None = None) -> ssl.SSLContext:
    """Accepts certificates for the host's name, of the authorities in `ca`; None = those of this machine.

    Raises CertificateError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise CertificateError(f"the authorities in {ca} (--ca) cannot be used: {_reason(error)}") from error
    return present(context, client_cert)


def present(context: ssl.SSLContext, client_cert: Path | None) -> ssl.SSLContext:
    """Adds a client certificate: a file with the certificate and its key. Raises CertificateError."""
    if client_cert is not None:
        try:
            context.load_cert_chain(client_cert, password=_refuse_passphrase)
        except OSError as error:
            raise CertificateError(
                f"the client certificate {client_cert} cannot be used ({_reason(error)}): the file must have the "
                "certificate and its key, in PEM"
            ) from error
    return context


def open_connection(host: str, port: int, timeout: float, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    """Not connected yet. context: None = no TLS."""
    if context is None:
        return http.client.HTTPConnection(host, port, timeout=timeout)
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)


def tls_failure(address: str, error: Exception) -> CertificateError | None:
    """The error for a TLS connection that failed; None if TLS is not the reason. address: host:port."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return CertificateError(
            f"the certificate of {address} is not accepted ({error.verify_message}); name the authority that signed it "
            "in HEADRACE_CA, a file (chat: --ca FILE)"
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return CertificateError(f"no TLS connection to {address} ({_reason(error)}); does this port use TLS?")
    return None


def handshake_closed(address: str, error: Exception) -> CertificateError | None:
    """The error for a server that may require a client certificate, and has closed; None if it did not close."""
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError):  # asyncio's servers send no alert
        return CertificateError(
            f"the server at {address} closed the TLS connection; if it requires a client certificate, pass "
            "--client-cert FILE with one that has not expired, of an authority that it accepts"
        )
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _refuse_passphrase() -> str:
    raise CertificateError("the key of the client certificate has a passphrase: write it without")
