"""The credentials of a router that is started alone: a file for its owner only, which follows renewals."""

from pathlib import Path

import pytest

from headrace_cluster.local.authority import LIFETIME_SECONDS, ClusterAuthority
from headrace_cluster.local.router_credentials import issue_credentials
from headrace_proto.component import Component
from headrace_proto.identity import Identity
from headrace_proto.private_file import PrivateFileError
from headrace_router.config import RouterConfig
from headrace_router.credentials import CredentialsError, RouterCredentials
from headrace_router.server import RouterServer
from support import identities

YEAR_2026 = 1.77e9


def test_a_file_of_credentials_is_private_and_complete(tmp_path: Path) -> None:
    path, made = tmp_path / "credentials", issue_credentials(identities.authority(), "r")
    made.write(path)
    assert path.stat().st_mode & 0o777 == 0o600 and [entry.name for entry in tmp_path.iterdir()] == ["credentials"]
    assert RouterCredentials.read(path) == made and made.tenant_key == identities.authority().tenant_key
    path.chmod(0o604)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        RouterCredentials.read(path)


def test_a_file_that_is_none_or_old_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    with pytest.raises(CredentialsError, match="No such file"):
        RouterCredentials.read(path)
    for content in (b"", b"the secret", RouterCredentials(b"no identity", b"").encode()):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(CredentialsError, match="`headrace credentials` makes them"):
            RouterCredentials.read(path)
    past = ClusterAuthority((identities.SECRET,), clock=lambda: YEAR_2026 - LIFETIME_SECONDS)
    issue_credentials(past, "r").write(path)
    with pytest.raises(CredentialsError, match="have expired"):
        RouterCredentials.read(path)


def test_renewed_credentials_are_kept(tmp_path: Path) -> None:
    path, both = tmp_path / "credentials", identities.authority((b"another secret", identities.SECRET))
    config = RouterConfig(port=0, credentials=identities.router_credentials(), credentials_file=path)
    router = RouterServer(config)
    assert router._identity.is_due(identities.authority().fingerprints), "its age is not known"
    router._identity.install(both.certify(router._identity.request, Component.ROUTER, "r"))
    for given, expected in ((b"", identities.authority().tenant_key), (both.tenant_key, both.tenant_key)):
        router._keep_credentials(given)  # without one, as an older controller answers, the key stays as it was
        kept = RouterCredentials.read(path)
        assert Identity.restore(kept.identity).certificate.authorities == both.fingerprints
        assert kept.tenant_key == expected
    path.unlink()
    path.mkdir()  # it cannot be replaced: the router goes on
    router._keep_credentials(both.tenant_key)
