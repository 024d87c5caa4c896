"""Asks a cluster manager by HTTP, in JSON: plain, by TLS, or with the user's Kerberos ticket.

It knows no manager. Each question is one request in a thread of its own; none is repeated. A
server that names another one in its place, as a standby does, is believed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.client
import importlib
import importlib.util
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from holdfast.engine.core.errors import Refused, Unreachable, UserError, first_line
from holdfast.engine.state.store.regular_files import parse_json, read_up_to

ANSWER_S = 20.0
BYTES_MAX = 64 << 20
UNKNOWN, BROKEN, WHO_ASKS, FORBIDDEN, ELSEWHERE = 404, 500, 401, 403, (307, 308)
MINOR = re.compile(r"^Major \(.*Minor \(\d+\): ")  # before the mechanism's own words
FILTER = "org.apache.hadoop.security.authentication"  # also with status 500
JAVA_CLASS = re.compile(r"^([a-z]\w*\.)+[A-Z][\w$]*: ")  # an exception's message comes after it
NO_SUCH_SERVER = "not found in Kerberos database"
MENDED_BY_KINIT = ("expired", "credentials")  # words of MIT's Kerberos about tickets
NOT_JSON = object()  # in place of the document of an answer
Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestAccess:
    """Describes how a manager is reached, and by which user. `kerberos`: a ticket proves the user.

    `address`: of a server, or of several, with commas. `user`: named in each request without a
    proof; with a password it is proved by that. `ca`: a file with certificates.
    """

    address: str
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    kerberos: bool = False


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """Describes an answer: its status, and its document; NOT_JSON if that cannot be parsed."""

    status: int
    document: Any

    text: str = ""  # its first line, where it is plain text

    @property
    def accepted(self) -> bool:
        return self.status < 300 and self.document is not NOT_JSON

    @property
    def refusal(self) -> str:
        """Return the reason of the filter that Hadoop's servers ask for users first, or ""."""
        found = self.document
        said = str(found.get("message") or "") if isinstance(found, dict) else ""
        is_by_filter = self.status in (WHO_ASKS, FORBIDDEN) or FILTER in said
        return said if is_by_filter else ""

    @property
    def problem(self) -> str:
        """Return the manager's reason for not accepting a request."""
        found = self.document
        if isinstance(found, dict):  # YARN's services API, and its other ones
            remote = found.get("RemoteException") or {}
            found = found.get("diagnostics") or remote.get("message") or self.refusal
        text = str(found).strip() if isinstance(found, str) else ""
        text = text or self.text
        return (
            JAVA_CLASS.sub("", text.splitlines()[0][:500]) if text else f"HTTP status {self.status}"
        )


