"""Carries out one simulated worker's exchanges with the members of its view, as its machine orders.

It mirrors the engine of a real worker, and like that one makes no decision: when the messages of
all members are there, it passes the result to the machine as an event. Questions about a sum to
which some members add wrong parts are answered here: these members are wrong in the first run along
the tree, at each tree node whose sum they help to make, and later runs are right. Numbers stand for
digests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.engine.core import tree
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.effects import SumQuestion, SumStage, WorkerEffect
from holdfast.engine.core.ground.events import Doubt, StepKind, Topic
from holdfast.engine.core.step.sum_trial import TREE_RUNS
from holdfast.engine.core.sum_plan import find_shared_sums, have_common_elements
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import DROPPED, Key, Parts, add, is_not_finite
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.data_network import DataNetwork
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.seams import Actor, Clock
from holdfast.lab.sim.turns import NONE_AWAITED, LevelSum, TurnedGather, check_total
from holdfast.lab.sim.wrong_bits import Violation

Row = tuple[int, ...]
Piece = tuple[tree.Node, int]  # a node, and the number of one of its pieces
MEETINGS = "update", "end"  # members with shares of the state meet after each step and each loop


class SumMakers:
    """Knows who makes which sums. `hosts`: the rank of each virtual rank, of `size` members."""

    def __init__(self, hosts: tuple[int, ...], size: int) -> None:
        nodes = tree.find_host_nodes(hosts, size)
        self._runs = [find_shared_sums(nodes, len(hosts), turned) for turned in range(TREE_RUNS)]

    def makers_among(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of these ranks that help to make a sum."""
        makers = {rank for each in self._runs[0] for rank in each.hosts}
        return tuple(rank for rank in ranks if rank in makers)

    def trace(self, rank: int, wrongly: tuple[int, ...], total: int) -> Row:
        """Return a member's row about the sums that it has made."""
        wrong = self._find_wrong_pieces(wrongly)
        root = self._runs[0][-1].node if self._runs[0] else None
        made: list[int] = []
        is_right = [1] * TREE_RUNS
        for run, sums in enumerate(self._runs):
            for each in sums:
                if rank in each.hosts:
                    piece = each.node, each.hosts.index(rank)
                    is_wrong = run == 0 and piece in wrong
                    made.append(hash((total, piece)) + is_wrong)
                    if is_wrong and each.node == root:
                        is_right[run] = 0
        copies = [0 if wrongly else 1, 1]
        return (*made, *is_right, *copies)

    def _find_wrong_pieces(self, wrongly: tuple[int, ...]) -> set[Piece]:
        """Return the pieces that are wrong after the first run."""
        wrong: set[Piece] = set()
        counts = {each.node: len(each.hosts) for each in self._runs[0]}
        for each in self._runs[0]:
            for i, maker in enumerate(each.hosts):
                if maker in wrongly or any(
                    have_common_elements((i, len(each.hosts)), (j, counts[child]))
                    for child in (each.left, each.right)
                    for j in range(counts.get(child, 0))
                    if (child, j) in wrong
                ):
                    wrong.add((each.node, i))
        return wrong


def answer(
    question: SumQuestion,
    rank: int,
    hosts: tuple[int, ...],
    size: int,
    wrongly: tuple[int, ...],
    total: int,
) -> Row:
    """Return a member's row, if `wrongly` were wrong and the right sum is `total`."""
    if question.stage is SumStage.COMPARE:
        return hash((total, wrongly)) if wrongly else hash(total), hash(total)
    if question.stage is SumStage.FLAT:
        return tuple(hash((total, piece)) for piece in range(size))
    return makers_of(hosts, size).trace(rank, wrongly, total)


@functools.lru_cache(maxsize=64)
def makers_of(hosts: tuple[int, ...], size: int) -> SumMakers:
    """Return the makers of all sums. Kept, since all members need the same."""
    return SumMakers(hosts, size)


@dataclass(frozen=True, slots=True)
class Contribution:
    """Describes a member's addend, fingerprints of its state, and whether it sums wrongly."""

    #: Virtual ranks with their tokens.
    tokens: tuple[tuple[int, int], ...]
    part: int
    whole: int
    #: A fingerprint of the member's copy for followers; 0: it has none.
    copied: int
    #: Kind of the step that the member's script has opened.
    kind: StepKind
    sums_wrongly: bool


@dataclass(frozen=True, slots=True)
class Sums:
    """Is shared by a view's members: their contributions, the right totals, the wrong adders."""

    parts: Parts
    total: int
    wrongly: tuple[int, ...]
    #: Virtual ranks whose tokens are not finite, with these.
    poisoned: tuple[tuple[int, int], ...]


class ExchangeWorld(Clock, Protocol):
    """Is the world around a process's exchanges."""

    @property
    def data(self) -> DataNetwork: ...

    @property
    def truth(self) -> Truth: ...


