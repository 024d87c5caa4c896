"""Simulates a small world for the machine of groups: real agents, made-up processes, and a judge.

Everything is drawn from a seed: when messages arrive, whether they are lost, repeated or late, when
processes and agents are lost, nodes silent and coordinators restarted. `judge` looks at the truth,
not at the machines' knowledge.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership.agent import AgentMachine, AgentPolicy
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
)
from holdfast.engine.core.membership.group import GroupMachine
from holdfast.engine.core.membership.group_faults import ranks_of
from holdfast.engine.core.policies import GroupPolicy, LeasePolicy
from holdfast.engine.core.types import AgentId, Incarnation, ProcessRole, Tick, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus

FAULTS_END_S = 60.0
END_S = 400.0  # every job has ended by then
SAVE_S = 3.0  # time for a process that is asked to end
LOOK_S = 0.25  # interval at which an agent looks at its processes
POLICY = GroupPolicy(
    nodes_min=1,
    nodes_max=2,
    restarts_max=10_000,
    steady_s=5.0,
    hang_s=8.0,
    settle_s=1.0,
    late_s=20.0,
    backoff_max_s=2.0,
    lease=LeasePolicy(abandon_s=20.0),
)


class WrongError(AssertionError):
    """Reports something that the machine promises never to do."""


@dataclass(slots=True)
class Script:
    """Is a process in its real state."""

    worker: WorkerId
    incarnation: Incarnation
    role: ProcessRole
    code: int | None = None  # its exit status, once it has ended
    paused: bool = False
    hangs: bool = False
    view: View | None = None  # the view that it received
    status: WorkerStatus | None = None

    @property
    def acts(self) -> bool:
        works = self.role is ProcessRole.WORKER and self.view is not None
        return works and self.code is None and not self.paused


@dataclass(slots=True)
class Node:
    """Is a machine, with an agent or for the moment without one."""

    name: AgentId
    incarnation: int = 0
    agent: AgentMachine | None = None
    silent_until: float = 0.0
    scripts: dict[tuple[WorkerId, Incarnation], Script] = field(default_factory=dict)


@dataclass(slots=True)
class Truth:
    """Records the whole truth; each machine knows only parts of it."""

    record: JobRecord | None = None  # the durable record
    groups: dict[int, View] = field(default_factory=dict)  # groups that an agent received
    started: set[tuple[WorkerId, Incarnation]] = field(default_factory=set)
    done: set[tuple[WorkerId, Incarnation]] = field(default_factory=set)  # ended on their own
    work_s: dict[int, float] = field(default_factory=dict)
    restarts: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    outcome: str | None = None


class GroupWorld:
    """Runs one job from a seed until it is over; `outcome` is then ""."""

    def __init__(self, seed: int, policy: GroupPolicy = POLICY, *, loses_journal: bool = False):
        self.draw = random.Random(seed)
        self.policy = policy
        self.loses_journal = loses_journal
        self.now = 0.0
        self.truth = Truth()
        self.term = 0
        self.machine: GroupMachine | None = None
        self.nodes: dict[AgentId, Node] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.wakes: dict[str, float] = {}

    def run(self) -> Truth:
        """Run the job. Raises WrongError, or InvariantError from the machine itself."""
        self.start_coordinator()
        for index in range(self.draw.randint(1, 3)):
            self.after(self.draw.random() * 4, self.start_agent, AgentId(f"n{index}"))
        self.after(1.0, self.fault)
        self.after(LOOK_S, self.look)
        while self.truth.outcome is None:
            if not self.events or self.now > END_S:
                view = self.machine.view if self.machine else None
                raise WrongError(f"not over at {self.now:.1f} s; the group is {view}")
            at, _, act = heapq.heappop(self.events)
            self.now = max(self.now, at)
            act()
            self.judge()
        return self.truth

    def after(self, delay_s: float, act: Callable[..., None], *words: object) -> None:
        event = (self.now + delay_s, next(self.count), lambda: act(*words))
        heapq.heappush(self.events, event)

    def wake(self, who: str, due: float | None, tick: Callable[[], None]) -> None:
        """Wake a machine at `due`; only the newest request counts."""
        if due is None or self.wakes.get(who) == due:
            return
        self.wakes[who] = due

        def act() -> None:
            if self.wakes.get(who) == due:
                del self.wakes[who]
                tick()

        self.after(max(due - self.now, 0.001), act)

    def scripts(self) -> Iterator[Script]:
        """Yield the processes that have not ended."""
        for node in self.nodes.values():
            yield from (script for script in node.scripts.values() if script.code is None)

    # ------------------------------------------------------------ judging

    def judge(self) -> None:
        acting = {s.view.number for s in self.scripts() if s.acts and s.view is not None}
        if len(acting) > 1:
            raise WrongError(f"processes of groups {acting} act at the same time")

    def judge_group(self, view: View) -> None:
        """Check that a group which reaches an agent is durable, new and large enough."""
        known = self.truth.groups.get(view.number)
        if known is not None:
            if known != view:
                raise WrongError(f"two groups have the number {view.number}")
            return
        if self.truth.groups and view.number < max(self.truth.groups):
            raise WrongError(f"group {view.number} comes after a greater number")
        durable = self.truth.record.view if self.truth.record else None
        if durable != view:
            raise WrongError(f"group {view.number} is told of before it is durable")
        by_node = [m.agent for m in ranks_of(view)]
        nodes = set(by_node)
        if not self.policy.nodes_min <= len(nodes) <= self.policy.nodes_max:
            raise WrongError(f"a group of {len(nodes)} nodes")
        if any(by_node.count(name) != 2 for name in nodes) or len(set(view.owners)) != len(by_node):
            raise WrongError(f"ranks on {by_node}")
        if self.truth.record and not self.loses_journal and view.restarts < self.truth.restarts:
            raise WrongError(f"{view.restarts} restarts after {self.truth.restarts}")
        self.truth.restarts = view.restarts
        self.truth.groups[view.number] = view

    def judge_end(self, outcome: str) -> None:
        if any(not script.paused for script in self.scripts()):
            raise WrongError("the job is over, and processes act")
        done = [
            view
            for view in self.truth.groups.values()
            if all((m.worker, m.incarnation) in self.truth.done for m in ranks_of(view))
        ]
        if outcome == "" and not done:
            raise WrongError("a job is said to be done, and no group has done its work")
        self.truth.outcome = outcome

    # ------------------------------------------------------------ the coordinator

    def start_coordinator(self) -> None:
        record = self.truth.record  # it may record the end of the job, with no agent left to inform
        may_lose = self.loses_journal and record is not None and record.outcome is None
        lost = may_lose and self.draw.random() < 0.5
        forgotten = self.term if lost else 0
        self.term += 1
        record = None if lost else self.truth.record
        if record is not None:
            record = dataclasses.replace(record, term=self.term)
        self.wakes.pop("", None)
        self.machine = GroupMachine(self.policy, self.term, record, self.now, forgotten)
        for node in self.nodes.values():
            self.after(0.05 + self.draw.random() * 0.3, self.tell_agent, node, node.incarnation)
        self.feed_coordinator(Tick())

    def tell_agent(self, node: Node, incarnation: int) -> None:
        if node.incarnation == incarnation and node.agent is not None:
            self.feed_agent(node, ag.CoordinatorReached())

    def feed_coordinator(self, event: CoordinatorEvent) -> None:
        machine = self.machine
        if machine is None:
            return
        effects = machine.handle(event, self.now)
        for effect in effects:
            self.carry_out(effect)
        machine.check()
        self.wake("", machine.deadline(), lambda: self.feed_coordinator(Tick()))

    def carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Persist(record):
                self.truth.record = record
            case SendDirective(directive):
                node = self.nodes[directive.agent]
                if directive.view is not None:
                    self.judge_group(directive.view)
                self.send(node, self.to_agent, node, node.incarnation, directive)
            case Announce(kind):
                self.truth.counts[kind] = self.truth.counts.get(kind, 0) + 1
            case Finish(outcome):
                self.judge_end(outcome)

    def send(self, node: Node, arrive: Callable[..., None], *words: object) -> None:
        """Carry a message between a node and the coordinator."""
        if node.silent_until > self.now:
            return
        faulty = self.now < FAULTS_END_S
        if faulty and self.draw.random() < 0.05:
            return
        self.after(0.001 + self.draw.random() * 0.02, arrive, *words)
        if faulty and self.draw.random() < 0.1:  # delivered a second time, late
            self.after(self.draw.random() * 3.0, arrive, *words)

    # ------------------------------------------------------------ agents

    def start_agent(self, name: AgentId) -> None:
        node = self.nodes.setdefault(name, Node(name))
        node.incarnation += 1
        policy = AgentPolicy(lease=self.policy.lease, end_s=SAVE_S)
        node.agent = AgentMachine(name, Incarnation(node.incarnation), 5, policy)
        self.feed_agent(node, Tick())

    def to_agent(self, node: Node, incarnation: int, directive: object) -> None:
        if node.incarnation == incarnation and node.silent_until <= self.now:
            self.feed_agent(node, ag.DirectiveArrived(directive))  # type: ignore[arg-type]

    def to_coordinator(self, node: Node, report: object) -> None:
        if node.silent_until <= self.now:
            self.feed_coordinator(ReportArrived(report))  # type: ignore[arg-type]

    def feed_agent(self, node: Node, event: ag.AgentEvent) -> None:
        agent = node.agent
        if agent is None:
            return
        for effect in agent.handle(event, self.now):
            self.obey(node, effect)
        agent.check()
        if node.agent is agent:
            self.wake(node.name, agent.deadline(), lambda: self.feed_agent(node, Tick()))

    def obey(self, node: Node, effect: ag.AgentEffect) -> None:
        match effect:
            case ag.SendReport(report):
                self.send(node, self.to_coordinator, node, report)
            case ag.Spawn(worker, incarnation, role):
                if (worker, incarnation) in self.truth.started:
                    raise WrongError(f"process {worker} is started twice as {incarnation}")
                self.truth.started.add((worker, incarnation))
                script = Script(worker, incarnation, role)
                node.scripts[worker, incarnation] = script
                self.after(0.05 + self.draw.random(), self.ready, node, script)
            case ag.Kill(worker, incarnation, _):
                script = node.scripts[worker, incarnation]
                self.after(self.draw.random() * 0.5, self.end, node, script, -9)
            case ag.AskToEnd(worker, incarnation, number):
                script = node.scripts[worker, incarnation]
                if self.draw.random() < 0.7:  # else it continues, and is killed
                    save_s = self.draw.random() * SAVE_S
                    self.after(save_s, self.end, node, script, self.draw.choice([0, 1, -number]))
            case ag.Pause(worker, incarnation):
                node.scripts[worker, incarnation].paused = True
            case ag.Resume(worker, incarnation):
                node.scripts[worker, incarnation].paused = False
            case ag.SendWorker(worker, incarnation, directive):
                script = node.scripts[worker, incarnation]
                self.after(0.002, self.hear, node, script, directive.view)
            case ag.Quit():
                node.agent = None

    # ------------------------------------------------------------ processes

    def say(self, node: Node, script: Script, **changes: object) -> None:
        old = script.status or WorkerStatus(worker=script.worker, incarnation=script.incarnation)
        values = {"stage": Stage.READY, **changes, "seq": old.seq + 1}
        script.status = dataclasses.replace(old, **values)  # type: ignore[arg-type]
        self.feed_agent(node, ag.WorkerSaid(script.status))

    def ready(self, node: Node, script: Script) -> None:
        if script.code is None:
            self.say(node, script)

    def hear(self, node: Node, script: Script, view: View | None) -> None:
        if script.code is not None or view is None:
            return
        if not view.includes(script.worker, script.incarnation):
            return
        if script.view is not None and script.role is ProcessRole.WORKER:
            if script.view != view:
                raise WrongError(f"a process of group {script.view.number} is told of another")
            return
        script.view = view
        self.say(node, script, view=view.number)

    def end(self, node: Node, script: Script, code: int) -> None:
        if script.code is not None:
            return
        script.code = code
        if code == 0:
            self.truth.done.add((script.worker, script.incarnation))
        event = ag.ProcessExited(script.worker, script.incarnation, code, "", not code)
        self.after(0.01, self.tell_end, node, node.incarnation, event)

    def tell_end(self, node: Node, incarnation: int, event: ag.ProcessExited) -> None:
        if node.incarnation == incarnation:
            self.feed_agent(node, event)

    def look(self) -> None:
        """Make scripts progress while all of their group work, and let agents look at them."""
        self.after(LOOK_S, self.look)
        found = [(n, s) for n in list(self.nodes.values()) for s in n.scripts.values() if s.acts]
        for number in {s.view.number for _, s in found if s.view is not None}:
            view = self.truth.groups[number]
            group = [(n, s) for n, s in found if s.view is not None and s.view.number == number]
            hangs = any(s.hangs for _, s in group)
            whole = len(group) == len(view.owners) and not hangs
            done_s = self.truth.work_s.setdefault(number, 0.0)
            self.truth.work_s[number] = done_s + LOOK_S * whole
            for node, script in group:
                if done_s > 15.0:
                    self.after(self.draw.random(), self.end, node, script, 0)
                elif whole:
                    before = script.status.activity if script.status else 0
                    self.say(node, script, activity=before + 1)
                elif self.draw.random() < 0.03 and not hangs:  # the worker loses a connection
                    self.end(node, script, 1)

    # ------------------------------------------------------------ faults

    def fault(self) -> None:
        if self.now > FAULTS_END_S:
            if self.machine is None:
                self.start_coordinator()
            return
        self.after(self.draw.expovariate(1 / 2.5), self.fault)
        if not self.nodes:
            return
        node = self.draw.choice(list(self.nodes.values()))
        alive = [s for s in node.scripts.values() if s.code is None]
        match self.draw.randrange(7):
            case 0 | 1 if alive:
                self.end(node, self.draw.choice(alive), -9)
            case 2:
                for script in (s for s in alive if s.acts):
                    self.end(node, script, 1)
                    break
            case 3:
                for script in (s for s in alive if s.acts):
                    script.hangs = True
                    break
            case 4:
                node.silent_until = self.now + self.draw.choice((1.0, 3.0, 6.0, 25.0))
            case 5 if self.machine is not None:
                self.machine = None
                self.after(self.draw.choice((0.1, 1.0, 4.0)), self.restart_coordinator)
            case 6 if node.agent is not None:
                for script in alive:
                    script.code = -9
                node.agent = None
                self.after(self.draw.choice((0.1, 1.0, 8.0)), self.start_agent, node.name)

    def restart_coordinator(self) -> None:
        if self.machine is None:
            self.start_coordinator()
