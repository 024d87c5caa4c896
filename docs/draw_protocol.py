"""Draw the tables of docs/protocol.md from the code: `python docs/draw_protocol.py [--check]`.

The events and effects are read from the core's own types; the worker's transitions are found by
running the real machine from its start along every event, until no new situation appears.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

from holdfast.core.membership import agent, coordinator
from holdfast.core.step import worker
from holdfast.core.types import (
    AgentId,
    Incarnation,
    Member,
    View,
    ViewNumber,
    WorkerDirective,
    WorkerId,
)

PAGE = Path(__file__).with_name("protocol.md")
BEGIN, END = "<!-- drawn: {} -->", "<!-- end -->"
ME, OTHER = WorkerId(0), WorkerId(1)
DEPTH = 10  # events from the start; every situation is reached well before


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


def tables(module: ModuleType) -> Iterator[str]:
    name = module.__name__.rpartition(".")[2].capitalize()
    yield from kinds("event", getattr(module, f"{name}Event"))
    yield ""
    yield from kinds("effect", getattr(module, f"{name}Effect"))


def view(number: int, step: int, *, joining: bool, changed: bool) -> View:
    """A view of two workers in which worker 0 joins, or stays; `changed`: the other one joins."""
    members = tuple(
        Member(worker=w, incarnation=Incarnation(1), agent=AgentId("a")) for w in (ME, OTHER)
    )
    joiners = (ME,) if joining else (OTHER,) if changed else ()
    return View(
        number=ViewNumber(number),
        members=members,
        owners=(ME, OTHER),
        resume_step=step,
        leader=ME,
        joiners=joiners,
    )


def situation(machine: worker.WorkerMachine) -> str:
    """What matters of a worker's state, in words."""
    status = machine.snapshot()
    if status.view == 0:
        return "waiting for its first view" if status.loop else "booting"
    words = []
    if status.promised >= status.view:
        words.append("stopped at a boundary" if status.at_boundary else "stopped in a step")
    else:
        words.append("acting" if status.has_state else "joining")
        if status.has_state and machine._held:
            words.append("held until joiners are synced")
    if status.reduced:
        words.append("gradient complete")
    if status.ended:
        words.append("loop ended")
    return ", ".join(words)


def moves(machine: worker.WorkerMachine) -> Iterator[tuple[str, worker.WorkerEvent]]:
    """Every event that the driver could deliver now, with a name for the table."""
    status = machine.snapshot()
    now, step = status.view, status.committed
    if status.loop == 0 or status.ended:
        yield "LoopEntered", worker.LoopEntered()
        if status.loop == 0:
            return
    elif not status.reduced and not machine._held:  # else the script waits for the engine
        yield "AtBoundary", worker.AtBoundary()
    if now:
        yield "GroupBroken", worker.GroupBroken(now, "a peer died")
        yield "Synced", worker.Synced(now)
        if status.has_state and not status.ended and not machine._held:
            yield "Reduced", worker.Reduced(now, step)
        if status.reduced:
            yield "Voted", worker.Voted(now, step, pending=False)
            yield "Voted, change pending", worker.Voted(now, step, pending=True)
        stop = WorkerDirective(stop_view=now)
        yield "Directed: stop", worker.Directed(stop)
        if status.has_state and not (status.ended or status.reduced or machine._held):
            yield "LoopEnded", worker.LoopEnded()
    if now == 0 or (status.promised >= now and not status.has_state):
        joining = view(now + 1, step, joining=True, changed=False)
        yield "Directed: view as joiner", worker.Directed(WorkerDirective(view=joining))
    elif status.promised >= now:
        redo = view(now + 1, step, joining=False, changed=status.at_boundary)
        yield "Directed: view, same step", worker.Directed(WorkerDirective(view=redo))
        if status.reduced:
            go = view(now + 1, step + 1, joining=False, changed=False)
            yield "Directed: view, next step", worker.Directed(WorkerDirective(view=go))


def transitions() -> Iterator[str]:
    """situation x event -> situation and effects, for all that is reachable."""
    rows: dict[tuple[str, str], set[tuple[str, str]]] = {}
    seen: set[str] = set()
    paths: list[tuple[worker.WorkerEvent, ...]] = [()]
    for _ in range(DEPTH):
        longer: list[tuple[worker.WorkerEvent, ...]] = []
        for path in paths:
            machine = _run(path)
            before = situation(machine)
            for name, event in moves(machine):
                after = _run(path)
                effects = after.handle(event, 0.0)
                names = ", ".join(type(e).__name__ for e in effects) or "-"
                rows.setdefault((before, name), set()).add((situation(after), names))
                status = dataclasses.replace(after.snapshot(), seq=0)
                inside = vars(after) | {"_status": status, "lateness": None}  # no time passes here
                mark = repr(sorted(inside.items()))
                if mark not in seen:
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


def _run(path: tuple[worker.WorkerEvent, ...]) -> worker.WorkerMachine:
    machine = worker.WorkerMachine(ME, Incarnation(1))
    for event in path:
        machine.handle(event, 0.0)
        machine.check()
    return machine


def drawn(text: str) -> str:
    """The page with every marked section drawn anew."""
    sections = {
        "worker": "\n".join(tables(worker)),
        "worker transitions": "\n".join(transitions()),
        "agent": "\n".join(tables(agent)),
        "coordinator": "\n".join(tables(coordinator)),
    }
    for name, body in sections.items():
        begin = BEGIN.format(name)
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(END)
        text = f"{head}{begin}\n{body}\n{END}{tail}"
    return text


def main() -> int:
    old = PAGE.read_text()
    new = drawn(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
