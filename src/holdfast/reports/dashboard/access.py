"""Decides which requests reach the dashboard, and adds headers that bind the browser.

A reader with the token of the printed URL sees the page and gives orders; a cookie keeps the token.
A page of another site can neither read anything (SameSite) nor give an order (Origin). Which names
of the server a request may use is decided before (engine/net/web_server.py).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
READING = ("GET", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Describes the port at which the dashboard listens, and its token."""

    port: int
    token: str = field(repr=False)

    @property
    def cookie(self) -> str:
        """Return the name of the cookie: browsers keep one jar for all ports of a host."""
        return f"holdfast-{self.port}"

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())


class AccessGuard:
    """Lets requests with the token through to an application, and answers all others itself."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = self._token_in_url(scope)
        problem = self._find_problem(scope, token)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if token and not problem:
                    value = f"{self._access.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", value)
            await send(message)

        refusal = PlainTextResponse(problem + "\n", status_code=403)
        await (refusal if problem else self._app)(scope, receive, send_guarded)

    def _find_problem(self, scope: Scope, token: str) -> str:
        """Return why a request is refused, as a sentence; empty: it is not."""
        headers, access = Headers(scope=scope), self._access
        if not access.is_token(token or self._token_in_cookie(headers)):
            return "The token is missing or wrong: use the URL that the dashboard has printed."
        own = f"http://{headers.get('host', '')}"
        if scope["method"] not in READING and headers.get("origin") != own:
            return "Orders are taken only from the dashboard's own page."
        return ""

    def _token_in_url(self, scope: Scope) -> str:
        if scope["path"] != "/":
            return ""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return str(query.get("token", [""])[0])

    def _token_in_cookie(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._access.cookie)
        except CookieError:
            return ""
        return str(found.value) if found is not None else ""
