"""Makes the operator's certificates for tests, under the names that `--tls` expects."""

from __future__ import annotations

from pathlib import Path

import trustme


def make_certificates(folder: Path, *hosts: str, authority: trustme.CA | None = None) -> Path:
    """Write tls.crt and tls.key, good for these hosts, and ca.crt; returns the folder."""
    authority = authority or trustme.CA()
    leaf = authority.issue_cert(*hosts)
    leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return folder
