"""Elects one coordinator at a time for a job; its leadership is a lease in etcd, for one term.

A job keeps these keys under /holdfast/JOB/: `spec` (the job's document, proved with its secret,
which itself is never stored), `term` (the last one), `leader` (the leader and its address; ends
with its lease) and `record` (the journal).

The invariant: a coordinator that acts is the leader. Two clocks keep it. etcd lets a lease end its
seconds to live after it *received* the last renewal; we count from when we *sent* it, and a little
less. So a coordinator knows that its leadership is over before anyone else can take it. Before it
sends anything, it looks at its clock; it acknowledges only messages from before that look, so no
agent's lease is prolonged beyond the leadership either. The record needs no clock: it is only
written in a transaction which finds that this very leadership still exists.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec

from holdfast.engine.core.errors import (
    Damaged,
    Deposed,
    OtherRelease,
    Refused,
    Unreachable,
    UserError,
    WorldError,
)
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.net.standard_streams import RareLines
from holdfast.engine.runtime.leadership.etcd import (
    Endpoint,
    EtcdClient,
    KeyValue,
    compare_change,
    compare_creation,
    put,
    read,
)
from holdfast.engine.runtime.leadership.journal import NO_DAMAGE, Loaded, seal, unseal
from holdfast.engine.state.store.regular_files import parse_json
from holdfast.engine.wire.job_document import decode_job, encode_job

PORT = 2379
TTL_S = 2  # the least that etcd grants with its default settings
RENEWALS = 4  # renewals in each time to live
SURE = 0.95  # share of the time to live that is relied on, as clocks differ in speed
POLLS = 8  # checks by a standby in each time to live
POLL_S_MAX = 0.5  # a standby notices a resignation within this, before the lease ends
PAUSE_S = 0.05
ATTEMPT_S = 0.5  # for one server, when only reading
ATTEMPT_S_MAX = 2.0
SCHEMES = ("etcd://", "etcds://")
FORM = "etcd://HOST[:PORT][,HOST[:PORT]...]/JOB[?ttl=SECONDS]"
TLS_FORM = "etcds://...?ca=FILE[&cert=FILE&key=FILE]"
JOB_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

Clock = Callable[[], float]
Say = Callable[[str], None]
T = TypeVar("T")


def clock() -> float:
    """Return seconds that only grow, and that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ---------------------------------------------------------------- where


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionUrl:
    """Names where a job's coordinators are elected; the same for every candidate."""

    endpoints: tuple[Endpoint, ...]
    job: str
    ttl_s: int = TTL_S
    tls: bool = False
    ca: str | None = None  # file with the authority of etcd's certificates; None: the system's
    cert: str | None = None  # file with our own certificate, if etcd wants one
    key_file: str | None = None

    def client(self, attempt_s: float) -> EtcdClient:
        return EtcdClient(self.endpoints, attempt_s, self._context() if self.tls else None)

    def _context(self) -> ssl.SSLContext:
        """Make the TLS context; UserError if its files cannot be used."""
        try:
            found = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                found.load_cert_chain(self.cert, self.key_file)
        except OSError as error:
            files = ", ".join(f for f in (self.ca, self.cert, self.key_file) if f)
            raise UserError(f"--election: {files} cannot be used for TLS: {error}") from None
        return found

    def key(self, name: str) -> str:
        return f"/holdfast/{self.job}/{name}"


def parse_election(text: str) -> ElectionUrl:
    """Parse a URL of the form FORM. UserError if it has another form."""

    def make_error(what: str) -> UserError:
        return UserError(f"--election {text}: {what}; the form is {FORM}, or {TLS_FORM}")

    try:
        parts = urlsplit(text)
        endpoints = tuple(_endpoint(part) for part in parts.netloc.split(","))
    except ValueError as error:
        raise make_error(str(error)) from None
    if parts.scheme not in ("etcd", "etcds"):
        raise make_error(f"{parts.scheme or 'no scheme'} is not supported, only etcd and etcds")
    job = parts.path.removeprefix("/")
    if not job or len(job) > 100 or not set(job) <= JOB_CHARACTERS:
        raise make_error(f"{job!r} is no job name: 1 to 100 of letters, digits, '.', '_' and '-'")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ttl = options.pop("ttl", str(TTL_S))
    if not ttl.isdecimal() or not 1 <= int(ttl) <= 3600:
        raise make_error(f"ttl={ttl} must be a whole number of seconds from 1 to 3600")
    tls = parts.scheme == "etcds"
    ca, cert, key = (options.pop(name, None) if tls else None for name in ("ca", "cert", "key"))
    if options or parts.fragment:
        raise make_error(f"{next(iter(options), parts.fragment)!r} is not known")
    if key is not None and cert is None:
        raise make_error("key is given without cert")
    return ElectionUrl(
        endpoints=endpoints, job=job, ttl_s=int(ttl), tls=tls, ca=ca, cert=cert, key_file=key
    )


