"""Writes down the acts of the machines for stories: one short line for each effect.

Statuses, directives and reports carry whole states; a story shows only the news in them. Numbers
that only order messages, clocks and default values are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.engine.core.directives import AgentReport, Directive, WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.effects import SumStage
from holdfast.engine.core.ground.events import Doubt, Purpose, SinkKind, SourceKind, Topic
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.types import NO_VIEW, RELEASE_ALL, WorkerId, spans
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus

COLUMNS_MAX = 100
Block = tuple[str, tuple[str, ...]]  # an actor, and a line for each of its effects


# ---------------------------------------------------------------- names and lists


def several(numbers: Iterable[int]) -> str:
    """Write numbers as people do: 0, 1, 4-9."""
    return spans([WorkerId(n) for n in numbers])


def together(names: Sequence[str]) -> str:
    """Write several actors as one: workers 0-2, nodes 0, 1."""
    kinds = {name.rstrip("0123456789").strip() for name in names}
    if len(names) == 1 or len(kinds) > 1:
        return ", ".join(names)
    (kind,) = kinds
    numbers = [int(name.removeprefix(kind)) for name in names]
    return f"{kind}s {several(numbers)}"


def merged(blocks: Iterable[Block]) -> list[str]:
    """Write neighbours that do the same as one, and leave out the idle ones."""
    groups: list[tuple[list[str], tuple[str, ...]]] = []
    for who, lines in blocks:
        if not lines:
            continue
        if groups and groups[-1][1] == lines and who not in groups[-1][0]:
            groups[-1][0].append(who)
        else:
            groups.append(([who], lines))
    return [
        row
        for names, lines in groups
        for line in lines
        for row in folded(f"{together(names)}: {line}")
    ]


def folded(line: str) -> list[str]:
    """Break a line that is too long between words."""
    rows, row = [], ""
    for word in line.split(" "):
        if row and len(row) + 1 + len(word) > COLUMNS_MAX:
            rows.append(row)
            row = "    " + word
        else:
            row = f"{row} {word}" if row else word
    return [*rows, row]


def hosts(owners: Sequence[int]) -> str:
    """Write which worker hosts which virtual ranks."""
    shares = {w: [v for v, o in enumerate(owners) if o == w] for w in sorted(set(owners))}
    return "; ".join(f"worker {w} hosts {several(vranks)}" for w, vranks in shares.items())


def view_text(view: View) -> str:
    """Write a view in one line."""
    words = [f"view {view.number} of workers {several(view.workers)} from step {view.resume_step}"]
    words.append(hosts(view.owners))
    if view.leader != min(view.workers):
        words.append(f"worker {view.leader} leads")
    late = [lag.worker for lag in view.catching_up]
    if joiners := [w for w in view.joiners if w not in late]:
        words.append(f"joining: {several(joiners)}" if view.donors else "all begin")
    if late:
        words.append(f"catching up: {several(late)}")
    if view.recall is not None:
        words.append(f"recalled: {recall_text(view.recall)}")
    if view.suspended:
        words.append(f"suspended: {several([lag.worker for lag in view.suspended])}")
    if view.invalidations:
        words.append(", ".join(invalidation_text(each) for each in view.invalidations))
    return "; ".join(words)


def recall_text(recall: Recall) -> str:
    """Write the pieces from which the state is made again."""
    base = f"the state of step {recall.base}"
    if not recall.view:
        base = f"the checkpoint of step {recall.base}" if recall.base else "the initial state"
    found = [f"{several(range(s.first, s.end))} of view {s.view}" for s in recall.sources]
    return ", ".join([base, *(f"gradients {each}" for each in found)])


def invalidation_text(each: Invalidation) -> str:
    """Write which copies of the state are invalidated."""
    wrong = f", worker {several(each.wrong)} computes wrongly" if each.wrong else ""
    return f"copies beyond step {each.after} up to view {each.view} are invalid{wrong}"


# ---------------------------------------------------------------- statuses


_STATUS_WORDS: dict[str, Callable[[Any], str]] = {
    "stage": lambda s: s.stage.value,
    "loop": lambda s: f"loop {s.loop}",
    "promised": lambda s: f"promises view {s.promised}",
    "view": lambda s: f"in view {s.view}",
    "state": lambda s: f"state {s.state.value}",
    "committed": lambda s: f"{s.committed} committed",
    "reduced": lambda s: "gradient here" if s.reduced else "",
    "hosted": lambda s: f"hosts {several(s.hosted)}" if s.hosted else "hosts nothing",
    "phase": lambda s: s.phase.value,
    "unreached": lambda s: f"cannot reach {several(s.unreached)}" if s.unreached else "",
    "saved": lambda s: f"saved {s.saved}" if s.saved else "nothing saved",
    "unreadable": lambda s: f"cannot read {s.unreadable}",
    "invalidations": lambda s: ", ".join(invalidation_text(each) for each in s.invalidations),
    "detail": lambda s: s.detail,
}


def status_news(status: WorkerStatus, before: WorkerStatus) -> str:
    """Write the news in a worker's status."""
    words = [
        word
        for name, write in _STATUS_WORDS.items()
        if getattr(status, name) != getattr(before, name) and (word := write(status))
    ]
    told = before.events[-1].number if before.events else 0
    words += [f'{e.kind}: "{e.text}"' for e in status.events if e.number > told]
    return ", ".join(words)


