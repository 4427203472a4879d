"""TLS of connections to the other gateways of a cluster, which are reached at IP addresses."""

import re
import ssl
from pathlib import Path

from models.errors import SettingsError

CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def peer_tls(certfile: Path | None, cafile: Path | None) -> ssl.SSLContext | None:
    """How connections to other gateways with TLS are checked; None: there are no such connections.

    Certificates name the host of clients and not the address of one gateway, so names are not checked: a gateway is
    accepted for the certificate of this one, or for one that `cafile` trusts.

    Args:
        certfile: certificate of this gateway, before those that signed it; None: it serves plain HTTP.
        cafile: certificates of the other gateways, or of authorities that sign for these gateways only; None:
            `certfile`, of which only the first one is trusted.
    Raises:
        SettingsError for a file without a certificate.
    """
    if cafile is None and certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the trusted certificate may be that of the gateway itself
    path = cafile if cafile is not None else certfile
    assert path is not None
    try:
        found = CERTIFICATE.findall(path.read_text("ascii", "replace"))
        context.load_verify_locations(cadata="\n".join(found if cafile is not None else found[:1]))
    except OSError as error:
        raise SettingsError("service.ssl_cafile", expected=f"a readable file {path}", got=error.strerror) from None
    except (ssl.SSLError, ValueError) as error:
        got = f"{path}: {error}"
        raise SettingsError("service.ssl_cafile", expected="a file with certificates (PEM)", got=got) from None
    return context
