"""A certificate for test servers."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> Path:
    """Make a certificate for 127.0.0.1 that is valid for a week, and its `key.pem`."""
    options = ("-x509", "-nodes", "-newkey", "rsa:2048", "-days", "7", "-subj", "/CN=tests")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(["openssl", "req", *options, *names, *files], check=True, capture_output=True)
    return folder / "cert.pem"