def _endpoint(text: str) -> Endpoint:
    """Parse HOST, HOST:PORT or [IPV6]:PORT. ValueError."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or "@" in text:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Endpoint(parts.hostname, PORT if parts.port is None else parts.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Names the coordinator that leads, and where it listens."""

    term: int
    host: str
    port: int


async def locate(election: str, within_s: float = 5.0) -> Leader | None:
    """Find the leader; None while there is none. UserError, Unreachable, Refused."""
    url = parse_election(election)
    return _leader_of(await url.client(ATTEMPT_S).read(url.key("leader"), within_s))


async def read_outcome(election: str, within_s: float = 5.0) -> str | None:
    """Read how a job has ended, which its last coordinator has left in etcd; None: it has not.

    UserError, Unreachable, Refused.
    """
    url = parse_election(election)
    entry = await url.client(ATTEMPT_S).read(url.key("record"), within_s)
    try:
        return unseal(entry.value).outcome if entry is not None else None
    except Damaged:
        return None


def _leader_of(entry: KeyValue | None) -> Leader | None:
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=Leader)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Refused(f"etcd holds no coordinator's address but {entry.value[:60]!r}") from None


# ---------------------------------------------------------------- leadership


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Identifies one coordinator's leadership in etcd."""

    term: int
    #: The revision at which it began, which identifies it.
    created: int
    lease: int
    ttl_s: float


class Leadership:
    """Is an elected coordinator's right to act, with the time that is left of it."""

    def __init__(
        self, etcd: EtcdClient, url: ElectionUrl, hold: Hold, sure_until: float, now: Clock
    ) -> None:
        self.etcd = etcd
        self.url = url
        self.held = hold
        self._sure_until = sure_until  # as `now` counts
        self._now = now
        self._prolonged: Callable[[float], None] | None = None

    def on_prolonged(self, call: Callable[[float], None]) -> None:
        """Call `call(left_s)` now and after each renewal."""
        self._prolonged = call
        call(self.remaining_s())

    def remaining_s(self) -> float:
        """Return the time in which no other candidate can lead for certain."""
        return self._sure_until - self._now()

    def check(self) -> None:
        """Raise Deposed if another candidate may lead; call it before each message."""
        if self.remaining_s() <= 0:
            raise self.make_deposed(f"its lease was not renewed for {self.held.ttl_s * SURE:.2g} s")

    def make_deposed(self, why: str) -> Deposed:
        return Deposed(f"term {self.held.term} of this coordinator is over: {why}")

    async def hold(self) -> None:
        """Renew for ever. Deposed once that has failed for too long, or the term was ended."""
        while True:
            await asyncio.sleep(min(self.held.ttl_s / RENEWALS, max(self.remaining_s(), 0.0)))
            while refused := await self._renew():
                if self.remaining_s() <= 0:
                    raise self.make_deposed(refused)
                await asyncio.sleep(min(PAUSE_S, max(self.remaining_s(), 0.0)))

    async def resign(self) -> None:
        """Give the leadership up at once. No message may be sent any more."""
        within_s, self._sure_until = self.remaining_s(), -math.inf
        await self.etcd.revoke(self.held.lease, within_s)

    async def _renew(self) -> str:
        """Renew the lease; return why it failed, or an empty string. Deposed if it is gone."""
        sent, within_s = self._now(), self.held.ttl_s / RENEWALS
        try:
            ttl_s = await self.etcd.keep_alive(self.held.lease, within_s)
            if ttl_s <= 0:
                raise self.make_deposed("its lease has ended")
            found = await self.etcd.read(self.url.key("leader"), within_s)
        except (Unreachable, Refused) as error:
            return str(error)
        if found is None or found.created != self.held.created:
            raise self.make_deposed("somebody has removed it from etcd")
        self._sure_until = max(self._sure_until, sent + ttl_s * SURE)
        if self._prolonged is not None:
            self._prolonged(self.remaining_s())
        return ""


