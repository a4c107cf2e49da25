"""A certificate for servers that tests run."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> Path:
    """Make a certificate of 127.0.0.1 that ends in a week, with `key.pem` beside it."""
    options = ("-x509", "-nodes", "-newkey", "rsa:2048", "-days", "7", "-subj", "/CN=tests")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(["openssl", "req", *options, *names, *files], check=True, capture_output=True)
    return folder / "cert.pem"
