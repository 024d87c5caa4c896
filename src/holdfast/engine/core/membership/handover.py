"""Decides how long nodes that leave are needed, and when the last workers may be ended. Pure.

A planned leave never lowers the newest step that can be recovered:

- A node that leaves keeps its pieces of the state as long as the newest state is made from them. It
  is free once other nodes protect a newer one.
- The last workers that hold the state are ended by plan only once the nodes' memory or the store
  has the step that the job had reached when that was first wanted. Where memory does not bear the
  loss of the leaving nodes, a checkpoint comes first, if there is time for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.engine.core.directives import AgentReport, Freed
from holdfast.engine.core.invalidations import is_invalidated
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts, is_given_up
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.redundancy import KeptPieces, Recall
from holdfast.engine.core.types import AgentId, ViewNumber

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEnd:
    """Describes the wish to end all workers that hold the state, so that they begin again.

    `step`: the newest one known when this was first wanted in `view`. `saves`: a checkpoint of that
    step is wanted, and waited for until `until` although memory may have it. `may_end`: the workers
    may be ended now.
    """

    view: ViewNumber
    step: int
    saves: bool
    until: float
    may_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Keeps the decisions on nodes that leave. `needed`: nodes whose pieces may yet be read.

    `free`: nodes without workers whose pieces are not needed, and these pieces. `told`: nodes that
    stay for their pieces alone, as was announced. `replicated`: each worker holds the whole state.
    """

    replicated: bool = True
    needed: tuple[AgentId, ...] = ()
    free: Mapping[AgentId, tuple[Freed, tuple[KeptPieces, ...]]] = field(default_factory=dict)
    told: tuple[AgentId, ...] = ()
    end: PlannedEnd | None = None
    #: Any report may change a decision, because all list pieces.
    awaits_reports: bool = False

    @property
    def freed(self) -> tuple[Freed, ...]:
        """Return the nodes that may leave with their pieces."""
        return tuple(freed for freed, _ in self.free.values())

    @property
    def may_end(self) -> bool:
        """Return whether the last workers that hold the state may be ended by plan."""
        return self.end is not None and self.end.may_end

    @property
    def saves(self) -> bool:
        """Return whether a checkpoint should be made before workers are ended by plan."""
        return self.end is not None and self.end.saves and not self.end.may_end

    def list_alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision."""
        if self.end is not None:
            yield self.end.until

    def review(
        self, facts: Facts, protection: Protection, durable: Durable, wants_end: bool
    ) -> tuple[Handover, list[Announce]]:
        """Return the decisions by these facts, and lines for the event log.

        `wants_end`: a planned change would end all workers that hold the state.
        """
        needed = self._find_needed(facts, protection, durable)
        busy = frozenset(name for member in facts.members for name in member.nodes)
        leaving = [name for name in _list_leaving(facts) if name not in facts.silent]
        reports = [facts.roster.nodes[name].report for name in leaving]
        holding = [report for report in reports if report.kept]
        idle = [report for report in holding if report.agent not in busy]
        free = {r.agent: self._free(r) for r in idle if r.agent not in needed}
        stay = [r.agent for r in idle if r.leaves and r.agent in needed]
        new = [name for name in stay if name not in self.told]
        why = "stays until other nodes have its pieces of the state"
        lines = [Announce("node", f"node {name} {why}", node=name) for name in new]
        end = self._review_end(facts, protection, durable) if wants_end else None
        made = Handover(
            replicated=self.replicated,
            needed=needed,
            free=free,
            told=(*(name for name in self.told if name in leaving), *new),
            end=end,
            awaits_reports=len(free) < len(holding) or (end is not None and not end.may_end),
        )
        return made, lines

    def _free(self, report: AgentReport) -> tuple[Freed, tuple[KeptPieces, ...]]:
        """Free a node by a report, or still by an earlier one that lists the same pieces."""
        now = Freed(report.agent, report.incarnation, report.seq)
        freed, kept = self.free.get(report.agent, (now, report.kept))
        same = freed.incarnation == report.incarnation and kept == report.kept
        return (freed, kept) if same else (now, report.kept)

    def foresee_loss(
        self, facts: Facts, protection: Protection, durable: Durable, node: AgentId
    ) -> str:
        """Return a warning for people about a node that is asked to leave; empty: there is none.

        It names the loss if the node is gone before other nodes have taken over. The other nodes
        that leave by plan count as gone with it.
        """
        gone, view = facts.silent.union([node], _list_leaving(facts)), facts.view
        if view is None or self._is_held(facts, gone):
            return ""
        now, left = (protection.find_newest(facts, durable, lost) for lost in (facts.silent, gone))
        newest = max((status.committed for status in facts.known), default=now.step)
        is_protected = protection.redundancy.data and now.step >= view.resume_step
        if is_protected or not any(node in member.nodes for member in facts.members):
            newest = now.step  # nodes report their pieces some steps late
        if left.step >= newest:
            return ""
        made = left.view or left.sources or not left.step
        where = f"step {left.step}" if made else f"the checkpoint of step {left.step}"
        return (
            f"node {node} is needed until other nodes have its share of the state: if it is gone "
            f"before, the job goes back to {where}"
        )

    def _find_needed(
        self, facts: Facts, protection: Protection, durable: Durable
    ) -> tuple[AgentId, ...]:
        """Find the leaving nodes whose pieces are a part of the newest state.

        If the job stands still, no newer state will be protected. Then another worker's copy of the
        state is enough, so that a job which waits for a new node does not keep the old one.
        """
        roster, nodes = facts.roster, facts.roster.nodes
        gone = frozenset(name for name in facts.silent if is_given_up(facts, name))
        leaving = [n for n in _list_leaving(facts) if nodes[n].report.kept and n not in gone]
        listens_since = roster.started_at + facts.lease.fence_s
        if not leaving or roster.unheard_nodes() or facts.now < listens_since:
            return tuple(leaving)
        if not facts.is_moving() and self._is_held(facts, leaving):
            return ()
        # Silent nodes may come back with their pieces, or not.
        newest = [protection.find_newest(facts, durable, lost) for lost in (facts.silent, gone)]
        return tuple(n for n in leaving if not all(_is_free(facts, n, recall) for recall in newest))

    def _is_held(self, facts: Facts, leaving: Collection[AgentId]) -> bool:
        """Return whether a worker without any process on these nodes holds the whole state."""
        stay = [m for m in facts.members if not any(name in leaving for name in m.nodes)]
        known = [facts.status(member) for member in stay if facts.is_sound(member)]
        return self.replicated and any(status is not None and status.has_state for status in known)

    def _review_end(
        self, facts: Facts, protection: Protection, durable: Durable
    ) -> PlannedEnd | None:
        view, now, end, leaving = facts.view, facts.now, self.end, _list_leaving(facts)
        if view is None:
            return None
        if end is None or end.view != view.number:
            step = max((status.committed for status in facts.known), default=view.resume_step)
            by = min((facts.roster.nodes[name].leave_by for name in leaving), default=NEVER)
            saves = by < NEVER or not protection.redundancy.data
            until = now + max(by - now, 0.0) / 2 if by < NEVER else now
            end = PlannedEnd(view=view.number, step=step, saves=saves, until=until)
        without = facts.silent.union(leaving)
        kept, bears = (
            max(protection.find_newest(facts, durable, lost).step, durable.step) >= end.step
            for lost in (facts.silent, without)
        )
        return dataclasses.replace(end, may_end=bears or (kept and now >= end.until))


def _is_free(facts: Facts, name: AgentId, newest: Recall) -> bool:
    """Return whether the newest state is made without a node's pieces, and they are no newer.

    Reports of different nodes are of different moments. Together they may seem to give less than
    there is, which does not show that a piece is needed.
    """
    abandoned = facts.view.abandoned if facts.view is not None else ()
    for kept in facts.roster.nodes[name].report.kept:
        newer = kept.committed > newest.step
        if newest.uses(kept) or (
            newer and not is_invalidated(abandoned, kept.committed, ViewNumber(kept.view))
        ):
            return False
    return True


def _list_leaving(facts: Facts) -> list[AgentId]:
    """List the nodes that are to be left."""
    nodes = sorted(facts.roster.nodes.items())
    return [name for name, node in nodes if node.draining or node.report.leaves]
