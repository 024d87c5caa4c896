"""One simulated worker's side of finding what is wrong: fingerprints, audits, and what follows.

It mirrors train/step/engine.py; the rulings are those of core/step/audit.py and core/step/trust.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.step.audit import ATTEMPTS_MAX, Audit, Ruling, Sentence, judge, plan
from holdfast.core.step.worker import Doubted, GroupBroken
from holdfast.core.types import Invalidation, View, WorkerId
from holdfast.sim.checkers import Key
from holdfast.sim.wrong_bits import Violation

if TYPE_CHECKING:
    from holdfast.sim.data_network import Group
    from holdfast.sim.workers import Process

NEVER = 1 << 60


def turn_of(process: Process, group: Group) -> int:
    """Numbers the attempts at all steps."""
    return process.step * ATTEMPTS_MAX + group.attempt


def planned(process: Process) -> tuple[Audit, ...]:
    """What is computed twice in the process's step: everything in the first after a checkpoint."""
    view, options, step = process.machine.view, process.world.options, process.step
    if not options.audit or view is None or step < view.resume_step:
        return ()
    share = 1.0 if looks_at_all(process) else options.audit
    return plan(options.seed, step, process.machine.owners, view.workers, share)


def looks_at_all(process: Process) -> bool:
    every, step = process.world.options.save_every, process.step
    return bool(every and step % every == 0) or step == process.until - 1


def looks(process: Process) -> bool:
    """Whether anything is compared in this run; else a large one need not keep books of it."""
    return bool(process.world.options.audit or process.world.options.cycle)


def enter(process: Process, view: View) -> None:
    """All members of the view hold the state."""
    if looks(process):
        process.trust.enter(view, compared=bool(view.joiners))


def summed(process: Process, step: int) -> None:
    """The sum of the step is used from here on."""
    if looks(process):
        looked = [audit.vrank for audit in process.audits]
        process.trust.summed(step, process.machine.owners, looked)


def alike(process: Process, group: Group) -> bool:
    """Whether all who hold the state already, as a view begins, hold the same."""
    view, turn = group.view, turn_of(process, group)
    if not process.world.options.cycle:
        return True
    held = {w: group.digests[w][1] for w in (*view.donors, *(g.worker for g in view.catching_up))}
    if len(set(held.values())) > 1:
        differ(process, group, turn, held)
        return False
    return True


def fingerprint(process: Process) -> int | None:
    """Of a part of the state; another part in the next step."""
    cycle = process.world.options.cycle
    seen = cycle and (looks_at_all(process) or process.flipped == process.step % cycle)
    return process.flipped if seen else None


def settled(process: Process, group: Group, turn: int) -> bool:
    """Whether the sums may be used."""
    if not looks(process):
        return True
    if turn in group.rulings:
        return group.rulings[turn].sentence is Sentence.USE
    workers, parts = group.view.workers, group.parts[turn]
    if process.world.options.cycle:
        prints = {w: parts[k].fingerprint for w, k in zip(workers, group.keys, strict=True)}
        if len(set(prints.values())) > 1:
            differ(process, group, turn, prints)
            return False
    if not process.audits:
        return True
    if process.owed():
        return False
    if process.key not in group.heard.setdefault(turn, {}):
        group.heard[turn][process.key] = dict(process.audited) | process.tokens
        group.tell(process, "audit", turn, group.heard[turn][process.key])
    heard = group.heard[turn]
    if len(heard) < len(group.keys) or not group.open:
        return False
    said = dict(zip(workers, (heard[key] for key in group.keys), strict=True))
    digests = {a.vrank: {w: said[w][a.vrank] for w in a.workers} for a in process.audits}
    ruling = group.court.rule(digests, process.audits, process.machine.owners, workers)
    return _obey(process, group, turn, ruling)


def _obey(process: Process, group: Group, turn: int, ruling: Ruling) -> bool:
    group.rulings[turn] = ruling
    match ruling.sentence:
        case Sentence.USE:
            process.mistakes += any(worker == process.worker for worker, _ in ruling.wrong)
            if process.mistakes > 1:
                process.end(-9, "computes wrongly")
            return process.alive
        case Sentence.AGAIN:
            group.attempt += 1
            process.redo(ruling.audits)
        case Sentence.LEAVE:
            _doubt(process, group, turn, {w for w, _ in ruling.wrong}, diverged=False)
        case Sentence.TIE:
            _doubt(process, group, turn, set(), diverged=False)
        case Sentence.UNLIKE:
            if any(member.lied_in < process.step for member in process.world.data.members(group)):
                raise Violation("deterministic machines are taken for others")
            process.world.truth.errors.hidden = True  # all of them were wrong
            return True
    return False


def differ(process: Process, group: Group, turn: int, prints: dict[WorkerId, Any]) -> None:
    """Not all states are the same: the majority is right."""
    judgement = judge({worker: -1 if p is None else p for worker, p in prints.items()})
    group.rulings[turn] = Ruling(sentence=Sentence.LEAVE)
    _doubt(process, group, turn, set(judgement.wrong), diverged=True)


def _doubt(
    process: Process, group: Group, turn: int, wrong: set[WorkerId], *, diverged: bool
) -> None:
    """All say since when who is wrong may be so; nobody named: nobody knows who."""
    group.wrong, group.diverged = wrong, diverged
    found = process.trust.doubt(wrong or group.view.workers, process.step, diverged=diverged)
    body = NEVER if found.sums is None else found.sums, found.saved
    group.doubts.setdefault(turn, {})[process.key] = body
    group.doubtful = turn
    group.tell(process, "doubt", turn, body)
    conclude(process, group, turn)


def conclude(process: Process, group: Group, turn: int) -> None:
    """Once all have said so: who is wrong ends, and the others know what is invalidated."""
    if turn == group.doubtful and len(group.doubts[turn]) == len(group.keys):
        leave(process, group)


def leave(process: Process, group: Group) -> None:
    """Also when the group has broken before all could say what they know."""
    turn, group.doubtful = group.doubtful, -1
    heard: dict[Key, tuple[int, int]] = group.doubts.get(turn, {})
    if not heard:
        return
    sums, saved = (min(body[i] for body in heard.values()) for i in (0, 1))
    wrong = [key for key in group.keys if WorkerId(key[0]) in group.wrong]
    process.world.truth.errors.noticed(wrong or group.keys)
    if process.worker in group.wrong:
        process.end(-9, "computes wrongly")
        return
    discarded = sums < NEVER or not group.wrong
    liars = () if group.diverged else tuple(sorted(group.wrong))
    process.feed(Doubted(Invalidation(after=saved, view=group.view.number, wrong=liars), discarded))
    process.feed(GroupBroken(group.view.number, "somebody is wrong"))
