"""Asks a cluster manager by HTTP, in JSON: plain, by TLS, or with the user's Kerberos ticket.

It knows no manager. Each question is one request in a thread of its own; none is repeated.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import http.client
import importlib
import importlib.util
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from holdfast.core.errors import Refused, Unreachable, UserError, first_line

ANSWER_S = 20.0
BYTES_MAX = 64 << 20
UNKNOWN, BROKEN, WHO_ASKS = 404, 500, 401
NOT_JSON = object()  # in place of the document of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAccess:
    """Describes how a manager is reached, and by which user. `kerberos`: a ticket proves the user.

    `user`: said in each request, where nothing is proved. `ca`: a file with certificates.
    """

    address: str
    user: str = ""
    ca: str = ""
    kerberos: bool = False


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """Describes an answer: its status, and its document; NOT_JSON if that cannot be parsed."""

    status: int
    document: Any

    @property
    def accepted(self) -> bool:
        return self.status < 300 and self.document is not NOT_JSON

    @property
    def problem(self) -> str:
        """Return the manager's reason for not accepting a request."""
        found = self.document
        if isinstance(found, dict):  # YARN's services API, and its other ones
            found = found.get("diagnostics") or found.get("RemoteException", {}).get("message")
        text = str(found).strip() if isinstance(found, str) else ""
        return text.splitlines()[0][:500] if text else f"HTTP status {self.status}"


class RestLink:
    """Asks one manager, called `name` in messages. Unreachable: it does not answer."""

    def __init__(self, access: RestAccess, name: str) -> None:
        self._access = access
        self._name = name

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=make_context(self._access.ca)),
            urllib.request.HTTPCookieProcessor(),  # a ticket is exchanged for a cookie
        )

    async def ask(self, method: str, path: str, body: Any = None) -> RestAnswer:
        """Ask once; any answer is returned, whatever its status."""
        return await asyncio.to_thread(self._ask, method, path, body)

    async def must(self, method: str, path: str, body: Any = None) -> Any:
        """Ask once, and return the document. Refused, or Unreachable if it may yet succeed."""
        answer = await self.ask(method, path, body)
        if not answer.accepted:
            raise self.failure(answer)
        return answer.document

    def failure(self, answer: RestAnswer) -> Refused | Unreachable:
        """Return the error that an answer stands for."""
        if answer.status == WHO_ASKS:
            return Refused(f"{self._name} wants to know who asks: use --kerberos, and run kinit")
        kind = Unreachable if answer.status >= BROKEN else Refused
        return kind(f"{self._name} says: {answer.problem}")

    def _ask(self, method: str, path: str, body: Any) -> RestAnswer:
        answer, offered = self._send(method, path, body, {})
        if answer.status == WHO_ASKS and offered and self._access.kerberos:
            host = urlsplit(self._access.address).hostname or ""
            proof = {"Authorization": f"Negotiate {make_token(host)}"}
            answer, _ = self._send(method, path, body, proof)
        return answer

    def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[RestAnswer, bool]:
        """Send one request; return the answer, and whether it asks for a ticket."""
        access = self._access
        said = f"?user.name={quote(access.user)}" if access.user else ""
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(
            access.address.rstrip("/") + path + said, data, {**kind, **headers}, method=method
        )
        try:
            try:
                found = self._opener.open(request, timeout=ANSWER_S)
            except urllib.error.HTTPError as error:
                found = error
            with found:
                text: bytes = found.read(BYTES_MAX)
                offered = "negotiate" in (found.headers.get("WWW-Authenticate") or "").lower()
                return RestAnswer(found.status, _parse(text)), offered
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            why = first_line(reason) if isinstance(reason, BaseException) else str(reason)
            raise Unreachable(f"{self._name} does not answer at {access.address} ({why})") from None


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return NOT_JSON


def make_context(ca: str) -> ssl.SSLContext:
    """Return the TLS settings by which a manager's certificate is checked."""
    return ssl.create_default_context(cafile=ca or None)


def make_token(host: str) -> str:
    """Return a token that proves the user's Kerberos ticket to a web server (SPNEGO). Refused."""
    gssapi = importlib.import_module("gssapi")
    try:
        name = gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service)
        token: bytes = gssapi.SecurityContext(name=name, usage="initiate").step()
    except gssapi.exceptions.GSSError as error:
        raise Refused(
            f"there is no Kerberos ticket for HTTP@{host} ({first_line(error)})"
        ) from None
    return base64.b64encode(token).decode()


def check_access(access: RestAccess, option: str, example: str) -> None:
    """Raise UserError for a bad address, bad certificates, or a package that is missing."""
    given = access.address
    try:
        parts = urlsplit(given)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment:
        raise UserError(f"{option} {given[:100]!r} is no address: write it as {example}")
    try:
        make_context(access.ca)
    except OSError as error:  # ssl.SSLError is one
        if not Path(access.ca).is_file():
            raise UserError(f"--ca-file {access.ca} is no file: name one") from None
        raise UserError(f"--ca-file {access.ca} holds no certificates ({error})") from None
    if access.kerberos and importlib.util.find_spec("gssapi") is None:
        raise UserError("--kerberos needs one more package: pip install 'holdfast[yarn]'")
