"""The authority of a cluster: what it certifies, and which certificates are valid."""

import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headrace_cluster.local.authority import LIFETIME_SECONDS, CertificateRequestError, ClusterAuthority
from headrace_proto.component import Component
from headrace_proto.identity import Identity
from support.identities import SECRET, authority, member

OTHER = b"the secret of another cluster in tests"


def test_a_certificate_is_valid_on_a_machine_whose_clock_is_slow() -> None:
    """Else a controller with a fast clock would cut off members that serve, and take them for lost."""
    ahead = ClusterAuthority((SECRET,), lambda: time.time() + 86_400)
    issued = ahead.certify(Identity().request, Component.ROUTER, "r").chain.encode()
    assert x509.load_pem_x509_certificate(issued).not_valid_before_utc.timestamp() < time.time()


def test_the_same_secret_is_the_same_authority() -> None:
    first, second = ClusterAuthority((SECRET,)), ClusterAuthority((SECRET,))
    assert first.fingerprints == second.fingerprints != authority((OTHER,)).fingerprints
    assert first.cache_key == second.cache_key != authority((OTHER,)).cache_key
    assert first.tenant_key == second.tenant_key != first.cache_key


def _rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def _changed_request() -> bytes:
    """Another key than the one that signed."""
    first, second = (x509.load_pem_x509_csr(Identity().request) for _ in range(2))
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    encoded = first.public_bytes(serialization.Encoding.DER).replace(
        first.public_key().public_bytes(*form), second.public_key().public_bytes(*form)
    )
    return x509.load_der_x509_csr(encoded).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("request_", [b"", b"no PEM", _rsa_request(), _changed_request()])
def test_a_request_without_proof_of_its_key_is_refused(request_: bytes) -> None:
    with pytest.raises(CertificateRequestError, match="P-256"):
        authority().certify(request_, Component.ROUTER, "r")


def test_members_are_those_of_valid_secrets_until_they_expire() -> None:
    now = 1_800_000_000.0
    ours = ClusterAuthority((SECRET,), lambda: now)
    chain = ours.certify(Identity().request, Component.ROUTER, "r").chain.encode()
    assert ours.is_member(chain) and ClusterAuthority((OTHER, SECRET), lambda: now).is_member(chain)
    assert not ClusterAuthority((OTHER,), lambda: now).is_member(chain)
    assert not ClusterAuthority((SECRET,), lambda: now + LIFETIME_SECONDS + 1).is_member(chain)
    assert not ours.is_member(b"") and not ours.is_member(chain[:100])


def test_a_member_cannot_certify_others() -> None:
    """A leaf is no authority, whatever its chain contains."""
    inner = member(Component.ROUTER)
    chain = x509.load_pem_x509_certificate(inner.certificate.chain.encode())
    constraints = chain.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and not constraints.value.ca