def status_text(status: WorkerStatus) -> str:
    """Write a whole status, for a summary."""
    words = [] if status.stage.value == "ready" else [status.stage.value]
    words += [f"view {status.view}"] if status.view else ["no view"]
    words += ["stopped"] if status.view and status.promised >= status.view else []
    words += [f"{status.committed} committed"]
    words += [f"state {status.state.value}"] if not status.has_state else []
    words += ["gradient here"] if status.reduced else []
    words += [status.phase.value]
    words += [f"saved {status.saved}"] if status.saved else []
    return ", ".join(words)


# ---------------------------------------------------------------- what travels


def directive_news(directive: Directive, before: Directive | None) -> str:
    """Write the news in a directive for its node."""
    words: list[str] = []
    old = before or dataclasses.replace(
        directive,
        wanted=(),
        stop_view=NO_VIEW,
        pending_view=NO_VIEW,
        view_number=NO_VIEW,
        release_loop=0,
    )
    if directive.wanted != old.wanted and not directive.undecided and not directive.shutdown:
        runs = [f"worker {w.worker}{_again(w.incarnation)}" for w in directive.wanted]
        words.append(f"run {', '.join(runs) or 'nothing'}")
    if news := [each.agent for each in directive.freed if each not in old.freed]:
        words.append(f"{together(news)} may leave")
    words += _orders(directive, old)
    if directive.view_number > old.view_number:
        words.append(f"view {directive.view_number}")
    learns = directive.undecided and not (before is not None and before.undecided)
    words += ["nothing is decided yet"] if learns else []
    shutdown = directive.shutdown and not (before is not None and before.shutdown)
    return ", ".join([*words, *(["shut down"] if shutdown else [])])


def _orders(new: Directive | WorkerDirective, old: Directive | WorkerDirective) -> list[str]:
    words = []
    if new.stop_view > old.stop_view:
        words.append(f"stop view {new.stop_view}")
    if new.pending_view > old.pending_view:
        saved = ", at a saved boundary" if new.pending_save else ""
        words.append(f"view {new.pending_view} is to change{saved}")
    if new.release_loop > old.release_loop:
        over = new.release_loop == RELEASE_ALL
        words.append("let everybody go" if over else f"release loop {new.release_loop}")
    return words


def worker_directive_news(directive: WorkerDirective, before: WorkerDirective | None) -> str:
    """Write the news in an agent's directive for a worker."""
    words = _orders(directive, before or WorkerDirective())
    if directive.view is not None:
        words.append(f"view {directive.view.number}")
    return ", ".join(words)


