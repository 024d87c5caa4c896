"""Asks whether this machine is about to be taken away: from its cloud, or from a site's own server.

Formats: AWS "Spot Instance interruption notices", Google Cloud "Preemptible VM instances", Azure
"Scheduled Events for Linux VMs". A site's own server answers GET with 204 or 404 while there is no
notice, else with 200 and JSON: {"in_s": seconds from now, "reason": text}.
"""

from __future__ import annotations

import asyncio
import email.utils
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from typing import Any

from holdfast.engine.core.errors import UserError, WorldError, first_line
from holdfast.engine.net.standard_streams import RareLines
from holdfast.engine.state.store.regular_files import parse_json

EVERY_S = 2.0  # between two questions
LIMIT_S = 5.0  # for one answer
BYTES_MAX = 1 << 16
LINK_LOCAL = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"
GOOGLE_S = 30.0  # from the notice to the end
NO_NOTICE = (204, 404)
AZURE_KINDS = ("Preempt", "Terminate", "Reboot", "Redeploy")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNotice:
    """Announces that this machine is taken away in `in_s` seconds, and why."""

    in_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Asks for a notice. `kind`: aws, gcp, azure, or the URL of a site's own server."""

    kind: str
    base: str = ""  # URL of the metadata server, if not the cloud's own

    def poll(self) -> MachineNotice | None:
        """Ask once whether there is a notice. OSError or WorldError: there is no proper answer."""
        try:
            match self.kind:
                case "aws":
                    return self._aws(self.base or LINK_LOCAL)
                case "gcp":
                    return self._gcp(self.base or GOOGLE)
                case "azure":
                    return self._azure(self.base or LINK_LOCAL)
                case url:
                    return _read_own(_get(url, {}))
        except (ValueError, LookupError, TypeError, AttributeError, HTTPException) as error:
            raise WorldError(f"an answer cannot be read: {first_line(error)}") from None

    def _aws(self, base: str) -> MachineNotice | None:
        token = _get(
            f"{base}/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "300"},
            method="PUT",
        )
        headers = {"X-aws-ec2-metadata-token": token or ""}
        found = _get(f"{base}/latest/meta-data/spot/instance-action", headers)
        if found is None:
            return None
        answer = parse_json(found)
        at = datetime.fromisoformat(answer["time"].replace("Z", "+00:00"))
        return MachineNotice(
            in_s=_seconds_until(at), reason=f"the spot instance is to {answer['action']}"
        )

    def _gcp(self, base: str) -> MachineNotice | None:
        url = f"{base}/computeMetadata/v1/instance/preempted"
        found = _get(url, {"Metadata-Flavor": "Google"})
        if found is None or found.strip().upper() != "TRUE":
            return None
        return MachineNotice(in_s=GOOGLE_S, reason="the instance is preempted")

    def _azure(self, base: str) -> MachineNotice | None:
        headers = {"Metadata": "true"}
        name = _get(
            f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers
        )
        found = _get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
        notices = [
            MachineNotice(
                in_s=_azure_s(event), reason=f"the machine is to {event['EventType']}".lower()
            )
            for event in parse_json(found or "{}").get("Events", [])
            if event["EventType"] in AZURE_KINDS and (name or "") in event["Resources"]
        ]
        return min(notices, key=lambda notice: notice.in_s, default=None)


async def list_notices(
    source: NoticeSource, say: Callable[[str], object], every_s: float = EVERY_S
) -> AsyncIterator[MachineNotice]:
    """Ask for ever, and yield each notice. `say`: is called with each new problem, once."""
    problems = RareLines(say)
    while True:
        try:
            found = await asyncio.to_thread(source.poll)
            problems.forget()
            if found is not None:
                yield found
        except (OSError, WorldError) as error:
            problems.put(f"no notices can be received ({first_line(error)})")
        await asyncio.sleep(every_s)


def notice_source(text: str) -> NoticeSource | None:
    """Read a source of notices as people name it; empty: none. UserError."""
    if not text:
        return None
    if text not in ("aws", "gcp", "azure") and not text.startswith(("http://", "https://")):
        raise UserError(f"--notices {text!r}: say aws, gcp, azure, or the URL of your own server")
    return NoticeSource(text)


def _read_own(found: str | None) -> MachineNotice | None:
    if not found:
        return None
    answer = parse_json(found)
    in_s = float(answer["in_s"])
    if not in_s >= 0:
        raise ValueError(f"in_s {in_s} is no time from now")
    return MachineNotice(in_s=in_s, reason=str(answer.get("reason") or "it will be taken away"))


def _azure_s(event: Mapping[str, Any]) -> float:
    """Return when an event begins, from now; one without a time has begun."""
    if not event.get("NotBefore"):
        return 0.0
    return _seconds_until(email.utils.parsedate_to_datetime(event["NotBefore"]))


def _seconds_until(at: datetime) -> float:
    aware = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    return max((aware - datetime.now(timezone.utc)).total_seconds(), 0.0)


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the answer's text; None if the server has no such page."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=LIMIT_S) as answer:
            body: bytes = answer.read(BYTES_MAX)
            return None if answer.status in NO_NOTICE else body.decode()
    except urllib.error.HTTPError as error:
        if error.code in NO_NOTICE:
            return None
        raise WorldError(f"{url} answers {error.code}") from None
