"""Sets up TLS with the operator's certificates: both sides show one signed by the operator's CA.

TLS hides the data; the job's secret still proves inside that a peer belongs to the job.
Only TLS 1.3 is used, because all processes of a job run the same release.

A process's credentials for other processes of its job are the peer key, which proves that it is of
the job, and certificates: with these (`--tls`) the connection is encrypted before the proofs.
"""

from __future__ import annotations

import errno
import os
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Names the PEM files: this process's certificate (with its chain), its key, and the CA."""

    cert: Path
    key: Path
    ca: Path


def server_of(directory: Path | None) -> ssl.SSLContext | None:
    """Make a server's context from an operator's --tls directory; None without one. UserError."""
    return server_context(_files_in(directory)) if directory is not None else None


def client_of(directory: Path | None) -> ssl.SSLContext | None:
    return client_context(_files_in(directory)) if directory is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """Keeps both contexts of a process that connects to its peers and listens for them."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    names: tuple[str, ...]  # in our certificate

    def name_for(self, host: str) -> str:
        """Return a name that our certificate is for, `host` if possible. UserError: it has none."""
        for name in (host, *self.names):
            with suppress(ssl.SSLCertVerificationError):
                _show_to_ourselves(self.client, self.server, name)
                return name
        raise UserError(
            "the certificate of this machine names no host: make one whose subject alternative "
            f"names hold {host}"
        )


def peer_tls_of(directory: Path | None) -> PeerTls | None:
    """Make the contexts for peers from an operator's directory; None without one. UserError."""
    if directory is None:
        return None
    files = _files_in(directory)
    server, client = server_context(files), client_context(files)
    try:
        ours = _show_to_ourselves(client_context(files, check_names=False), server, None)
    except ssl.SSLError as error:
        raise UserError(
            f"the certificate {files.cert} cannot be shown to other workers "
            f"({describe_error(error)}): it must be signed by {files.ca}, and be for servers and "
            "clients, as each worker is both"
        ) from None
    found: Any = ours.get("subjectAltName", ())
    # A wildcard stands for a host with any name.
    names = [n.replace("*", "any") for kind, n in found if kind in ("DNS", "IP Address")]
    return PeerTls(client=client, server=server, names=tuple(names))


def _show_to_ourselves(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str | None
) -> dict[str, Any]:
    """Shake hands with ourselves in memory; returns the certificate that was shown. SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (near, far, near, far):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return near.getpeercert() or {}


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the context for `Gate` and `accept`. UserError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # no sessions are resumed: each connection proves its certificate
    return _fill(context, files)


def client_context(files: TlsFiles, check_names: bool = True) -> ssl.SSLContext:
    """Make the context for `connect`. UserError.

    `check_names`: the server's certificate must be for the host asked. Without the check any
    certificate of the CA may be the server's; the secret still decides.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # requires a certificate
    context.check_hostname = check_names
    return _fill(context, files)


def _files_in(directory: Path) -> TlsFiles:
    """Find the files by the names that Kubernetes and its certificate managers give them."""
    return TlsFiles(cert=directory / "tls.crt", key=directory / "tls.key", ca=directory / "ca.crt")


def describe_error(error: ssl.SSLError) -> str:
    """Describe an error of TLS, in a few words about the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLEOFError):
        return "it has ended the connection"
    if "alert" in reason:
        return f"it refuses our side of TLS: {reason}"
    if reason in ("wrong version number", "http request", "https proxy request"):
        return "it does not speak TLS"
    if reason == "peer did not return a certificate":
        return "it shows no certificate"
    return f"TLS failed: {reason}"


def _check_file(path: Path) -> None:
    """Raise OSError if this is no regular file that can be read: reading a pipe may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _fill(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in (files.cert, files.key, files.ca):
        try:
            _check_file(path)  # the ssl module's own errors do not name the file
        except OSError as error:
            raise UserError(f"the TLS file {path} cannot be read: {error.strerror}") from None
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"the TLS key {files.key} does not belong to the certificate {files.cert}: "
                "name the two that were made together"
            ) from None
        raise UserError(
            f"{files.cert} and {files.key} are not a PEM certificate and its PEM key without a "
            f"password ({_shorten(error)}): check both files"
        ) from None
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"the TLS file {files.ca} holds no CA certificate in PEM ({_shorten(error)}): check it"
        ) from None
    return context


def _shorten(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).lower().replace("_", " ")


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
