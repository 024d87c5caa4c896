"""Defines the commands of stories by which parts fail or stop, or an operator ends them."""

from __future__ import annotations

from holdfast.engine.core.directives import Move
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.liveness import ProcessSample
from holdfast.engine.core.types import AgentId, WorkerId
from story_cluster import Cluster, Host, Process, StoryError
from story_commands import (
    COMMANDS,
    NODE,
    WHO,
    WORKER,
    command,
    each_of,
    host_of,
    numbers_of,
    process_of,
)

# ---------------------------------------------------------------- faults of workers


@command(rf"{WORKER} dies")
def dies(cluster: Cluster, worker: str) -> None:
    """Kill a process; its agent does not know it yet."""
    cluster.end(process_of(cluster, worker), -9)


@command(rf"{WORKER} notices that its processes on {NODE} are gone")
def misses(cluster: Cluster, worker: str, node: str) -> None:
    """End the first process of a worker, which has lost its processes on another node."""
    cluster.end(
        process_of(cluster, worker), -9, "process 1 of this worker, on another node, was lost"
    )


@command(rf"shard (?P<shard>\d+) of {WORKER} (?P<how>falls behind|catches up)")
def shard_behind(cluster: Cluster, shard: str, worker: str, how: str) -> None:
    """Make one process of a worker fall behind, or catch up again."""
    process = process_of(cluster, worker)
    if how == "falls behind":
        process.shards.hold_back(int(shard))
    else:
        cluster.feed_told(process, process.shards.catch_up(int(shard)))


@command(rf"shard (?P<shard>\d+) of {WORKER} loses a connection")
def shard_breaks(cluster: Cluster, shard: str, worker: str) -> None:
    """Break the connection of one process of a worker to the same shard of another worker."""
    process = process_of(cluster, worker)
    view = process.machine.snapshot().view
    cluster.feed_told(process, process.shards.lose_connection(int(shard), view))


@command(rf"{WORKER} (?P<how>freezes|thaws)")
def freezes(cluster: Cluster, worker: str, how: str) -> None:
    """Freeze a process, or continue it."""
    process = process_of(cluster, worker)
    process.frozen = how == "freezes"
    if process.runs:
        cluster.feed(process, ev.Tick())


@command(rf"{NODE} sees {WORKER} stopped (?P<times>\d+) times")
def sampled(cluster: Cluster, node: str, worker: str, times: str) -> None:
    """Make an agent look at a process that the kernel has stopped."""
    process = process_of(cluster, worker)
    for _ in range(int(times)):
        sample = ProcessSample(state="T", progress=1)
        cluster.tell_agent(
            host_of(cluster, node), ag.Sampled(process.worker, process.incarnation, sample)
        )


@command(WHO + "the group breaks")
def breaks(cluster: Cluster, who: str) -> None:
    """Make exchanges of a group fail."""

    def break_(process: Process) -> bool:
        group = cluster.groups.get(process.work.view)
        if group is None or process.worker in group.closed:
            return False
        cluster.feed(process, ev.GroupBroken(group.view.number, "a peer is gone"))
        return True

    each_of(cluster, who, break_, "is in no group")


@command(rf"{WORKER} cannot reach (?P<peers>workers? [\d, -]+)")
def link_lost(cluster: Cluster, worker: str, peers: str) -> None:
    """Break a worker's connections to some peers."""
    process = process_of(cluster, worker)
    lost = tuple(WorkerId(n) for n in numbers_of(peers.split(maxsplit=1)[1]))
    view = process.machine.snapshot().view
    cluster.feed(process, ev.LinkLost(view, lost))


@command(rf"{WORKER}: (?P<what>computes wrongly (?:once|always)|a bit of its state flips)")
def wrong(cluster: Cluster, worker: str, what: str) -> None:
    """Make a worker compute wrongly, or flip a bit of its state."""
    work = process_of(cluster, worker).work
    if "flips" in what:
        work.flipped = 1
    else:
        work.lies = 1 if what.endswith("once") else 1 << 30


@command(rf"{WORKER}: (?P<what>its next gradient is not finite|its next sum is wrong)")
def wrong_once(cluster: Cluster, worker: str, what: str) -> None:
    """Make one task or sum go wrong once."""
    work = process_of(cluster, worker).work
    work.poisons = work.poisons or "finite" in what
    work.sums_wrongly = work.sums_wrongly or "sum" in what


# ---------------------------------------------------------------- faults of stores and writers


@command(rf"the writer of {WORKER} dies")
def writer_dies(cluster: Cluster, worker: str) -> None:
    """Make a node's writer lose the shares that it has not written yet."""
    process = process_of(cluster, worker)
    if not process.work.saving:
        raise StoryError("it has no share to lose")
    step, view = process.work.saving.pop(0)
    first = view.rank(process.worker) == 0
    event = ev.SaveEnded(step, view.number, problem="the writer died", first=first)
    cluster.feed(process, event)


@command(rf"the writer of {WORKER} waits in vain")
def writer_waits(cluster: Cluster, worker: str) -> None:
    """End the first share's wait for the other shares."""
    process = process_of(cluster, worker)
    if not process.work.saving:
        raise StoryError("it waits for nothing")
    step, view = process.work.saving.pop(0)
    problem = "a share did not come"
    cluster.feed(process, ev.SaveEnded(step, view.number, problem=problem, first=True))