class Election:
    """Represents one candidate of one job; `open_election` makes one."""

    def __init__(self, url: ElectionUrl, etcd: EtcdClient, now: Clock) -> None:
        self._url = url
        self._etcd = etcd
        self._now = now

    @property
    def job(self) -> str:
        return self._url.job

    async def ask_patiently(
        self, what: Callable[[], Awaitable[T]], say: Say, limit_s: float = math.inf
    ) -> T:
        """Return the result of `what` once etcd answers; `say` is called once with the trouble.

        UserError if it does not answer for `limit_s`.
        """
        troubles, until = RareLines(say), self._now() + limit_s
        while True:
            try:
                return await what()
            except WorldError as error:
                if self._now() >= until:
                    raise UserError(
                        f"gave up after {limit_s:g} s: {error}; check --election and start again"
                    ) from None
                limit = f"; trying for {limit_s:g} s" if limit_s < math.inf else ""
                troubles.put(f"standing by: {error}{limit}")
            await asyncio.sleep(min(self._url.ttl_s / POLLS, POLL_S_MAX))

    async def campaign(self, host: str, port: int, say: Say) -> Leadership:
        """Wait for the leadership for as long as it takes, and take it.

        `say` is called with the reason for waiting. `host` and `port` are this candidate's address
        as leader.
        """
        leaders = RareLines(say)
        while True:
            leader = await self.ask_patiently(self.leader, say)
            if leader is None:
                leadership = await self.ask_patiently(lambda: self._try(host, port), say)
                if leadership is not None:
                    return leadership
            else:
                where = f"{leader.host}:{leader.port}"
                leaders.put(f"standing by: {where} is the leader, term {leader.term}")
            await asyncio.sleep(min(self._url.ttl_s / POLLS, POLL_S_MAX))

    async def leader(self) -> Leader | None:
        """Find the leader; None while there is none."""
        return _leader_of(await self._etcd.read(self._url.key("leader"), self._url.ttl_s))

    async def _try(self, host: str, port: int) -> Leadership | None:
        """Take the leadership, unless another candidate was faster."""
        url, within_s = self._url, float(self._url.ttl_s)
        last = await self._etcd.read(url.key("term"), within_s)
        term = (_count(last, url) if last else 0) + 1
        sent = self._now()
        lease, ttl_s = await self._etcd.grant(url.ttl_s, within_s)
        value = json.dumps({"term": term, "host": host, "port": port}).encode()
        done = await self._etcd.transact(
            [
                compare_creation(url.key("leader"), 0),
                compare_change(url.key("term"), last.modified if last else 0),
            ],
            [put(url.key("leader"), value, lease), put(url.key("term"), str(term).encode())],
            [read(url.key("leader"))],
            within_s,
        )
        created = done.revision
        if not done.succeeded:
            found = done.entries[0]
            if (
                found is None or found.lease != lease
            ):  # else an earlier try did it, and its answer was lost
                return None
            created = found.created
        held = Hold(term=term, created=created, lease=lease, ttl_s=ttl_s)
        leadership = Leadership(self._etcd, url, held, sent + ttl_s * SURE, self._now)
        return leadership if leadership.remaining_s() > 0 else None

    # ------------------------------------------------------------ what the job is

    async def publish(self, spec: JobSpec, secret: bytes) -> None:
        """Make the job known to standbys. UserError if another run has this name."""
        url = self._url
        text = encode_job(spec).decode()
        value = json.dumps({"spec": text, "proof": _proof(secret, text)}).encode()
        key = url.key("spec")
        done = await self._etcd.transact(
            [compare_creation(key, 0)], [put(key, value)], [read(key)], float(url.ttl_s)
        )
        if not done.succeeded and (done.entries[0] is None or done.entries[0].value != value):
            raise UserError(
                f"etcd already holds another run named {url.job}: choose another name in "
                f"--election, or delete it there (etcdctl del --prefix {url.key('')})"
            )

    async def read_job(self, secret: bytes) -> JobSpec | None:
        """Read what the job is; None while it is unpublished. UserError for another secret."""
        entry = await self._etcd.read(self._url.key("spec"), float(self._url.ttl_s))
        if entry is None:
            return None
        try:
            found = parse_json(entry.value)
            text, proof = str(found["spec"]), str(found["proof"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self._url.key('spec')} in etcd is no job: choose another name in --election"
            ) from None
        if not hmac.compare_digest(proof.encode(), _proof(secret, text).encode()):
            raise UserError(
                f"this is not the secret of the job {self._url.job}: give the one in its first "
                "run directory with --secret-file"
            )
        try:
            return decode_job(text.encode())
        except OtherRelease as error:
            raise UserError(f"the job {self._url.job} cannot be used: {error}") from None
        except Damaged as error:
            raise UserError(
                f"the job {self._url.job} was started by another release ({error}): use the same"
            ) from None


