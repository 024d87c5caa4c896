"""Finds the incidents of a run in its event log, and describes each in plain sentences.

It reads lines as dictionaries, also those of older releases, which have no ids. Must not know
files or processes.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.diagnoses import Diagnosis, Event, diagnose, find_headline
from holdfast.engine.state.store.regular_files import parse_json

E = TypeVar("E", bound=Event)
TIME_MAX = 253402300800.0  # the year 10000, in seconds since the epoch
COST_MAX = 1e15
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] | None
# The kinds of faults that a new view or group answers, and the kinds that need none.
STOPPING = (
    *("lost", "quarantined", "back", "drain", "leave", "late"),
    *("replaced", "restart", "stop_view"),
)
PASSING = ("wrong", "rot", "record", "straggler", "failed")
TELLING = (*STOPPING, *PASSING)  # each line of these kinds makes an incident
LASTING = frozenset((*TELLING, "view", "join"))  # what a run's workers did depends on these
NEAR_S = 5.0  # a worker may notice a fault this long before, or after, the coordinator does


class _KnownFields(msgspec.Struct):
    """Gives the types of the fields that are read here; an event may have more."""

    time: Annotated[float, msgspec.Meta(ge=0, lt=TIME_MAX)]
    kind: str
    text: str
    worker: _Number = None
    view: _Number = None
    step: _Number = None
    node: str | None = None
    id: str = ""
    causes: tuple[str, ...] = ()
    cost: dict[str, Annotated[float, msgspec.Meta(ge=0, le=COST_MAX)]] | None = None
    members: str = ""
    again: bool = False


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """Return the event of a line of the log; None if it is none, as a half-written one."""
    try:
        found: dict[str, Any] = parse_json(line)
    except ValueError:
        return None
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
        msgspec.convert(found, _KnownFields)
        return found
    return None


def add_utc(event: Event) -> dict[str, Any]:
    """Return the event with its time also in ISO 8601, as `utc`."""
    # Microseconds are rounded, so the last of the year 9999 might become one of the next year.
    at = datetime.fromtimestamp(min(float(event["time"]), TIME_MAX - 5e-4), timezone.utc)
    return {**event, "utc": at.isoformat(timespec="milliseconds").replace("+00:00", "Z")}


@dataclass(frozen=True, slots=True)
class Incident:
    """Keeps the events of one incident in order. `cost`: empty until it has ended."""

    events: tuple[Event, ...]
    cost: Mapping[str, float]

    @property
    def began_at(self) -> float:
        return float(self.events[0]["time"])

    @property
    def ended_at(self) -> float:
        return float(self.events[-1]["time"])

    @property
    def workers(self) -> set[int]:
        """Return the workers that its events are about."""
        return {event["worker"] for event in self.events if isinstance(event.get("worker"), int)}

    @property
    def resumes_at(self) -> float:
        """Return the earliest step at which a view of it resumed; infinity without any view."""
        steps = [event.get("step") for event in self.events if event["kind"] == "view"]
        return min((float(step) for step in steps if isinstance(step, int)), default=float("inf"))

    @property
    def name(self) -> str:
        return str(self.events[0]["id"])

    @property
    def diagnosis(self) -> Diagnosis:
        """Return the cause, the party at fault, and advice."""
        return diagnose(self.events)

    @property
    def title(self) -> str:
        """Return the line on the first cause, and the number of other workers that were lost."""
        event = self.diagnosis.event
        text = find_headline(str(event["text"]))
        lost = {e.get("worker") for e in self.events if e["kind"] == "lost"}
        more = len(lost - {None, event.get("worker")})
        if not more or event["kind"] != "lost":
            return text
        return f"{text} (and {more} more {'worker was' if more == 1 else 'workers were'} lost)"

    def to_dict(self) -> dict[str, Any]:
        found = self.diagnosis
        return {
            "id": self.name,
            "title": self.title,
            "cost": self.cost,
            "cause": found.event["id"],
            "node": found.event.get("node"),
            "fault": found.fault.value,
            "advice": found.advice,
            "events": [*map(add_utc, self.events)],
        }


def list_incidents(events: Sequence[Event]) -> list[Incident]:
    """Return the incidents, oldest first: events that are linked by their causes."""
    group = _group_by_causes(events)
    found = {id(each): each for each in group.values()}.values()
    real = [each for each in found if any(e["kind"] in TELLING for e in each)]
    return [Incident(tuple(each), _cost_of(each)) for each in real]


def find_unsaved(events: Sequence[Event]) -> str:
    """Return a line on checkpoints that could not be saved, unless one was saved afterwards."""
    for event in reversed(events):
        if event["kind"] == "unsaved":
            return f"{event['text']}; no later step was saved either"
        if event["kind"] == "save" and "is saved" in event["text"]:
            break
    return ""


def drop_routine(events: Sequence[E], newest: int) -> list[E]:
    """Return the events without old ones that neither incidents nor goodput can depend on.

    All of the `newest` ones stay, and so does the first one, with which the run began.
    """
    linked = _group_by_causes(events)
    recent = len(events) - newest
    return [
        event
        for number, event in enumerate(events)
        if number >= recent
        or number == 0
        or event["kind"] in LASTING
        or event.get("id", "") in linked
    ]


def _group_by_causes(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return by id the events that may be of an incident, each with all linked ones."""
    group: dict[str, list[Event]] = {}  # one list for all events of an incident
    place: dict[str, int] = {}
    first_term = min((_term_of(event) for event in events if event.get("id")), default=0)
    viewed: set[int] = set()  # terms in which a view was formed
    resumed = ""  # id of the line that the job was resumed, until the first view after it
    for number, event in enumerate(events):
        name = event.get("id", "")
        causes = [c for c in event.get("causes", ()) if c in group]
        term = _term_of(event)
        if event["kind"] == "resume":
            resumed = name
        elif resumed and event["kind"] in (*STOPPING, "view"):
            causes.append(resumed)
        if event["kind"] == "view":
            viewed.add(term)
            resumed = ""
        if term > first_term and term not in viewed:
            causes += _find_left_open(event, group)
        begins = event["kind"] in (*TELLING, "silent", "resume")
        if not name or not (causes or begins):
            continue
        place[name] = number
        merged: list[Event] = []
        for each in {id(group[c]): group[c] for c in causes}.values():
            merged += each
        merged = [*sorted(merged, key=lambda e: place[e["id"]]), event]
        for member in merged:
            group[member["id"]] = merged
    return group