class Exchanges:
    """Carries out one process's exchanges in its present view."""

    def __init__(self, process: Actor, world: ExchangeWorld) -> None:
        self._process = process
        self._world = world
        self.view: View | None = None
        self._met: dict[str, Callable[[], None]] = {}  # what follows once all members have come
        self.looked = (-1, -1)  # view and step of its last search for late members
        self._reduce: ef.Reduce | None = None
        # The sum under way, and the gather of the rows next to it.
        self._levels: LevelSum | None = None
        self._rows: TurnedGather | None = None
        self._rows_step = -1  # the newest step whose rows were begun
        self._check: ef.CheckSum | None = None
        self.parts: Parts = ()  # contributions to the newest sum
        self.summed_in: View | None = None  # the view of that
        self._true_total = 0  # the right total of the newest sum
        self._hosts: tuple[int, ...] = ()  # the rank of each virtual rank in it
        self.wrongly: tuple[int, ...] = ()  # ranks that have made their parts of it wrongly

    @property
    def rank(self) -> int:
        """Return this worker's rank in its newest view."""
        return self.view.rank(self._process.worker) if self.view is not None else -1

    def enter(self, view: View) -> None:
        """A view is installed."""
        self.view = view
        self._reduce = self._check = self._rows = self._levels = None
        self._rows_step = -1
        self._met.clear()

    def carry_out(self, effect: WorkerEffect, group: Group) -> None:
        """Begin what the machine wants of the group."""
        process, data = self._process, self._world.data
        match effect:
            case ef.Gather(_, topic, row):
                if topic is Topic.REPORT_FAULT:
                    row = (*row, hash((process.work.state, process.spoiling.flipped)))
                elif topic is Topic.VOTE:
                    self._world.truth.proofs.record_given_vote(group.view.number, row, process.key)
                data.turns.gather(process, group, group.turn(topic.value), row)
            case ef.Reduce():
                self._world.truth.steps.check_reduce(group.view, effect)
                self._reduce, self._rows, self._levels = effect, None, None
                group.turn("rows")
            case ef.ShareRows():
                self._contribute(group)
            case ef.CheckSum():
                self._check = effect
                sums = self._hosts, len(group.keys), self.wrongly, self._true_total
                row = answer(effect.question, self.rank, *sums)
                data.turns.gather(process, group, group.turn("piece"), row)
            case ef.UseCorrectSum():
                process.work.total = self._true_total
            case ef.SendDone(_, step, samples):
                data.send(process, group, group.keys[0], ("done", step), samples)
            case ef.SendCounted(_, step, ranks):
                for key in group.keys[1:]:
                    data.send(process, group, key, ("counted", step), ranks)
            case ef.LookWhoIsLate(_, step):
                self.looked = (group.view.number, step)
                self._look_who_is_late(group, step)

    def meet(self, kind: str, met: Callable[[], None]) -> None:
        """Announce that this member has reached a place; call `met` once all have.

        Without a group that is never: this process is of no use any more.
        """
        process = self._process
        group = process.open_group(self.view.number) if self.view is not None else None
        if group is not None:
            self._met[kind] = met
            self._world.data.tell_all(process, group, group.turn(kind), None)
            self.receive(group.newest_turn(kind), group)

    def receive(self, what: What, group: Group) -> None:
        """Take in a message from a member; continue once all members have sent theirs."""
        process, (kind, number) = self._process, what
        view = group.view.number
        match kind:
            case "done":
                for key, samples in list(group.heard.pop(what).items()):
                    process.feed(ev.MemberDone(view, group.keys.index(key), number, samples))
            case "counted":
                for ranks in group.heard.pop(what).values():
                    process.feed(ev.CountSettled(view, number, ranks))
            case "rows" | "part":
                self._finish_sum(group)
            case _:
                found = group.messages_of_all(what)
                if found is not None and what == group.newest_turn(kind):
                    del group.heard[what]
                    rows = self._world.data.results.bodies_in_order(group, found)
                    if kind == "piece":
                        self._finish_check(rows, group)
                    elif kind in MEETINGS:
                        self._met.pop(kind)()
                    else:
                        process.feed(ev.Gathered(view, Topic(kind), rows))

    # ------------------------------------------------------------ sums

    def _contribute(self, group: Group) -> None:
        process, reduce = self._process, self._reduce
        assert reduce is not None, "rows of a step that is not being summed"
        spoiling, cycle = process.spoiling, self._world.options.cycle
        rank = group.view.rank(process.worker)
        hosted = process.machine.snapshot().hosted
        counts = rank in reduce.counted
        tokens = tuple((v, process.work.tokens[v] if counts else DROPPED) for v in hosted)
        flip = -2 if spoiling.flipped is None else spoiling.flipped
        part = flip if cycle and flip == reduce.step % cycle else -2
        whole = flip + 10 if process.work.whole and cycle > 1 else 0  # 0: it was not taken
        wrongly = False
        if self._world.options.kind_of(reduce.step) is StepKind.GRADIENTS:
            wrongly, spoiling.sums_wrongly = spoiling.sums_wrongly, False
        copied = process.feeds.copied_fingerprint(reduce.step)
        kind = self._world.options.kind_of(process.work.open_step)
        mine = Contribution(tokens, part, whole, copied, kind, wrongly)
        turns, (_, number) = self._world.data.turns, group.newest_turn("rows")
        step, self._rows_step = reduce.step, reduce.step
        levels = turns.start_sum(process, group, ("part", number), step, reduce.owners)
        self._levels = levels
        levels.begin(dict(tokens))
        if process.alive and group.open:
            self._rows = turns.gather(process, group, ("rows", number), mine)

    def _finish_sum(self, group: Group) -> None:
        """Report the sum, once it and the rows of all members are here."""
        process, reduce, levels = self._process, self._reduce, self._levels
        rows = group.newest_turn("rows")
        if rows in group.heard:
            self._rows = None
        if rows not in group.heard or reduce is None or levels is None or levels.total is None:
            return
        found = group.heard.pop(rows)
        self._reduce, self._levels, self.summed_in = None, None, group.view
        mine = self._world.data.results.combine(group, found, self._fold)
        check_total(process.key, reduce.step, levels.total, mine.total)
        self._hosts = tuple(group.view.rank(owner) for owner in reduce.owners)
        self.parts, self._true_total = mine.parts, mine.total
        self.wrongly = mine.wrongly
        if mine.wrongly and len(group.keys) > 1:
            self.wrongly = makers_of(self._hosts, len(group.keys)).makers_among(mine.wrongly)
        process.work.total = hash((mine.total, self.wrongly)) if self.wrongly else mine.total
        process.work.total_step = reduce.step
        looks = bool(self._world.options.cycle)
        copies = process.work.copies
        sent = {v: token for _, v, token in mine.parts} if copies else {}
        unlike = [vrank for vrank, token in sorted(copies.items()) if sent[vrank] != token]
        process.feed(
            ev.Summed(
                view=group.view.number,
                step=reduce.step,
                parts=tuple(found[key].part for key in group.keys) if looks else (),
                wholes=tuple(found[key].whole for key in group.keys) if looks else (),
                copies=tuple(found[key].copied for key in group.keys) if looks else (),
                doubt=self._doubt(mine, group),
                bits=hash(mine.poisoned) if mine.poisoned else 0,
                unlike=tuple(unlike),
                compute_us=process.work.compute_us,
            )
        )

    def _fold(self, group: Group, found: dict[Key, Any]) -> Sums:
        parts = tuple((key, v, token) for key in group.keys for v, token in found[key].tokens)
        values = {(v, 1): token for _, v, token in parts}
        if len({found[key].kind for key in group.keys}) > 1:
            raise Violation(f"the members have opened steps of other kinds: {found}")
        if len(values) < self._world.options.vranks:
            raise Violation(f"only virtual ranks {sorted(v for v, _ in values)} are summed")
        total: int = tree.fold(values, self._world.options.vranks, add)
        wrongly = tuple(rank for rank, key in enumerate(group.keys) if found[key].sums_wrongly)
        owners = {key: rank for rank, key in enumerate(group.keys)}
        bad = tuple((owners[key], token) for key, _, token in parts if is_not_finite(token))
        return Sums(parts, total, wrongly, bad)

    def _doubt(self, sums: Sums, group: Group) -> int:
        """Return a code: is the sum finite; if not, whether this member's part of it is."""
        if not sums.poisoned:
            return Doubt.FINITE
        rank = group.rank_of(self._process.key)
        return Doubt.BLAMED + rank if rank in dict(sums.poisoned) else Doubt.UNATTRIBUTED

    def _finish_check(self, rows: Sequence[Row], group: Group) -> None:
        """Report the answers of all members, by rank."""
        check, self._check = self._check, None
        if check is not None:
            self._process.feed(ev.SumChecked(group.view.number, check.bucket, tuple(rows)))

    def awaited_rank(self, step: int) -> int:
        """Return the rank for which this member waits; its own rank while it computes."""
        rows = self._rows
        if step < self._rows_step or (rows is None and step == self._rows_step):
            return NONE_AWAITED
        if rows is None or step > self._rows_step:
            return self.rank
        return rows.awaited_rank

    def _look_who_is_late(self, group: Group, step: int) -> None:
        """Ask along the chain of awaited members, and report the last one."""
        process, world = self._process, self._world
        rank, asked, delay_s = self.awaited_rank(step), 0, 0.0
        awaited = rank
        while rank not in (NONE_AWAITED, self.rank) and asked <= len(group.keys):
            asked += 1
            delay_s += 2 * world.delay(world.options.data_s)
            awaited = world.data.ask_awaited(process, group, rank, step)
            if awaited == rank:
                event = ev.StillAwaited(group.view.number, step, (rank,))
                process.post(delay_s, process.feed, event)
                return
            rank = awaited