def report_news(report: AgentReport, before: AgentReport | None) -> str:
    """Write the news in a report, without progress within a view."""
    words = []
    if before is None:
        words.append(f"{report.slots} place{'s' if report.slots > 1 else ''}")
    if before is not None and report.draining != before.draining:
        words.append(f"wants to be left ({report.draining})" if report.draining else "well again")
    if report.ending and not (before is not None and before.ending):
        words.append("nothing starts any more")
    if report.view is not None:
        words.append(f"knows view {report.view.number}")
    old = {s.worker: s for s in before.workers} if before else {}
    news = [s for s in report.workers if _quiet(s) != _quiet(old.get(s.worker))]
    alive = [s.worker for s in news if s.stage.alive]
    words += [together([f"worker {w}" for w in alive])] if alive else []
    ended = [s for s in news if not s.stage.alive]
    words += [f"worker {s.worker} {s.stage.value} ({s.detail})".replace(" ()", "") for s in ended]
    return ", ".join(words)


def _quiet(status: WorkerStatus | None) -> object:
    """Return the part of a status that is more than progress within a view."""
    if status is None:
        return None
    phase = (status.late, status.ended, status.at_boundary)
    return phase, *(getattr(status, name) for name in _QUIET)


_QUIET = (
    *("incarnation", "stage", "view", "promised", "state", "reduced", "hosted", "loop"),
    *("unreached", "saved", "unreadable", "invalidations", "events", "detail"),
)


def record_news(record: JobRecord, before: JobRecord | None) -> str:
    """Write what the coordinator commits to its journal."""
    old = before or JobRecord(term=record.term)
    words = [f"term {record.term}"] if before is None or record.term != old.term else []
    known = {slot.worker: slot for slot in old.slots}
    for slot in record.slots:
        if slot.worker not in known:
            words.append(f"worker {slot.worker}{_again(slot.incarnation)} on {slot.agent}")
        elif slot.incarnation != known[slot.worker].incarnation:
            words.append(f"worker {slot.worker}{_again(slot.incarnation)}")
    here = [slot.worker for slot in record.slots]
    words += [f"worker {w} has no place" for w in known if w not in here]
    if record.view is not None and record.view != old.view:
        words.append(view_text(record.view))
    if record.release_loop != old.release_loop:
        over = record.release_loop == RELEASE_ALL
        words.append("everybody may go" if over else f"loop {record.release_loop} is released")
    if record.saved != old.saved:
        words.append(f"checkpoints of steps {several(record.saved) or 'none'}")
    if record.invalidations != old.invalidations:
        words += [invalidation_text(each) for each in record.invalidations]
    if record.outcome is not None and old.outcome is None:
        words.append(f"outcome {record.outcome or 'success'}")
    return "; ".join(words) or "nothing new"


def _again(incarnation: int) -> str:
    return f" (incarnation {incarnation})" if incarnation > 1 else ""


# ---------------------------------------------------------------- effects of the worker


_DOUBTS = {
    Doubt.FINITE: "",
    Doubt.CONFIRMED_NON_FINITE: "rightly not finite",
    Doubt.UNATTRIBUTED: "not finite",
}
_PURPOSES = {Purpose.HOSTED: "", Purpose.AUDITED: " to audit", Purpose.SPECULATIVE: " as a copy"}


def gather_text(effect: ef.Gather) -> str:
    """Write what a member sends to all other members."""
    row = effect.row
    match effect.topic:
        case Topic.VOTE:
            return _vote_text(Vote.of(row))
        case Topic.AUDIT:
            several_results = f", task {int(row[-1])} had several results" if row[-1] >= 0 else ""
            return f"tell digests {' '.join(str(int(each)) for each in row[:-1])}{several_results}"
        case Topic.REPORT_FAULT:
            sums = "no sum may be wrong" if row[0] >= 1 << 59 else f"sums since step {int(row[0])}"
            return f"confess {sums}, copies beyond step {int(row[1])} may be wrong"
        case Topic.AGREE:
            whole = ", all is looked at" if row[1] else ""
            return f"agree{' that audits ask less' if row[0] else ''}{whole}"


