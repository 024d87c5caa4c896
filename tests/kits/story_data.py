"""Defines what the workers of a story exchange, and what their scripts compute.

Numbers stand for tensors, so that every mistake shows. A group collects the messages of its
members. The story delivers them, once all members have sent theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import Doubt, Purpose, Row, Topic
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.exchanges import answer

SOUND = 7  # the fingerprint of a state without wrong bits


class Work:
    """Describes the work of one process's script, and the faults in it."""

    def __init__(self) -> None:
        self.view = 0  # newest group
        self.script: deque[ef.ScriptEffect] = deque()
        self.doing: ef.ScriptEffect | None = None
        self.open_step = -1
        self.whole = False  # whether all of the state is compared in this step
        self.tokens: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.copied = -1  # the step before which the script has copied the state for followers
        self.saving: list[tuple[int, View]] = []  # shares that the writer has received
        self.flipped = 0  # change of the fingerprint by wrong bits
        self.lies = 0  # tasks that the script computes wrongly from now on
        self.told_lies = 0
        self.poisons = False  # the next task is not finite
        self.sums_wrongly = False
        self.left = False  # the script has left its loop
        self.receiving: int | None = None  # the missed step for which the script waits

    def install(self, view: View) -> None:
        """Install a view."""
        self.view, self.receiving = view.number, None

    def open(self, begin: ef.Begin) -> None:
        """Begin a step."""
        self.open_step, self.whole = begin.step, begin.whole
        self.tokens, self.copies = {}, {}

    def computed(self, task: ef.Compute) -> ev.TaskDone | None:
        """Finish the task under way; return None if its step is over."""
        self.doing = None
        if task.step != self.open_step:
            return None
        token = 10 * task.step + task.vrank + 1000 * self.flipped
        if self.lies:
            self.lies -= 1
            self.told_lies += 1
            token += 500 + self.told_lies
        if self.poisons:
            self.poisons, token = False, -1
        if task.purpose is Purpose.HOSTED:
            self.tokens[task.vrank] = token
        elif task.purpose is Purpose.SPECULATIVE:
            self.copies[task.vrank] = token
        digest = token if task.digest else None
        return ev.TaskDone(task.step, task.vrank, task.purpose, 1, digest)

    @property
    def fingerprint(self) -> int:
        """Return the fingerprint of its state."""
        return SOUND + self.flipped


