"""Draw the tables of docs/protocol.md from the code: `python docs/draw_protocol.py [--check]`.

The events and effects are read from the core's own types; the worker's transitions are found by
running the real machine from its start along every event, until no new situation appears. The ways
of a sum are those of the real plan.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from holdfast.engine.core import tree
from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.ground.transitions import Transitions
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.membership import agent, coordinator_events
from holdfast.engine.core.replica.replica import SYNC_MOVES, SyncStage
from holdfast.engine.core.step.activities import ACTIVITY_MOVES, Activity
from holdfast.engine.core.sum_plan import plan_sum
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import Phase

PAGE = Path(__file__).with_name("protocol.md")
BEGIN, END = "<!-- drawn: {} -->", "<!-- end -->"
ME, OTHER = WorkerId(0), WorkerId(1)
SAVED = 8  # the step of a checkpoint
DEPTH = 24  # events from the start; every situation is reached well before
SUMMED = 8  # workers of the drawn sum, with a virtual rank each
MACHINE = 4  # workers on each of their machines
PHASES = {
    Phase.BOUNDARY: "held at a boundary",
    Phase.WAITING: "its tasks done",
    Phase.ENDED: "loop ended",
}


def kinds(title: str, union: object) -> Iterator[str]:
    """A table of the members of a union: name, fields, meaning."""
    yield f"| {title} | carries | means |"
    yield "|---|---|---|"
    for cls in get_args(union):
        fields = ", ".join(f.name for f in dataclasses.fields(cls)) or "-"
        meaning = " ".join((inspect.getdoc(cls) or "").split())
        if meaning.startswith(f"{cls.__name__}("):  # the docstring that dataclasses make up
            meaning = "time has passed" if cls.__name__ == "Tick" else "-"
        yield f"| `{cls.__name__}` | {fields} | {meaning} |"


def tables(events: object, effects: object) -> Iterator[str]:
    """The tables of one machine: what it is told, and what it has done."""
    yield from kinds("event", events)
    yield ""
    yield from kinds("effect", effects)


def view(number: int, step: int, *, joining: bool, changed: bool) -> View:
    """Return a view of two workers: worker 0 joins, or stays; `changed`: the other one joins."""
    members = tuple(
        Member(worker=w, incarnation=Incarnation(1), agent=AgentId("a")) for w in (ME, OTHER)
    )
    joiners = ((ME,) if joining else ()) + ((OTHER,) if changed else ())
    return View(
        number=ViewNumber(number),
        members=members,
        owners=(ME, OTHER),
        resume_step=step,
        leader=ME,
        joiners=joiners,
    )


def situation(machine: WorkerMachine) -> str:
    """What matters of a worker's state, in words."""
    status = machine.snapshot()
    if status.view == 0:
        return "waiting for its first view" if status.loop else "booting"
    if status.promised >= status.view:
        words = ["stopped at a boundary" if status.at_boundary else "stopped in a step"]
    elif not status.has_state:
        words = [f"joining: {doing(machine)}"]
    else:
        words = [f"acting: {doing(machine)}"]
    if not status.at_boundary and status.phase in (Phase.BOUNDARY, Phase.WAITING, Phase.ENDED):
        words.append(PHASES[status.phase])
    if status.reduced:
        words.append("gradient complete")
    return ", ".join(words)


def doing(machine: WorkerMachine) -> str:
    """How far a member is: with bringing all to one state, or in the step."""
    activity = machine.step.course.activity
    return (machine._replica.stage if activity is Activity.SYNC else activity).value


