"""Decides which nodes keep pieces, and which states can be made again from them. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.invalidations import (
    INVALIDATIONS_MAX,
    Invalidation,
    Invalidations,
    is_invalidated,
    merge,
)
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts, is_given_up
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.redundancy import GradientSource, KeptPieces, Recall, Redundancy
from holdfast.engine.core.types import NO_VIEW, AgentId, ViewNumber
from holdfast.engine.core.views import Member, View


@dataclass(frozen=True, slots=True)
class Protection:
    """Decides where pieces are kept, and which can be recalled, in a job with some redundancy."""

    redundancy: Redundancy
    #: The number of shards that nodes list separately: no node holds all of them.
    shards: int = 1
    #: The servers of the hosted service: no node keeps copies of their contents.
    servers: int = 0
    #: The loss that the newest view does not protect from.
    weakness: str = ""
    #: The newest view whose members could not recall the state.
    failed_in: ViewNumber = NO_VIEW
    #: A failing recall, and the time of its first attempt.
    failing: tuple[Recall, float] | None = None
    #: Pieces of views up to this one belong to contents of servers that are lost.
    useless: ViewNumber = NO_VIEW

    def protect(self, view: View, old: View | None, roster: Roster) -> tuple[Protection, View]:
        """Add to a new view the nodes that keep pieces, in order, and the abandoned states."""
        domains = {name: node.report.domains for name, node in roster.nodes.items()}
        ring = make_ring(view.members, domains, self.redundancy)
        weakness = find_weakness(ring, domains, self.redundancy)
        news = f"; {weakness}" if weakness not in ("", self.weakness) else ""
        abandoned, reason = self._abandon(view, old), view.reason + news
        nodes = [roster.nodes[name] for name in ring if name in roster.nodes]
        served = tuple(node.report.pieces_at for node in nodes if node.report.pieces_at)
        view = dataclasses.replace(
            view, ring=ring, pieces_at=served, abandoned=abandoned, reason=reason
        )
        return dataclasses.replace(self, weakness=weakness), view

    def _abandon(self, view: View, old: View | None) -> Invalidations:
        """Return the states that must not be recalled any more once this view follows an old one.

        If no worker holds the state, the job continues from a state that could be restored. Pieces
        of later steps were not built on, and never may be: those steps are computed again.
        """
        known = old.abandoned if old is not None else ()
        if not self.redundancy.data or view.donors:
            return known
        before = ViewNumber(view.number - 1)
        after = -1 if before <= self.useless else view.resume_step
        found = merge(known, [Invalidation(after=after, view=before)])
        if len(found) < INVALIDATIONS_MAX:
            return found
        oldest = Invalidation(after=-1, view=found[0].view)  # no piece this old is used
        return merge(found, [oldest])

    def awaits(self, facts: Facts, durable: Durable) -> bool:
        """Return whether the job waits for silent members, because they may hold the state.

        It does not if the pieces of other nodes bring it to the furthest step that any report
        shows.
        """
        if not any(facts.can_hold(member) for member in facts.members):
            return False
        return not self._bridges(facts, durable)

    def make_coverage_test(self, facts: Facts, durable: Durable) -> Callable[[], bool]:
        """Return a predicate: does node memory cover every step known to be committed?"""
        return partial(self._bridges, facts, durable)

    def _bridges(self, facts: Facts, durable: Durable) -> bool:
        recall = self.recall(facts, durable) if self.redundancy.data else None
        known = [status.committed for status in facts.known]
        number = facts.view.number if facts.view is not None else 0
        for each in self._kept_pieces(
            facts, frozenset()
        ):  # including workers that have no slots any more
            known += [each.committed] if each.view == number else []
        return recall is not None and recall.step >= max(known, default=0)

    def recall(self, facts: Facts, durable: Durable) -> Recall | None:
        """Find the sources from which the job begins again, when no worker holds the state.

        None: nodes that are silent just now may hold pieces of a later state, or some nodes have
        yet to list theirs, so it waits for them. Pieces that nodes list and members could not get
        are tried again for as long as silent nodes are waited for.
        """
        view, silent = facts.view, facts.silent
        if not self.redundancy.data:
            return Recall(base=durable.step, view=0, sources=())
        if _has_more_to_tell(facts):
            return None
        now = self._find(view, self._kept_pieces(facts, silent), durable)
        heard = [n for name, n in sorted(facts.roster.nodes.items()) if name not in silent]
        nodes = tuple(
            node.report.pieces_at for node in heard if node.report.kept and node.report.pieces_at
        )
        now = dataclasses.replace(now, nodes=nodes)
        if view is None:
            return now
        if self._recall_keeps_failing(now, view, facts):
            return self._find(view, [], durable)
        given_up = frozenset(name for name in silent if is_given_up(facts, name))
        if any(name not in given_up for name in facts.roster.unheard_nodes()):
            return None
        later = self._find(view, self._kept_pieces(facts, given_up), durable)
        return now if later.step <= now.step else None

    def find_newest(self, facts: Facts, durable: Durable, lost: frozenset[AgentId]) -> Recall:
        """Find the sources of the newest state that there are without some nodes."""
        kept = self._kept_pieces(facts, lost) if self.redundancy.data else []
        return self._find(facts.view, kept, durable)

    def note_failures(self, facts: Facts, durable: Durable, *, is_discarded: bool) -> Protection:
        """Return this with what members could not recall by now, the newest ones in this view.

        `is_discarded`: the workers have given their states up, perhaps because contents of
        servers are lost. Then the pieces that nodes have of them are of no use. Only a checkpoint
        has such contents as well, also where the pieces are of the same step.
        """
        view = facts.view
        if is_discarded and self.servers and view is not None:
            return dataclasses.replace(self, useless=view.number)
        if not self.redundancy.data or _has_more_to_tell(facts) or view is None:
            return self
        this = self._find(view, self._kept_pieces(facts, facts.silent), durable)
        if view.recall is None or dataclasses.replace(view.recall, nodes=()) != this:
            return self
        failed_in = self.failed_in
        if any(status.unrecalled == view.number for status in facts.known):
            failed_in = view.number
        failing = self.failing
        if failed_in == view.number and (failing is None or failing[0] != this):
            failing = this, facts.now
        return dataclasses.replace(self, failed_in=failed_in, failing=failing)

    def _recall_keeps_failing(self, found: Recall, view: View, facts: Facts) -> bool:
        """Return whether members have tried to recall this for long, the newest in this view."""
        this = dataclasses.replace(found, nodes=())
        if view.recall is None or dataclasses.replace(view.recall, nodes=()) != this:
            return False
        if self.failed_in != view.number or self.failing is None or self.failing[0] != this:
            return False
        return facts.now >= self.failing[1] + facts.lease.abandon_s

    def _kept_pieces(self, facts: Facts, without: frozenset[AgentId]) -> list[KeptPieces]:
        nodes = facts.roster.nodes.items()
        every = [kept for name, node in nodes if name not in without for kept in node.report.kept]
        return [kept for kept in every if kept.view > self.useless]

    def _find(self, view: View | None, kept: list[KeptPieces], durable: Durable) -> Recall:
        floor = (view.number, view.resume_step) if view is not None else (0, 0)
        abandoned = view.abandoned if view is not None else ()
        needed, invalidations = self.redundancy.data, (*durable.invalidations, *abandoned)
        return find_recall(kept, needed, durable.step, floor, invalidations, self.shards)


def _has_more_to_tell(facts: Facts) -> bool:
    """Return whether a node has pieces of steps that were reported, and has not listed them yet.

    A worker marks a step there before it reports the commit. The further nodes of a spread worker
    list all of their pieces when they report the end of its processes.
    """
    roster = facts.roster
    for member in facts.members:
        nodes = {n: roster.nodes[n] for n in member.nodes if n in roster.nodes}
        first = nodes[member.agent].statuses.get(member.worker) if member.agent in nodes else None
        if first is None or first.incarnation != member.incarnation:
            continue
        listed = {
            name: kept.committed
            for name, node in nodes.items()
            for kept in node.report.kept
            if name not in facts.silent and (kept.view, kept.worker) == (first.view, member.worker)
        }
        newest = max([first.committed, *listed.values()])
        for name, committed in listed.items():
            here = nodes[name].statuses.get(member.worker)
            if name == member.agent and committed < first.committed:
                return True
            if name != member.agent and here is not None and here.stage.alive:
                if here.incarnation == member.incarnation and committed < newest:
                    return True
    return False


def make_ring(
    members: Sequence[Member], domains: Mapping[AgentId, Domains], redundancy: Redundancy
) -> tuple[AgentId, ...]:
    """Order the members' nodes so that neighbours share no failure domain, as far as possible.

    Of a part no domain should hold more pieces than may be lost. With fewer nodes than pieces of a
    part, some hold several of them. The result is empty without redundancy.
    """
    names = {name for member in members for name in member.nodes}
    left = sorted(names) if redundancy.data else []
    sizes = Counter(label for agent in left for label in domains.get(agent, ()))
    ring: list[AgentId] = []
    while left:
        near = Counter(
            label
            for agent in ring[len(ring) - redundancy.pieces + 1 :]
            for label in domains.get(agent, ())
        )

        def measure_crowding(agent: AgentId, near: Counter[str] = near) -> tuple[int, int]:
            labels = domains.get(agent, ())
            over = sum(near[label] >= redundancy.parity for label in labels)
            return over, -max((sizes[label] for label in labels), default=0)

        chosen = min(left, key=measure_crowding)
        left.remove(chosen)
        ring.append(chosen)
        sizes.subtract(domains.get(chosen, ()))
    return tuple(ring)


def find_weakness(
    ring: Sequence[AgentId], domains: Mapping[AgentId, Domains], redundancy: Redundancy
) -> str:
    """Return the text of the loss that the state does not survive, though it should; or empty."""
    if not redundancy.data:
        return ""
    if len(ring) < redundancy.pieces:
        return (
            f"the nodes' memory bears the loss of {redundancy.nodes_to_lose(len(ring))} nodes "
            f"instead of {redundancy.parity}: {redundancy} needs {redundancy.pieces}, and the "
            f"members are on {len(ring)}"
        )
    worst, most = "", redundancy.parity
    for place in range(len(ring)):
        near = [ring[(place + number) % len(ring)] for number in range(redundancy.pieces)]
        counts = Counter(label for agent in near for label in domains.get(agent, ()))
        for label, count in sorted(counts.items()):
            if count > most:
                worst, most = str(label), count
    if not worst:
        return ""
    return (
        f"a loss of all of {worst} takes {most} pieces of a part, and {redundancy} bears "
        f"{redundancy.parity}: use more domains, or a greater redundancy"
    )


def find_recall(
    kept: Iterable[KeptPieces],
    needed: int,
    checkpoint: int,
    floor: tuple[int, int],
    invalidations: Invalidations,
    shards: int = 1,
) -> Recall:
    """Find the latest state that nodes' pieces give, best without a checkpoint from the store.

    `needed`: the pieces that give a part, in each of the `shards` shards. `checkpoint`: the step of
    the newest one in the store; 0: the job can begin from its initial state. `floor`: the last
    view, and the number of steps that are known to be committed before it. A state counts once the
    next step was committed in its own view, in which all members have compared it.
    """
    by_view: dict[int, list[KeptPieces]] = {}
    for each in kept:
        by_view.setdefault(each.view, []).append(each)
    views = sorted(by_view, reverse=True)

    def source_of(step: int) -> int:
        for view in views:
            found = by_view[view]
            known = max(floor[1], *(each.committed for each in found)) > step
            right = not is_invalidated(invalidations, step + 1, ViewNumber(view))
            here = [each for each in found if each.first <= step < each.end]
            if known and right and _complete(here, needed, shards):
                return view
        return 0

    bases = {0: 0, checkpoint: 0}
    for view in reversed(views):
        found = by_view[view]
        before = floor[1] if view == floor[0] - 1 else 0  # later steps were not of this view
        compared = max(before, *(each.committed for each in found))
        for step in sorted({step for each in found for step in each.states}):
            right = not is_invalidated(invalidations, step, ViewNumber(view))
            here = [each for each in found if step in each.states]
            if step < compared and right and _complete(here, needed, shards):
                bases[step] = view
    best = Recall(base=checkpoint, view=0, sources=())
    for base, view in sorted(bases.items()):
        sources: list[GradientSource] = []
        step = base
        while source := source_of(step):
            if sources and sources[-1].view == source:
                sources[-1] = sources[-1]._replace(end=step + 1)
            else:
                sources.append(GradientSource(source, step, step + 1))
            step += 1
        if step > best.step or (step == best.step and view):
            best = Recall(base=base, view=view, sources=tuple(sources))
    return best


def _complete(kept: Sequence[KeptPieces], needed: int, shards: int) -> bool:
    """Return whether these hold enough pieces of every part of all shards."""
    for shard in range(shards):
        its = [each for each in kept if not each.shards or shard in each.shards]
        pieces = dict.fromkeys(piece for each in its for piece in each.pieces)
        there = Counter(part for part, _ in pieces)
        if not its or any(there[part] < needed for part in range(its[0].parts)):
            return False
    return True