def _find_left_open(event: Event, group: Mapping[str, list[Event]]) -> list[str]:
    """Return the last event of each incident that this one continues under a new coordinator.

    A coordinator that takes over knows nothing of open incidents, and logs a lost worker again
    before its first view. It logs no incident again that a view has answered.
    """
    worker, term = event.get("worker"), _term_of(event)
    if worker is None or event["kind"] not in STOPPING:
        return []
    found = {id(each): each for each in group.values()}.values()
    return [
        str(each[-1]["id"])
        for each in found
        if _term_of(each[-1]) < term
        and all(e["kind"] not in ("view", "resumed") for e in each)
        and any(e["kind"] in STOPPING for e in each)
        and any(e.get("worker") == worker for e in each)
    ]


def _term_of(event: Event) -> int:
    text = str(event.get("id", "")).partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() else 0


def _cost_of(events: Iterable[Event]) -> dict[str, float]:
    total: dict[str, float] = {}
    for event in events:
        for name, value in (event.get("cost") or {}).items():
            total[name] = total.get(name, 0) + value
    return total


def find_incident(incidents: Sequence[Incident], name: str) -> Incident:
    """Return the incident with an event of this id. UserError: there is none."""
    for each in incidents:
        if any(event["id"] == name for event in each.events):
            return each
    known = ", ".join(each.name for each in incidents[-8:]) or "the run has none"
    raise UserError(f"no incident has the event {name!r}; the newest incidents: {known}")


def describe_cost(incident: Incident) -> str:
    """Return the cost of an incident, in one phrase."""
    cost = incident.cost
    if not cost:
        kinds = {event["kind"] for event in incident.events}
        if "failed" in kinds:
            return "the job ended"
        return "its end was not recorded" if kinds & set(STOPPING) else "no worker had to stop"
    parts = [f"{cost.get('pause_s', 0.0):.2f} s until the next step"]
    for name, one, many in (
        ("tasks", "task was computed by others", "tasks were computed by others"),
        ("steps", "step or more was computed again", "steps or more were computed again"),
        ("missing", "worker fewer", "workers fewer"),
    ):
        count = int(cost.get(name, 0))
        if count:
            parts.append(f"{count} {one if count == 1 else many}")
    return ", ".join(parts)


def tell_story(incident: Incident, last_words: Sequence[str] = ()) -> list[str]:
    """Return the incident as lines: its events, its cost, the cause, the fault, and advice.

    `last_words`: lines on what lost workers printed last.
    """
    return [
        f"Incident {incident.name}: {incident.title}.",
        *list_events(incident),
        *last_words,
        f"Cost: {describe_cost(incident)}.",
        *incident.diagnosis.lines(),
    ]