def open_election(text: str, now: Clock = clock) -> Election:
    """Make a candidate for the job that the URL names. UserError."""
    url = parse_election(text)
    return Election(url, url.client(min(url.ttl_s / RENEWALS, ATTEMPT_S_MAX)), now)


def _count(entry: KeyValue, url: ElectionUrl) -> int:
    if not entry.value.isdigit():
        raise Refused(f"{url.key('term')} in etcd should be a number, not {entry.value[:60]!r}")
    return int(entry.value)


def _proof(secret: bytes, text: str) -> str:
    """Compute what only a holder of the secret can; guessing a random secret is hopeless."""
    return hmac.new(secret, b"holdfast spec|" + text.encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- the journal


class EtcdJournal:
    """Keeps the record in etcd, where only the leader writes, one term at a time."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._key = leadership.url.key("record")
        self._modified = (
            0  # revision of the replaced record, so that no late copy of an older save is
        )

    async def load(self) -> Loaded:
        leadership = self._leadership
        entry = await self._insist(lambda s: leadership.etcd.read(self._key, s))
        record, damage = None, NO_DAMAGE
        if entry is not None:
            self._modified = entry.modified
            try:
                record = unseal(entry.value)
            except OtherRelease as error:
                raise UserError(
                    f"the journal {self._key} in etcd cannot be used: {error}"
                ) from None
            except Damaged as error:
                kept = leadership.url.key(f"damaged-{leadership.held.term}")
                await self._insist(lambda s: self._keep(kept, entry.value, s))
                damage = (
                    f"the journal {self._key} in etcd is damaged: {error}; it is kept as {kept}"
                )
        if record is not None and record.term >= leadership.held.term:
            raise UserError(
                f"{self._key}, a record in etcd, is of term {record.term}, yet this term is "
                f"{leadership.held.term}: {leadership.url.key('term')} was lost, so put "
                f"{record.term} there"
            )
        return Loaded(term=leadership.held.term, record=record, damage=damage)

    async def save(self, record: JobRecord) -> None:
        data = seal(record)
        compare = [self._leads_comparison(), compare_change(self._key, self._modified)]
        otherwise = [read(self._leadership.url.key("leader")), read(self._key)]

        async def replace(within_s: float) -> None:
            then = [put(self._key, data)]
            done = await self._leadership.etcd.transact(compare, then, otherwise, within_s)
            if done.succeeded:
                self._modified = done.revision
                return
            leader, found = done.entries
            if leader is None or leader.created != self._leadership.held.created:
                raise self._leadership.make_deposed("another coordinator leads")
            if (
                found is None or found.value != data
            ):  # else an earlier try did it, and its answer was lost
                raise self._leadership.make_deposed(
                    f"something else has changed {self._key} in etcd"
                )
            self._modified = found.modified

        await self._insist(replace)

    def close(self) -> None:
        """Leave the leadership to `Leadership.resign`, which ends it."""

    def _leads_comparison(self) -> dict[str, Any]:
        return compare_creation(self._leadership.url.key("leader"), self._leadership.held.created)

    async def _keep(self, key: str, value: bytes, within_s: float) -> None:
        await self._leadership.etcd.transact(
            [self._leads_comparison()], [put(key, value)], [], within_s
        )

    async def _insist(self, what: Callable[[float], Awaitable[T]]) -> T:
        """Try for as long as the leadership lasts, which another task prolongs."""
        while True:
            self._leadership.check()
            try:
                return await what(self._leadership.remaining_s())
            except Unreachable as error:
                if self._leadership.remaining_s() <= 0:
                    raise self._leadership.make_deposed(str(error)) from None
