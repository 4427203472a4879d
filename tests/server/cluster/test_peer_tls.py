"""What a gateway accepts as another gateway of its cluster with TLS."""

import ssl
from pathlib import Path

import pytest

from models.errors import SettingsError
from server.cluster.peer_tls import peer_tls
from tests.server.certificates import make_certificate


def fails(client: ssl.SSLContext, certificate: tuple[Path, Path]) -> bool:
    """Whether the handshake with a server of this certificate fails, without sockets."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), serving.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(4):
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return True
    assert not sides, "expected a handshake that ends"
    return False


def test_trusts_its_own_certificate_or_those_of_a_file(tmp_path: Path) -> None:
    own, other = (make_certificate(tmp_path, name, subject="DNS:talk.example.org") for name in ("own", "other"))
    pinned = peer_tls(own[0], None)
    assert pinned is not None and not fails(pinned, own) and fails(pinned, other)
    chain = tmp_path / "chain.pem"
    chain.write_text(own[0].read_text() + other[0].read_text())
    first = peer_tls(chain, None)
    assert first is not None and not fails(first, own) and fails(first, other), "expected the first of a chain only"
    both = peer_tls(None, chain)
    assert both is not None and not fails(both, own) and not fails(both, other), "expected all of the file"
    assert peer_tls(None, None) is None


def test_refuses_files_without_certificates(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("no certificate")
    for name in ("empty", "missing"):
        with pytest.raises(SettingsError, match=r"service\.ssl_cafile: expected"):
            peer_tls(None, tmp_path / name)