def list_events(incident: Incident) -> list[str]:
    """Return a line for each event: the seconds since the first one, then its text and id."""
    return [
        f"  {float(event['time']) - incident.began_at:+8.2f} s  {event['text']}  [{event['id']}]"
        for event in incident.events
    ]


class Part(enum.Enum):
    """Names a part of the time of a run."""

    PRODUCTIVE = "productive"
    WAITING = "waiting"
    DATA = "data"
    STATES = "states"
    CHECKS = "checks"
    AGAIN = "again"
    LOST = "lost"
    SAVING = "saving"
    STALLED = "stalled"
    TRANSFER = "transfer"
    STARTING = "starting"
    SPARE = "spare"
    ENDING = "ending"
    DEGRADED = "degraded"


_WHILE_OPEN = frozenset((Part.STALLED, Part.AGAIN, Part.TRANSFER))
_UNTIL_BACK = frozenset((Part.DEGRADED, Part.STARTING, Part.TRANSFER))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Describes a stretch of a worker's time. `began`: seconds since the epoch."""

    worker: int
    began: float
    parts: Mapping[Part, float]
    step: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCost:
    """Describes the cost of an incident: seconds of workers by part."""

    incident: Incident
    parts: Mapping[Part, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def charge(incidents: Sequence[Incident], stretches: Sequence[Stretch]) -> list[IncidentCost]:
    """Return the cost of each incident. `stretches`: of each worker in order.

    The time in which a worker is replaced is charged to the last incident that names it, stalls and
    repeated tasks to the nearest one, and lost steps to the incident that went back behind them.
    """
    accounts = _Accounts(incidents)
    for stretch in stretches:
        accounts.take(stretch)
    pairs = zip(incidents, accounts.parts, strict=True)
    return [IncidentCost(incident=incident, parts=parts) for incident, parts in pairs]


class _Accounts:
    """Keeps one account for each incident: `parts`, in the order of the incidents."""

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self.parts: list[dict[Part, float]] = [{} for _ in incidents]
        self._incidents = incidents
        self._begins = [incident.began_at for incident in incidents]
        self._naming: dict[int, list[int]] = {}  # by worker: incidents that name it
        self._back: dict[int, int] = {}  # by worker: the last of them after which it worked
        for number, incident in enumerate(incidents):
            for worker in incident.workers:
                self._naming.setdefault(worker, []).append(number)

    def take(self, stretch: Stretch) -> None:
        """Charge one stretch of time."""
        last = self._find_last_naming(stretch)
        if last is not None and Part.PRODUCTIVE in stretch.parts:
            if stretch.began > self._incidents[last].ended_at:
                self._back[stretch.worker] = last
        if last is not None and self._back.get(stretch.worker) == last:
            last = None
        nearest = self._find_nearest(stretch)
        for part, seconds in stretch.parts.items():
            if part in _UNTIL_BACK and last is not None:
                self._charge(last, part, seconds)
            elif part in _WHILE_OPEN:
                self._charge(nearest, part, seconds)
            elif part is Part.LOST:
                self._charge(self._find_way_back(stretch), part, seconds)

    def _charge(self, number: int | None, part: Part, seconds: float) -> None:
        if number is not None:
            account = self.parts[number]
            account[part] = account.get(part, 0.0) + seconds

    def _find_last_naming(self, stretch: Stretch) -> int | None:
        """Return the last incident that names this worker and had begun by the stretch's end."""
        for number in reversed(self._naming.get(stretch.worker, ())):
            if self._begins[number] < stretch.ended:
                return number
        return None

    def _find_nearest(self, stretch: Stretch) -> int | None:
        after = bisect.bisect(self._begins, stretch.ended)
        best, distance = None, NEAR_S
        for number in range(max(after - 2, 0), min(after + 1, len(self._begins))):
            each = self._incidents[number]
            apart = max(each.began_at - stretch.ended, stretch.began - each.ended_at, 0.0)
            if apart <= distance:
                best, distance = number, apart
        return best

    def _find_way_back(self, stretch: Stretch) -> int | None:
        """Return the first incident after which the job resumed before this stretch's step."""
        for number in range(len(self._incidents)):
            each = self._incidents[number]
            if each.ended_at > stretch.began and each.resumes_at < stretch.step:
                return number
        return None