class SameRequest(urllib.request.HTTPRedirectHandler):
    """Sends the same request to the server that a standby names (RFC 9110, 15.4.8 and 15.4.9)."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if code not in ELSEWHERE:
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        if urlsplit(newurl).scheme != req.type:
            return None  # a request meant for TLS must not be sent in the clear
        return urllib.request.Request(
            newurl, req.data, dict(req.headers), method=req.get_method(), unverifiable=True
        )

    def http_error_308(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        return self.http_error_302(req, fp, code, msg, headers)  # Python 3.10 does not know it


class RestLink:
    """Asks one manager, called `name` in messages. Unreachable: it does not answer.

    `proof`: what a user should do whom the manager does not know. Of several servers the next one
    is asked once one does not answer.
    """

    def __init__(
        self, access: RestAccess, name: str, proof: str = "use --kerberos, and run kinit"
    ) -> None:
        self._access = access
        self._name = name
        self._proof = proof
        self._servers = access.address.split(",")

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=make_context(self._access.ca)),
            urllib.request.HTTPCookieProcessor(),  # a ticket is exchanged for a cookie
            SameRequest(),
        )

    async def ask(self, method: str, path: str, body: Any = None) -> RestAnswer:
        """Ask once; any answer is returned, whatever its status."""
        return await asyncio.to_thread(self.ask_now, method, path, body)

    async def ask_or_raise(self, method: str, path: str, body: Any = None) -> Any:
        """Ask once, and return the document. Refused, or Unreachable if it may yet succeed."""
        answer = await self.ask(method, path, body)
        if not answer.accepted:
            raise self.failure(answer)
        return answer.document

    def failure(self, answer: RestAnswer) -> Refused | Unreachable:
        """Return the error that an answer stands for."""
        if answer.status == WHO_ASKS and self._access.kerberos:
            return Refused(f"{self._name} does not accept a Kerberos ticket as a proof of identity")
        if answer.status == WHO_ASKS:
            return Refused(f"{self._name} demands a proof of identity: {self._proof}")
        kind = Unreachable if answer.status >= BROKEN else Refused
        return kind(f"{self._name} says: {answer.problem}")

    def ask_now(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> RestAnswer:
        """Ask once, in this thread; any answer is returned, whatever its status."""
        given = headers or {}
        try:
            with self.open(method, path, body, given, ANSWER_S) as found:
                answer, url, offers = read_answer(found)
            if answer.status == WHO_ASKS and "negotiate" in offers and self._access.kerberos:
                token = f"Negotiate {make_token(urlsplit(url).hostname or '')}"
                proven = {**given, "Authorization": token}
                with self.open(method, path, body, proven, ANSWER_S) as found:
                    answer, _, _ = read_answer(found)
            return answer
        except (OSError, http.client.HTTPException) as error:
            raise self.silence(error) from None

    def of_any(self, ask: Callable[[], Answered]) -> Answered:
        """Ask all servers in turn, until one answers. Unreachable: none does.

        `ask`: a question to this link that may be asked twice.
        """
        for _ in self._servers[1:]:
            with contextlib.suppress(Unreachable):
                return ask()
        return ask()

    def open(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], within_s: float
    ) -> Any:
        """Send one request; return the open response, whatever its status.

        `within_s` is also the time after which a read from it fails. Unreachable.
        """
        access = self._access
        said = f"?user.name={quote(access.user)}" if access.user and not access.password else ""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", "Accept": "application/json"}
        if access.password:
            pair = base64.b64encode(f"{access.user}:{access.password}".encode()).decode()
            sent["Authorization"] = f"Basic {pair}"
        request = urllib.request.Request(
            self._servers[0].rstrip("/") + path + said, data, {**sent, **headers}, method=method
        )
        try:
            return self._opener.open(request, timeout=within_s)
        except urllib.error.HTTPError as error:
            return error
        except (OSError, http.client.HTTPException) as error:
            raise self.silence(error) from None

    def silence(self, error: Exception) -> Unreachable:
        """Return the error of a server that does not answer; the next question is for another."""
        asked = self._servers[0]
        self._servers = [*self._servers[1:], asked]
        reason = getattr(error, "reason", None) or error
        why = first_line(reason) if isinstance(reason, BaseException) else str(reason)
        return Unreachable(f"{self._name} does not answer at {asked} ({why})")


def read_answer(found: Any) -> tuple[RestAnswer, str, str]:
    """Read a response; return it with the address it came from and the proofs it asks for."""
    data: bytes = read_up_to(found, BYTES_MAX)
    plain = (found.headers.get("Content-Type") or "").startswith("text/plain")
    text = data.decode(errors="replace").strip() if plain else ""
    offers = (found.headers.get("WWW-Authenticate") or "").lower()
    return RestAnswer(found.status, _parse(data), text), found.url, offers


def _parse(text: bytes) -> Any:
    try:
        return parse_json(text) if text.strip() else None
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
        raise Refused(describe_ticket(host, first_line(error))) from None
    return base64.b64encode(token).decode()


def describe_ticket(host: str, problem: str) -> str:
    """Return a sentence on why there is no ticket for a host's web server, and what to do."""
    why = MINOR.sub("", problem)
    if NO_SUCH_SERVER in why:
        return (
            f"Kerberos has no principal HTTP/{host} ({why}): write the address with the host name "
            "that the principal of its web server has"
        )
    advice = ": run kinit" if any(word in why for word in MENDED_BY_KINIT) else ""
    return f"there is no Kerberos ticket for HTTP@{host} ({why}){advice}"


def check_access(access: RestAccess, option: str, example: str) -> None:
    """Raise UserError for a bad address, bad certificates, or a package that is missing."""
    for given in access.address.split(","):
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