def _vote_text(vote: Vote) -> str:
    words = [f"vote on step {vote.step}"]
    words += ["change pending"] if vote.pending else []
    words += ["save"] if vote.save else []
    words += ["busy saving"] if vote.busy else []
    words += [("bits", "audits compare numbers", "no audits")[vote.alike]] if vote.alike else []
    if vote.doubt >= Doubt.BLAMED:
        words.append(f"the part of rank {vote.doubt - Doubt.BLAMED} is not finite")
    else:
        words += [_DOUBTS.get(vote.doubt, "a copy differs")] if vote.doubt else []
    return ", ".join(words)


def reduce_text(effect: ef.Reduce, members: int) -> str:
    """Write which sum begins, and whose results count if not all do."""
    counted = list(effect.counted)
    ranks = "" if len(counted) == members else f", only ranks {several(counted)} count"
    return f"sum step {effect.step}{ranks}"


_KEPT_FOR = {
    SinkKind.LATE: "whoever misses it",
    SinkKind.FOLLOWERS: "workers that follow",
    SinkKind.MEMORY: "the nodes' memory",
}
_COPIES = {
    SinkKind.STORE: "save",
    SinkKind.FOLLOWERS: "feed",
    SinkKind.MEMORY: "protect",
}
_STATES = {
    SourceKind.STORE: "the checkpoint",
    SourceKind.MEMORY: "the protected state",
    SourceKind.FEED: "the fed state",
}
_STEPS = {
    SourceKind.MEMBERS: "receive missed",
    SourceKind.MEMORY: "recall",
    SourceKind.FEED: "take the fed",
}
_FORGOTTEN = {
    SinkKind.LATE: "",
    SinkKind.FOLLOWERS: "forget what followers do not need",
    SinkKind.MEMORY: "forget what is older in the nodes' memory",
}
_WORKER_WORDS: dict[type, Callable[[Any], str]] = {
    ef.Abort: lambda e: f"abort view {e.view}",
    ef.MarkCommitted: lambda e: f"mark step {e.step} committed",
    ef.Redo: lambda e: f"forget what was computed of step {e.step}",
    ef.Adopt: lambda e: f"take its copy of task {e.vrank} for its own",
    ef.KeepStep: lambda e: f"keep step {e.step} for {_KEPT_FOR[e.sink]}",
    ef.UseCorrectSum: lambda e: f"put the sum of bucket {e.bucket} right",
    ef.NoteDoubt: lambda e: (
        f"ledger: steps from {e.step} on may be wrong{', and are redone' if e.again else ''}"
    ),
    ef.Withdraw: lambda e: f"withdraw {'; '.join(map(invalidation_text, e.invalidations))}",
    ef.Exit: lambda e: "exit",
    ef.GiveUp: lambda e: f"give up: {e.reason}",
    ef.Begin: lambda e: f"begin step {e.step}{', look at all of the state' if e.whole else ''}",
    ef.Compute: lambda e: f"compute task {e.vrank}{_PURPOSES[e.purpose]}",
    ef.CopyState: lambda e: f"{_COPIES[e.sink]} its share of step {e.step}",
    ef.Commit: lambda e: f"commit step {e.step}",
    ef.Release: lambda e: f"leave loop {e.loop}",
    ef.Install: lambda e: f"connect view {e.view.number}",
    ef.ObtainState: lambda e: f"load {_STATES[e.source]} of step {e.step}",
    ef.SendMissed: lambda e: (
        f"send worker {e.to.worker} what it missed since step {e.to.committed}"
    ),
    ef.ObtainStep: lambda e: f"{_STEPS[e.source]} step {e.step}",
    ef.Follow: lambda e: "follow no more" if e.order is None else "follow the members",
    ef.SyncState: lambda e: "compare states",
    ef.Forget: lambda e: _FORGOTTEN[e.sink],
    ef.Gather: gather_text,
    ef.ShareRows: lambda e: f"its part of step {e.step} is complete",
    ef.CheckSum: lambda e: _CHECKS[e.question.stage].format(e.bucket),
    ef.SendDone: lambda e: f"tell the first member that it is done with step {e.step}",
    ef.SendCounted: lambda e: f"tell all that ranks {several(e.ranks)} count in step {e.step}",
    ef.LookWhoIsLate: lambda e: f"look who is late in step {e.step}",
}
_CHECKS = {
    SumStage.COMPARE: "sum bucket {} again, and compare",
    SumStage.FLAT: "sum bucket {} flat",
    SumStage.TRACE: "compare how bucket {} was summed",
}
_AGENT_WORDS: dict[type, Callable[[Any], str]] = {
    ag.Spawn: lambda e: f"start worker {e.worker}{_again(e.incarnation)}",
    ag.Kill: lambda e: f"kill worker {e.worker}: {e.reason}",
    ag.Pause: lambda e: f"pause worker {e.worker}",
    ag.Resume: lambda e: f"wake worker {e.worker}",
    ag.Quit: lambda e: "quit",
}


