"""Certificates for servers of tests."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str, *options: str, subject: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Create a certificate and its key. subject: of whom, an IP address or a DNS name."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", f"subjectAltName={subject}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *(options or ["-nodes"])], check=True, capture_output=True, timeout=60)
    return cert, key