def moves(machine: WorkerMachine) -> Iterator[tuple[str, ev.WorkerEvent]]:
    """Every event that the driver could deliver now, with a name for the table."""
    status = machine.snapshot()
    if status.loop == 0:
        yield "LoopEntered", ev.LoopEntered()
        return
    yield from _script(machine)
    now = status.view
    if now > status.promised:
        yield "GroupBroken", ev.GroupBroken(now, "a peer died")
        yield "Directed: stop", ev.Directed(WorkerDirective(stop_view=now))
        yield from _group(machine)
    elif now == 0 or not status.has_state:
        joining = view(now + 1, status.committed, joining=True, changed=False)
        yield "Directed: view as joiner", ev.Directed(WorkerDirective(view=joining))
        again = view(now + 1, SAVED, joining=True, changed=True)
        yield "Directed: view from a checkpoint", ev.Directed(WorkerDirective(view=again))
    else:
        redo = view(now + 1, status.committed, joining=False, changed=status.at_boundary)
        yield "Directed: view, same step", ev.Directed(WorkerDirective(view=redo))
        if status.reduced:
            go = view(now + 1, status.committed + 1, joining=False, changed=False)
            yield "Directed: view, next step", ev.Directed(WorkerDirective(view=go))


def _script(machine: WorkerMachine) -> Iterator[tuple[str, ev.WorkerEvent]]:
    """What the script may say, which does one thing after the other."""
    status, step = machine.snapshot(), machine.step.tasks._open
    task = step.running if step is not None else None
    if status.ended:
        yield "LoopEntered", ev.LoopEntered()
    elif status.phase is Phase.SCRIPT:
        yield "AtBoundary", ev.AtBoundary()
        if status.has_state and status.committed:
            yield "LoopEnded", ev.LoopEnded()
    elif status.phase is Phase.COMPUTING and machine._replica.opened < status.committed:
        yield "StepOpened", ev.StepOpened(status.committed)
    elif task is not None:
        assert step is not None
        yield "TaskDone", ev.TaskDone(step.index, *task)


def _group(machine: WorkerMachine) -> Iterator[tuple[str, ev.WorkerEvent]]:
    """What the engine may say: the answer to what it was told last."""
    status, now, course = machine.snapshot(), machine.snapshot().view, machine.step.course
    step = machine.step.tasks._open
    match machine._replica.stage:
        case SyncStage.CONNECTING:
            yield "Connected", ev.Connected(now)
        case SyncStage.OBTAINING:
            yield "StateObtained", ev.StateObtained(SourceKind.STORE, now)
            yield "ObtainFailed", ev.ObtainFailed(SourceKind.STORE, now, "no answer")
        case SyncStage.COMPARING:
            yield "StatesCompared", ev.StatesCompared(now)
    match course.activity:
        case Activity.AGREE:
            yield "Gathered: agree", ev.Gathered(now, ev.Topic.AGREE, ((0, 0, 0, 0),) * 2)
        case Activity.SUM if step is not None and step.running is None:
            yield "Summed", ev.Summed(view=now, step=course.step)
            yield (
                "Summed, not finite",
                ev.Summed(view=now, step=course.step, doubt=ev.Doubt.UNATTRIBUTED),
            )
        case Activity.VOTE:
            doubt = ev.Doubt.FINITE if status.reduced else ev.Doubt.UNATTRIBUTED
            for pending in (False, True):
                vote = Vote(view=now, step=course.step, pending=pending, doubt=doubt)
                name = "Gathered: vote, change pending" if pending else "Gathered: vote"
                yield name, ev.Gathered(now, ev.Topic.VOTE, (vote.row(),) * 2)


def transitions() -> Iterator[str]:
    """situation x event -> situation and effects, for all that is reachable."""
    rows: dict[tuple[str, str], set[tuple[str, str]]] = {}
    seen: set[str] = set()
    paths: list[tuple[ev.WorkerEvent, ...]] = [()]
    for _ in range(DEPTH):
        longer: list[tuple[ev.WorkerEvent, ...]] = []
        for path in paths:
            machine = _run(path)
            before = situation(machine)
            for name, event in moves(machine):
                after = _run(path)
                effects = after.handle(event, 0.0)
                names = ", ".join(f"`{type(e).__name__}`" for e in effects) or "-"
                found = rows.setdefault((before, name), set())
                new = (situation(after), names) not in found
                found.add((situation(after), names))
                mark = f"{situation(after)} {after.snapshot().phase} {len(after.snapshot().hosted)}"
                if new or mark not in seen:
                    seen.add(mark)
                    longer.append((*path, event))
        paths = longer
    yield "| a worker that is | on | is then | and does |"
    yield "|---|---|---|---|"
    for (before, name), results in sorted(rows.items()):
        for after_text, names in sorted(results):
            unchanged = after_text == before and names == "-"
            if not unchanged:
                yield f"| {before} | {name} | {after_text} | {names} |"