class Scribe:
    """Writes effects down; remembers the last ones, so that only news appears."""

    def __init__(self) -> None:
        self._told: dict[object, Any] = {}

    def _before(self, key: object, new: object) -> Any:
        before = self._told.get(key)
        self._told[key] = new
        return before

    def worker(self, effects: Iterable[ef.WorkerEffect], members: int) -> tuple[str, ...]:
        """Write what a worker does; `members`: of its view."""
        lines = []
        for effect in effects:
            if isinstance(effect, ef.Tell):
                status = effect.status
                key = ("worker", status.worker, status.incarnation)
                blank = WorkerStatus(worker=status.worker, incarnation=status.incarnation)
                news = status_news(status, self._before(key, status) or blank)
                lines.append(f"tell {news}" if news else "")
            elif isinstance(effect, ef.Reduce):
                lines.append(reduce_text(effect, members))
            else:
                lines.append(_WORKER_WORDS[type(effect)](effect))
        return tuple(line for line in lines if line)

    def agent(self, name: str, effects: Iterable[ag.AgentEffect]) -> tuple[str, ...]:
        """Write what an agent does."""
        lines = []
        for effect in effects:
            if isinstance(effect, ag.SendReport):
                report = effect.report
                old = self._before(("agent", name, report.incarnation), report)
                news = report_news(report, old)
                lines.append(f"report {news}" if news else "")
            elif isinstance(effect, ag.SendWorker):
                key = ("told", effect.worker, effect.incarnation)
                before = self._before(key, effect.directive)
                news = worker_directive_news(effect.directive, before)
                lines.append(f"to worker {effect.worker}: {news}" if news else "")
            else:
                lines.append(_AGENT_WORDS[type(effect)](effect))
        return tuple(line for line in lines if line)

    def coordinator(self, effects: Iterable[ce.CoordinatorEffect]) -> tuple[str, ...]:
        """Write what the coordinator does."""
        lines: list[str] = []
        told: list[tuple[str, str]] = []  # directives that follow each other
        for effect in effects:
            if isinstance(effect, ce.SendDirective):
                directive = effect.directive
                key = ("directive", directive.agent, directive.agent_incarnation)
                news = directive_news(directive, self._before(key, directive))
                told += [(directive.agent, news)] if news else []
                continue
            lines += _directive_lines(told)
            told = []
            match effect:
                case ce.Persist(record):
                    lines.append(f"journal: {record_news(record, self._before('journal', record))}")
                case ce.Announce(kind, text):
                    lines.append(f"{kind}: {text}")
                case ce.Finish(outcome):
                    lines.append(f"the job is over: {outcome or 'success'}")
        return (*lines, *_directive_lines(told))


def _directive_lines(told: Sequence[tuple[str, str]]) -> list[str]:
    """Write directives; nodes that get the same one share a line."""
    return [
        f"to {together([name for name, each in told if each == news])}: {news}"
        for news in dict.fromkeys(news for _, news in told)
    ]