class Group:
    """Collects the messages of the members of one view, until they are delivered."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.here: set[WorkerId] = set()  # members that have installed the view
        self.connected: set[WorkerId] = set()
        self.closed: set[WorkerId] = set()  # members that have left the view
        self.reduces: dict[WorkerId, ef.Reduce] = {}
        self._rows: dict[str, list[dict[WorkerId, object]]] = {}  # the turns of each exchange
        # The number of exchanges that a member has received.
        self._heard: dict[tuple[str, WorkerId], int] = {}
        self.sent: dict[WorkerId, list[int]] = {}  # missed steps under way
        self.wrongly: list[int] = []  # ranks that have made their parts of a sum wrongly
        self.notes: dict[WorkerId, list[ev.WorkerEvent]] = {}  # news for one member alone

    # ------------------------------------------------------------ saying

    def said(self, worker: WorkerId, work: Work, effect: ef.WorkerEffect) -> None:
        """Take in a message of a member to the other members."""
        match effect:
            case ef.Gather(_, topic, row):
                told = (*row, float(work.fingerprint)) if topic is Topic.REPORT_FAULT else row
                self._say(topic.value, worker, told)
            case ef.Reduce():
                self.reduces[worker] = effect
                self.wrongly.clear()
            case ef.ShareRows():
                self._say("sum", worker, self._part(worker, work))
            case ef.CheckSum():
                if work.sums_wrongly:
                    self.wrongly.append(self.view.rank(worker))
                work.sums_wrongly = False
                self._say("check", worker, effect)
            case ef.SyncState():
                self._say("states", worker, work.fingerprint)
            case ef.ObtainState(_, _, step):
                self._say("checkpoint", worker, step)
            case ef.SendMissed(_, lag):
                steps = range(lag.committed, self.view.resume_step)
                self.sent.setdefault(lag.worker, []).extend(steps)
            case ef.SendDone(view, step, samples):
                done = ev.MemberDone(view, self.view.rank(worker), step, samples)
                self.notes.setdefault(self.view.workers[0], []).append(done)
            case ef.SendCounted(view, step, ranks):
                for other in self.view.workers[1:]:
                    event = ev.CountSettled(view, step, ranks)
                    self.notes.setdefault(other, []).append(event)
            case _:
                self._attend(worker, work, effect)

    def _attend(self, worker: WorkerId, work: Work, effect: ef.WorkerEffect) -> None:
        """Take in an effect that concerns one member alone."""
        if isinstance(effect, ef.Redo):
            work.tokens, work.copies = {}, {}
        elif isinstance(effect, ef.Adopt):
            work.tokens[effect.vrank] = work.copies.pop(effect.vrank)
        elif isinstance(effect, ef.ObtainStep):
            work.receiving = effect.step

    def _part(self, worker: WorkerId, work: Work) -> dict[str, object]:
        counts = self.view.rank(worker) in self.reduces[worker].counted
        return {
            "tokens": dict(work.tokens) if counts else {},
            "print": work.fingerprint,
            "whole": work.fingerprint if work.whole else 0,
            "copied": work.fingerprint * (work.copied == self.reduces[worker].step - 1),
            "step": self.reduces[worker].step,
        }

    def _say(self, kind: str, worker: WorkerId, what: object) -> None:
        turns = self._rows.setdefault(kind, [])
        for turn in turns:
            if worker not in turn:
                turn[worker] = what
                return
        turns.append({worker: what})

    # ------------------------------------------------------------ hearing

    def missing(self, kind: str, worker: WorkerId) -> list[WorkerId] | None:
        """Return the members for which this one waits; None if it waits for no exchange."""
        turn = self._turn(kind, worker)
        if turn is None or worker not in turn:
            return None
        return [w for w in self.view.workers if w not in turn]

    def hear(self, kind: str, worker: WorkerId) -> list[object]:
        """Return all members' messages, by rank, to a member that has not received them yet."""
        turn = self._turn(kind, worker)
        assert turn is not None, "nothing was said"
        self._heard[kind, worker] = self._heard.get((kind, worker), 0) + 1
        return [turn[w] for w in self.view.workers]

    def drop(self, kind: str, worker: WorkerId) -> None:
        """Skip the exchange for which this member waits, as if it was lost."""
        self._heard[kind, worker] = self._heard.get((kind, worker), 0) + 1

    def _turn(self, kind: str, worker: WorkerId) -> dict[WorkerId, object] | None:
        turns, number = self._rows.get(kind, []), self._heard.get((kind, worker), 0)
        return turns[number] if number < len(turns) else None

    def awaited(self, me: WorkerId) -> tuple[int, ...]:
        """Return the ranks whose part of the present sum is missing."""
        turn = self._turn("sum", me) or {}
        return tuple(r for r, w in enumerate(self.view.workers) if w not in turn and w != me)

    # ------------------------------------------------------------ what follows

    def summed(self, worker: WorkerId, work: Work, *, compares: bool) -> ev.Summed:
        """Sum the buckets; if there are numbers that are not finite, the first member sums them."""
        parts: list[dict[str, object]] = self.hear("sum", worker)  # type: ignore[assignment]
        tokens = [(rank, v, t) for rank, part in enumerate(parts) for v, t in _tokens(part)]
        bad = [rank for rank, _, token in tokens if token < 0]
        first = self.view.rank(worker) == 0
        return ev.Summed(
            view=self.view.number,
            step=self.reduces[worker].step,
            parts=tuple(_number(part["print"]) for part in parts) if compares else (),
            wholes=tuple(_number(part["whole"]) for part in parts) if compares else (),
            copies=tuple(_number(part["copied"]) for part in parts) if compares else (),
            doubt=Doubt.BLAMED + min(bad) if bad and first else Doubt.FINITE,
            unlike=tuple(v for _, v, token in tokens if work.copies.get(v, token) != token),
            compute_us=1000 * len(work.tokens),
        )

    def checked(self, worker: WorkerId) -> ev.SumChecked:
        """Return the members' answers about a sum to a member."""
        checks: list[ef.CheckSum] = self.hear("check", worker)  # type: ignore[assignment]
        hosts = tuple(self.view.rank(owner) for owner in self.reduces[worker].owners)
        wrongly, size = tuple(sorted(self.wrongly)), len(checks)
        rows = [answer(e.question, r, hosts, size, wrongly, 100) for r, e in enumerate(checks)]
        return ev.SumChecked(self.view.number, checks[0].bucket, tuple(rows))

    def gathered(self, topic: Topic, worker: WorkerId) -> ev.Gathered:
        """Return the rows of all members for a topic to a member."""
        rows: list[Row] = self.hear(topic.value, worker)  # type: ignore[assignment]
        return ev.Gathered(self.view.number, topic, tuple(rows))

    def compared(self, worker: WorkerId, work: Work) -> Iterator[ev.WorkerEvent]:
        """Compare the states of the members that have one; joiners get it if they are equal."""
        prints: list[int] = self.hear("states", worker)  # type: ignore[assignment]
        view = self.view
        late = [lag.worker for lag in view.catching_up]
        held = {
            w: each
            for w, each in zip(view.workers, prints, strict=True)
            if w not in view.joiners or w in late
        }
        if len(set(held.values())) > 1:
            yield ev.StatesCompared(view.number, tuple(sorted(held.items())))
            return
        if worker in view.joiners and worker not in late and view.donors:
            yield ev.Loading()
            work.flipped = next(iter(held.values())) - SOUND
        yield ev.StatesCompared(view.number)


def _tokens(part: dict[str, object]) -> list[tuple[int, int]]:
    tokens = part["tokens"]
    assert isinstance(tokens, dict)
    return sorted(tokens.items())


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