def sum_ways() -> Iterator[str]:
    """Draw which workers exchange how much of a sum on the way up; down they exchange the same."""
    nodes = [tree.maximal_nodes([worker], SUMMED) for worker in range(SUMMED)]
    plans = [plan_sum(nodes, SUMMED, worker) for worker in range(SUMMED)]
    ways = [
        (worker, each.peer, each.part[1] - each.part[0])
        for worker, plan in enumerate(plans)
        for level in plan.up
        for each in level.sends
        if worker < each.peer
    ]
    arrows = {(one, other): f"w{one} <-->|S/{1 / size}| w{other}" for one, other, size in ways}
    yield "```mermaid"
    yield "flowchart LR"
    for machine in range(SUMMED // MACHINE):
        yield f'    subgraph machine{machine}["machine {machine}"]'
        for (one, other), arrow in arrows.items():
            if one // MACHINE == other // MACHINE == machine:
                yield f"        {arrow}"
        yield "    end"
    for (one, other), arrow in arrows.items():
        if one // MACHINE != other // MACHINE:
            yield f"    {arrow}"
    yield "```"
    yield ""
    yield f"| level | {' | '.join(f'worker {worker}' for worker in range(SUMMED))} |"
    yield "|---" * (SUMMED + 1) + "|"
    for number in range(len(plans[0].up)):
        cells = []
        for plan in plans:
            (addition,) = plan.up[number].additions
            (first, width), pieces = addition.node, 1 / (addition.part[1] - addition.part[0])
            piece = addition.part[0] * pieces + 1
            cells.append(f"{first} to {first + width - 1}: piece {piece} of {pieces}")
        yield f"| {number + 1} | {' | '.join(cells)} |"


def diagram(transitions: Transitions[Any]) -> Iterator[str]:
    """Draw the legal moves between phases; each phase may also end with the view."""
    yield "```mermaid"
    yield "stateDiagram-v2"
    for old, new in transitions.pairs():
        if old is transitions.always:
            yield f"    [*] --> {_identifier(new)}"
        else:
            yield f"    {_identifier(old)} --> {_identifier(new)}"
    yield "```"


def _identifier(phase: enum.Enum) -> str:
    return str(phase.value).replace(" ", "_")


def _run(path: tuple[ev.WorkerEvent, ...]) -> WorkerMachine:
    machine = WorkerMachine(ME, Incarnation(1))
    for event in path:
        machine.handle(event, 0.0)
        machine.check()
    return machine


def drawn(text: str) -> str:
    """Return the page with every marked section drawn again."""
    sections = {
        "sum": "\n".join(sum_ways()),
        "worker": "\n".join(tables(ev.WorkerEvent, ef.WorkerEffect)),
        "worker transitions": "\n".join(transitions()),
        "activities": "\n".join(diagram(ACTIVITY_MOVES)),
        "stages": "\n".join(diagram(SYNC_MOVES)),
        "agent": "\n".join(tables(agent.AgentEvent, agent.AgentEffect)),
        "coordinator": "\n".join(
            tables(coordinator_events.CoordinatorEvent, coordinator_events.CoordinatorEffect)
        ),
    }
    for name, body in sections.items():
        text = replace_section(text, name, body)
    return text


def replace_section(text: str, name: str, body: str) -> str:
    """Return a page with another body of its marked section of this name."""
    begin = BEGIN.format(name)
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{body}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    old = PAGE.read_text()
    new = drawn(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
