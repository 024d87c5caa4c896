"""Keeps a process's credentials for other processes of its job: the peer key, and certificates.

The key proves that the process is of the job. With the operator's certificates (`--tls`) the
connection is encrypted before either side proves anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.net.tls import PeerTls, peer_tls_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Identifies a process of a job to its peers. `tls`: None for plain connections."""

    key: bytes = field(default=b"", repr=False)
    tls: PeerTls | None = None

    @classmethod
    def of(cls, key: bytes, directory: Path | None) -> PeerIdentity:
        """Make one from the peer key and an operator's --tls directory. UserError."""
        return cls(key=key, tls=peer_tls_of(directory))

    def address(self, host: str, place: str) -> str:
        """Return the address to announce for a listener of this process at `place`, HOST:PORT.

        Where our certificate is not for `host`, a name that it is for follows after a slash:
        whoever connects checks the certificate against that. UserError.
        """
        name = self.tls.name_for(host) if self.tls is not None else host
        return place if place.rpartition(":")[0] == name else f"{place}/{name}"


def split_address(address: str) -> tuple[str, int, str]:
    """Split an announced address into host, port, and the name for the certificate. ValueError."""
    place, _, name = address.partition("/")
    host, _, port = place.rpartition(":")
    return host, int(port), name or host
