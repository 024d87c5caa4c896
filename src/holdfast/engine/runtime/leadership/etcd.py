"""Talks to etcd v3 with asyncio, over the JSON gateway that every etcd serves.

It does only what an election and a journal need: leases, reads and transactions. Each request opens
its own connection: requests share no state, and a dead server costs one attempt.
HTTP/1.0 keeps answers free of chunks and ends them with the connection.

Requests are tried at one server after the other until their time is up, so a transaction may be
carried out although its answer was lost, even after a later one: callers compare the values that
they replace.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.state.store.regular_files import parse_json

ANSWER_BYTES_MAX = 16 << 20
ROUND_S_MIN = 0.05  # between two rounds over all servers
# gRPC status codes for which another server, or this one a little later, may answer otherwise.
PASSING = (1, 2, 4, 13, 14)  # cancelled, unknown, deadline exceeded, internal, unavailable

Compare = dict[str, Any]
Operation = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """Describes a key's value. Revisions count the whole etcd's changes: they only ever grow."""

    value: bytes
    created: int  # revision that created the key
    modified: int  # revision of its last change
    lease: int  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Describes the result of a transaction."""

    succeeded: bool
    #: The revision of etcd after it, and of every key that it has put.
    revision: int
    entries: tuple[KeyValue | None, ...]  # one for each `read`, in order


