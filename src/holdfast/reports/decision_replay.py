"""Replays the recorded events of a coordinator's machine, and compares its decisions.

The machine is pure, so that the same code decides the same. Changed code can be tried on events
that have happened in earnest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.records.recordings import (
    DecisionDigest,
    HeardEvent,
    Machine,
    Recording,
    digest_effects,
    thaw,
)
from holdfast.reports.replay_limits import limit_time


@dataclass(frozen=True, slots=True)
class Announced:
    """Is one line that the machine announces, at a time in seconds since the epoch."""

    at: float
    announce: Announce


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Describes the first event after which the machine decides otherwise than recorded.

    `number`: counts events from 1. `error`: what the machine raised; empty if it decided.
    """

    number: int
    at: float
    event: CoordinatorEvent
    effects: tuple[CoordinatorEffect, ...] = ()
    error: str = ""


@dataclass(slots=True)
class ReplayResult:
    """Is the result of a replay. `seconds`: of recorded time."""

    events: int = 0
    decisions: int = 0
    seconds: float = 0.0
    told: list[Announced] = field(default_factory=list)
    difference: FirstDifference | None = None


def replay(recording: Recording) -> ReplayResult:
    """Replay a recording up to its end, or to the first difference. Damaged.

    An event without a recorded decision at the very end is the last that was heard before the
    coordinator's process died: the machine is told it too, and any decision is right.
    """
    header, found = recording.header, ReplayResult()
    with limit_time():
        machine = thaw(header.machine)
    events = list(_pair(recording.records))
    for heard, decided in events:
        event = heard.event()
        found.events += 1
        found.seconds = heard.at - header.clock
        wall = header.began + found.seconds
        with limit_time():
            effects, digest, error = _decide(machine, event, heard.at)
        is_last = found.events == len(events)
        if error or digest != decided:
            if is_last and decided is None and not error:
                return found
            found.difference = FirstDifference(found.events, wall, event, tuple(effects), error)
            return found
        found.decisions += bool(effects)
        found.told += [Announced(wall, each) for each in effects if isinstance(each, Announce)]
    return found


def _pair(
    records: Sequence[HeardEvent | DecisionDigest],
) -> Iterator[tuple[HeardEvent, int | None]]:
    """Yield each event with the digest of its decision; None: it led to none."""
    heard: HeardEvent | None = None
    for each in records:
        if isinstance(each, HeardEvent):
            if heard is not None:
                yield heard, None
            heard = each
        elif heard is not None:
            yield heard, each.digest
            heard = None
    if heard is not None:
        yield heard, None


def _decide(
    machine: Machine, event: CoordinatorEvent, at: float
) -> tuple[list[CoordinatorEffect], int | None, str]:
    """Return the effects, their digest, and what the machine raised; empty if it decided."""
    try:
        effects = machine.handle(event, at)
        return effects, digest_effects(effects) if effects else None, ""
    except (Damaged, MemoryError):  # it is stopped by limits
        raise
    except Exception as error:  # noqa: BLE001 - a bug of the machine is a result
        return [], None, f"{type(error).__name__}: {error}"


def describe_event(event: CoordinatorEvent) -> str:
    """Return a few words on an event."""
    match event:
        case ReportArrived(report):
            return f"report {report.seq} of node {report.agent}"
        case StopRequested(reason):
            return f"a request to stop ({reason})"
        case ServersAsked(count):
            return f"a request for {count} servers"
        case _:
            return "the time that had passed"


def describe_effect(effect: CoordinatorEffect) -> str:
    """Return one line on an effect."""
    match effect:
        case Announce():
            return f"says ({effect.kind}): {effect.text}"
        case Persist(record):
            number = record.view.number if record.view else 0
            return f"keeps a record with view {number} and {len(record.slots)} workers"
        case SendDirective(directive):
            return f"sends a directive to node {directive.agent}"
        case Finish(outcome):
            return f"ends the job: {outcome or 'success'}"
