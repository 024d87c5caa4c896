"""Lets a worker of several processes be one member: one machine decides for all of them. Pure.

Each process holds a shard of the model, and exchanges it with the same shards of other workers.
The machine runs in the process of shard 0. All processes carry out its decisions, and their results
become one event once all of them are there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Hashable, Sequence

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.audit import FICKLE, SUBSTITUTED
from holdfast.engine.core.types import Tick, WorkerId

# The first process that notices one of these is believed at once; the rest may repeat it.
_AT_ONCE = (
    *(ev.GroupBroken, ev.LinkLost, ev.Loading, ev.EventNoted),
    *(ev.ObtainFailed, ev.Directed, Tick, ev.StillAwaited, ev.FollowerBehind, ev.RoomSeen),
)
# Things that one process does for all of them.
_ALONE = (ef.Tell, ef.NoteDoubt, ef.Withdraw, ef.LookWhoIsLate, ef.GiveUp, ef.Exit)


def is_shared(effect: ef.WorkerEffect) -> bool:
    """Return whether all processes of a worker carry out an effect, each for its own shard."""
    return not isinstance(effect, _ALONE)


class FollowerProofs:
    """Finds, for a process that only follows, when all members of a view last acted for sure.

    No member votes for a step without this process's share of it, which it sends after it has
    applied the step before. So a complete vote shows that all other members acted since then.
    """

    def __init__(self) -> None:
        self._applied_at: float | None = None  # the step before, by this node's clock

    def record_commit(self, now: float, *, voted: bool) -> float | None:
        """Return since when all have acted; None if that a step is committed does not prove it."""
        before, self._applied_at = self._applied_at, now
        return before if voted else None


class ShardEvents:
    """Gathers the events of a worker's `count` processes into those of the worker."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._heard: dict[Hashable, list[deque[ev.WorkerEvent]]] = {}
        self._noted: dict[ev.EventNoted, list[int]] = {}  # how often each process has reported it

    def hear(self, shard: int, event: ev.WorkerEvent) -> list[ev.WorkerEvent]:
        """Return the events for the machine, now that a process has done this."""
        if isinstance(event, ev.EventNoted):
            return [event] if self._is_news(shard, event) else []
        if isinstance(event, _AT_ONCE):
            return [event]
        key = _key(event)
        queues = self._heard.setdefault(key, [deque() for _ in range(self._count)])
        queues[shard].append(event)
        if not all(queues):
            return []
        found = [queue.popleft() for queue in queues]
        if not any(queues):
            del self._heard[key]
        return [_join_events(found)]

    def _is_news(self, shard: int, note: ev.EventNoted) -> bool:
        """Return whether no other process has reported this as often."""
        times = self._noted.setdefault(note, [0] * self._count)
        times[shard] += 1
        if len(set(times)) == 1:
            del self._noted[note]
            return self._count == 1
        return times.count(max(times)) == 1 and times[shard] == max(times)

    def begin(self, view: int) -> None:
        """Forget what only some have done in views before this one."""
        for key in list(self._heard):
            older = key[1] if isinstance(key, tuple) else None
            if isinstance(older, int) and older < view:
                del self._heard[key]


def _key(event: ev.WorkerEvent) -> Hashable:
    """Return a key that events of several processes have in common if they belong together."""
    kind = type(event).__name__
    match event:
        case ev.TaskDone(step, vrank, purpose):
            return kind, None, step, vrank, purpose
        case ev.Gathered(view, topic):
            return kind, view, topic
        case ev.MemberDone(view, rank, step):
            return kind, view, step, rank
        case ev.StepOpened(step):
            return kind, None, step
        case ev.StateCopied(sink, step):
            return kind, None, sink, step
        case ev.SaveEnded(step, view):  # the view may be a later one
            return kind, None, step, view
    return kind, getattr(event, "view", None)


def _join_events(events: Sequence[ev.WorkerEvent]) -> ev.WorkerEvent:
    """Make one event of those of all processes, in the order of their shards."""
    first = events[0]
    match first:
        case ev.LoopEntered():
            exact = [each.exact for each in events if isinstance(each, ev.LoopEntered)]
            return dataclasses.replace(first, exact=all(exact))
        case ev.TaskDone():
            digests = [each.digest for each in events if isinstance(each, ev.TaskDone)]
            return dataclasses.replace(first, digest=_digest(digests))
        case ev.Gathered(topic=ev.Topic.REPORT_FAULT):  # the last word is a fingerprint
            every = [each.rows for each in events if isinstance(each, ev.Gathered)]
            rows = zip(*every, strict=True)
            mixed = tuple((*row[0][:-1], _mix([int(r[-1]) for r in row])) for row in rows)
            return dataclasses.replace(first, rows=mixed)
        case ev.StatesCompared():
            prints = [dict(each.prints) for each in events if isinstance(each, ev.StatesCompared)]
            workers = list(dict.fromkeys(worker for found in prints for worker in found))
            told = tuple((WorkerId(w), _mix([p.get(w, 0) for p in prints])) for w in workers)
            return dataclasses.replace(first, prints=told)
        case ev.Summed():
            return _join_sums([each for each in events if isinstance(each, ev.Summed)])
        case ev.SumChecked():  # the words of all shards
            tables = [each.rows for each in events if isinstance(each, ev.SumChecked)]
            joined = tuple(tuple(itertools.chain(*row)) for row in zip(*tables, strict=True))
            return dataclasses.replace(first, rows=joined)
        case ev.StepKept():
            full = any(each.full for each in events if isinstance(each, ev.StepKept))
            return dataclasses.replace(first, full=full)
        case ev.SaveEnded():  # share 0 of shard 0 learns of the whole checkpoint
            saves = [each for each in events if isinstance(each, ev.SaveEnded)]
            failed = [each for each in saves if each.problem]
            return dataclasses.replace((failed or saves)[0], first=saves[0].first)
        case ev.StateCopied() | ev.StateProtected():
            problems = [getattr(each, "problem", "") for each in events]
            return dataclasses.replace(first, problem=next(filter(None, problems), ""))
    return first


def _join_sums(events: Sequence[ev.Summed]) -> ev.Summed:
    return dataclasses.replace(
        events[0],
        parts=_mix_by_rank([each.parts for each in events]),
        buckets=min(each.buckets for each in events),  # buckets of all shards may be audited
        wholes=_mix_by_rank([each.wholes for each in events]),
        copies=_mix_by_rank([each.copies for each in events]),
        doubt=max(each.doubt for each in events),
        bits=_mix([each.bits for each in events]),
        unlike=tuple(sorted({vrank for each in events for vrank in each.unlike})),
    )


def _mix_by_rank(prints: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(_mix(words) for words in zip(*prints, strict=True))


def _digest(digests: Sequence[ev.Digest | None]) -> ev.Digest | None:
    """Mix digests of gradients; sketches of all shards are one sketch of more numbers."""
    if any(each is None for each in digests):
        return None
    if any(isinstance(each, tuple) for each in digests):
        return tuple(word for each in digests if isinstance(each, tuple) for word in each)
    words = [each for each in digests if isinstance(each, int)]
    said = next((word for word in (SUBSTITUTED, FICKLE) if word in words), None)
    return _mix(words) if said is None else said


def _mix(words: Sequence[int]) -> int:
    """Return 63 bits of several fingerprints; 0, for no fingerprint, if all are 0."""
    if not any(words):
        return 0
    data = " ".join(str(word) for word in words).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