@command(WHO + "the store does not answer")
def store_silent(cluster: Cluster, who: str) -> None:
    """Make the store silent for members that load a checkpoint."""

    def fail(process: Process) -> bool:
        group = cluster.groups.get(process.work.view)
        if group is None or group.missing("checkpoint", process.worker) is None:
            return False
        group.drop("checkpoint", process.worker)
        reason = "the store does not answer"
        event = ev.ObtainFailed(SourceKind.STORE, group.view.number, reason)
        cluster.feed(process, event)
        return True

    each_of(cluster, who, fail, "reads nothing")


@command(rf"{WORKER} finds step (?P<step>\d+) damaged, and step (?P<older>\d+) readable")
def unreadable(cluster: Cluster, worker: str, step: str, older: str) -> None:
    """Report that a checkpoint is damaged."""
    process = process_of(cluster, worker)
    number, reason = process.machine.snapshot().view, f"step {step} is damaged"
    event = ev.ObtainFailed(SourceKind.STORE, number, reason, int(step), int(older))
    cluster.feed(process, event)


# ---------------------------------------------------------------- nodes and the coordinator


@command(rf"{NODE} dies")
def node_dies(cluster: Cluster, node: str) -> None:
    """Lose a machine, and its processes and memory with it."""
    host = host_of(cluster, node)
    host.machine = None
    cluster.memories.lose(host.name)
    for further in cluster.further.on(host.name):
        further.alive = False
    for process in cluster.newest():
        if process.host is host:
            cluster.end(process, -9)


@command(rf"{NODE} comes back")
def node_back(cluster: Cluster, node: str) -> None:
    """Start a node's agent again, without the processes that ran there."""
    cluster.start_agent(host_of(cluster, node))


@command(rf"{NODE} joins with (?P<places>\d+) places?")
def node_joins(cluster: Cluster, node: str, places: str) -> None:
    """Add another node to the cluster."""
    host = cluster.hosts[AgentId(node)] = Host(AgentId(node), int(places))
    cluster.start_agent(host)


@command(rf"{NODE} (?P<how>freezes|thaws)")
def node_freezes(cluster: Cluster, node: str, how: str) -> None:
    """Stop a whole machine, or continue it: timers come first."""
    host = host_of(cluster, node)
    host.frozen = how == "freezes"
    here = [p for p in cluster.newest() if p.host is host and p.alive]
    for process in here:
        process.frozen = host.frozen
    if not host.frozen:
        cluster.tell_agent(host, ag.Tick())
        for process in here:
            if process.runs:
                cluster.feed(process, ev.Tick())


@command(rf"{NODE} is (?P<how>cut off|reached again)")
def cut_off(cluster: Cluster, node: str, how: str) -> None:
    """Cut a node and its messages off from the control network, or connect it again."""
    host = host_of(cluster, node)
    host.cut_off = how == "cut off"
    if host.cut_off:
        host.inbox.clear()
        cluster.reports = type(cluster.reports)(r for r in cluster.reports if r.agent != node)
    else:
        cluster.tell_agent(host, ag.CoordinatorReached())


@command(rf"{NODE} is drained: (?P<why>.+)")
def drained(cluster: Cluster, node: str, why: str) -> None:
    """Drain a node, as an operator does."""
    cluster.tell_agent(host_of(cluster, node), ag.Drained(why))


@command(rf"{NODE} is to leave for good: (?P<why>.+)")
def leaves(cluster: Cluster, node: str, why: str) -> None:
    """Drain a node and end its agent, as an operator does."""
    cluster.tell_agent(host_of(cluster, node), ag.Drained(why, leave=True))


@command(rf"{WORKER} is to move(?: to {NODE})?: (?P<why>.+)")
def moved(cluster: Cluster, worker: str, node: str | None, why: str) -> None:
    """Move a worker to another node, as an operator does."""
    process = process_of(cluster, worker)
    to = AgentId(node or "")
    leaving = Move(worker=process.worker, to=to, reason=why)
    cluster.tell_agent(process.host, ag.MoveAsked(leaving))


@command(rf"{NODE} is well again")
def well_again(cluster: Cluster, node: str) -> None:
    """Allow the use of a node again."""
    cluster.tell_agent(host_of(cluster, node), ag.Drained(""))


@command("the coordinator dies")
def coordinator_dies(cluster: Cluster) -> None:
    """Kill the coordinator: messages to it are lost; messages that it has sent arrive."""
    cluster.coordinator = None
    cluster.reports.clear()


@command("the coordinator comes back(?P<lost> without its journal)?")
def coordinator_back(cluster: Cluster, lost: str | None) -> None:
    """Start another coordinator, which the agents find."""
    cluster.start_coordinator(journal=lost is None)
    for host in cluster.hosts.values():
        if host.runs and not host.cut_off:
            cluster.tell_agent(host, ag.CoordinatorReached())


@command("the operator stops the job: (?P<why>.+)")
def stopped(cluster: Cluster, why: str) -> None:
    """End the job, as an operator does."""
    cluster.tell_coordinator(ce.StopRequested(why, saves=cluster.setting.step.saves.enabled))


ALL_COMMANDS = COMMANDS  # the commands of story_commands.py, and the commands above