class EtcdClient:
    """Sends requests to etcd's servers.

    Each raises Unreachable if no server carried it out within `within_s`, Refused if a server
    declined.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        attempt_s: float = 0.5,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._attempt_s = attempt_s  # time for one server, before the next is tried
        self._tls = tls
        self._current = 0  # the server that answered last

    async def read(self, key: str, within_s: float) -> KeyValue | None:
        """Return the newest value of `key`, as a majority knows it."""
        return _entry(await self.request("/v3/kv/range", {"key": _text(key)}, within_s))

    async def transact(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        within_s: float,
    ) -> Outcome:
        """Do all of `then` if all comparisons hold, else all of `otherwise`."""
        body = {"compare": list(compare), "success": list(then), "failure": list(otherwise)}
        answer = await self.request("/v3/kv/txn", body, within_s)
        responses = [r["response_range"] for r in answer.get("responses", ()) if _is_read(r)]
        return Outcome(
            succeeded=bool(answer.get("succeeded", False)),
            revision=int(answer["header"]["revision"]),
            entries=tuple(_entry(r) for r in responses),
        )

    async def grant(self, ttl_s: int, within_s: float) -> tuple[int, float]:
        """Return a new lease and its seconds to live, which etcd may have raised."""
        answer = await self.request("/v3/lease/grant", {"TTL": str(ttl_s)}, within_s)
        return int(answer["ID"]), float(answer["TTL"])

    async def keep_alive(self, lease: int, within_s: float) -> float:
        """Renew a lease; return its seconds to live from now, 0 if it has ended."""
        answer = await self.request("/v3/lease/keepalive", {"ID": str(lease)}, within_s)
        return float(answer.get("TTL", 0))

    async def revoke(self, lease: int, within_s: float) -> None:
        """End a lease and delete its keys. Refused if it has ended already."""
        await self.request("/v3/lease/revoke", {"ID": str(lease)}, within_s)

    async def request(self, path: str, body: Mapping[str, Any], within_s: float) -> Any:
        """Make one request of the gateway, as etcd documents it; return the answer's JSON."""
        data = json.dumps(body).encode()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        said: dict[Endpoint, str] = {}
        tries = 0
        while (left_s := deadline - loop.time()) > 0 or not tries:
            tries += 1
            at = self._current
            endpoint = self._endpoints[at]
            limit_s = max(min(self._attempt_s, left_s), 0.001)
            try:
                answer = await asyncio.wait_for(self._post(endpoint, path, data), limit_s)
                return _judge(path, *answer)
            except asyncio.TimeoutError:
                said.setdefault(endpoint, f"did not answer within {limit_s:.2g} s")
            except ConnectionRefusedError:
                said[endpoint] = "refused the connection"
            except ssl.SSLError as error:
                said[endpoint] = f"and we do not agree on TLS: {error}"
            except OSError as error:
                said[endpoint] = error.strerror or repr(error)
            except _Unusable as error:
                said[endpoint] = str(error)
            if self._current == at:  # else a concurrent request has found a better server
                self._current = (at + 1) % len(self._endpoints)
            if tries % len(self._endpoints) == 0:
                await asyncio.sleep(min(ROUND_S_MIN, max(deadline - loop.time(), 0.0)))
        tried = "; ".join(f"{endpoint} {what}" for endpoint, what in said.items())
        raise Unreachable(f"etcd did not carry out {path} within {within_s:.2g} s: {tried}")

    async def _post(self, endpoint: Endpoint, path: str, data: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer."""
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=self._tls)
        try:
            head = (
                f"POST {path} HTTP/1.0\r\nHost: {endpoint}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            answer = bytearray()
            while part := await reader.read(1 << 16):
                answer += part
                if len(answer) > ANSWER_BYTES_MAX:
                    raise _Unusable(f"sends more than {ANSWER_BYTES_MAX} bytes")
        finally:
            writer.close()
        return _split(bytes(answer))


# ---------------------------------------------------------------- what transactions are made of


def compare_creation(key: str, revision: int) -> Compare:
    """Make the comparison that the key exists since `revision`; 0: it does not exist."""
    return _compare(key, "CREATE", "create_revision", revision)


def compare_change(key: str, revision: int) -> Compare:
    """Make the comparison that the key was last put at `revision`; 0: it does not exist."""
    return _compare(key, "MOD", "mod_revision", revision)


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Put a value; with a lease, the key is deleted when that ends."""
    return {"request_put": {"key": _text(key), "value": _base64(value), "lease": str(lease)}}


def read(key: str) -> Operation:
    return {"request_range": {"key": _text(key)}}


def _compare(key: str, target: str, field: str, revision: int) -> Compare:
    return {"key": _text(key), "target": target, "result": "EQUAL", field: str(revision)}


def _text(key: str) -> str:
    return _base64(key.encode())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# ---------------------------------------------------------------- answers


class _Unusable(Exception):
    """Reports that this server's answer does not help; another's may. It continues its name."""


def _split(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if not words[0].startswith("HTTP/") or len(words) < 2 or not words[1].isdecimal():
        raise _Unusable(f"is no HTTP server: it answers {answer[:20]!r}" if answer else "hung up")
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length" and value.strip() != str(len(body)):
            raise _Unusable(f"sent {len(body)} of {value.strip()} bytes")
    return int(words[1]), body


def _judge(path: str, status: int, body: bytes) -> Any:
    """Return the answer's JSON, out of its stream; _Unusable and Refused as for the client."""
    try:
        answer = parse_json(body)
    except ValueError:
        answer = None
    error = None
    if isinstance(answer, dict):
        error = answer if status != 200 else answer.get("error")
    if isinstance(error, dict) and "code" in error:
        if error["code"] in PASSING:
            raise _Unusable(f"says {error.get('message')!r}")
        raise Refused(f"etcd refuses {path}: {error.get('message')}")
    found = answer.get("result", answer) if isinstance(answer, dict) else None
    if not isinstance(found, dict) or "header" not in found:
        what = body[:40].decode(errors="replace").strip()
        raise _Unusable(f"does not answer as etcd v3 does: HTTP {status}, {what!r}")
    return found


def _is_read(response: Mapping[str, Any]) -> bool:
    return "response_range" in response


def _entry(answer: Mapping[str, Any]) -> KeyValue | None:
    for found in answer.get("kvs", ()):
        return KeyValue(
            value=base64.b64decode(found.get("value", "")),
            created=int(found["create_revision"]),
            modified=int(found["mod_revision"]),
            lease=int(found.get("lease", 0)),
        )
    return None
