"""The commands of stories, in the domain's words; a pattern is a command's sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind, Topic
from holdfast.engine.core.policies import BackupPolicy, CoordinatorPolicy, ReplicationPolicy
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import AgentId, WorkerId
from story_cluster import ROUNDS_MAX, Cluster, Host, Machines, Process, Setting, StoryError
from story_text import merged, status_text, view_text

COMMANDS: dict[str, Callable[..., None]] = {}
WHO = r"(?P<who>all|workers? [\d, -]+): "
NODE = r"(?P<node>node\d+)"
WORKER = r"worker (?P<worker>\d+)"


def command(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function that carries a command out."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        COMMANDS[pattern] = function
        return function

    return register


# ---------------------------------------------------------------- who


def process_of(cluster: Cluster, worker: str) -> Process:
    process = cluster.processes.get(WorkerId(int(worker)))
    if process is None or not process.alive:
        raise StoryError(f"there is no worker {worker}")
    return process


def numbers_of(text: str) -> list[int]:
    found: list[int] = []
    for part in re.split(r"[ ,]+", text.strip()):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def named(cluster: Cluster, who: str) -> list[Process]:
    """Return the processes with these names, or for `all` every process that runs."""
    if who == "all":
        return [process for process in cluster.newest() if process.runs]
    found = [process_of(cluster, str(n)) for n in numbers_of(who.split(maxsplit=1)[1])]
    for process in found:
        if not process.runs:
            raise StoryError(f"{process.name} does nothing now")
    return found


def each_of(cluster: Cluster, who: str, act: Callable[[Process], bool], what: str) -> None:
    """Do something with each of these processes; fail if a process with a name cannot do it."""
    able = [process for process in named(cluster, who) if act(process) is not False]
    missing = [p.name for p in named(cluster, who) if p not in able and p.runs]
    if not able or (who != "all" and missing):
        raise StoryError(f"{', '.join(missing) or 'nobody'} {what}")


def host_of(cluster: Cluster, node: str) -> Host:
    host = cluster.hosts.get(AgentId(node))
    if host is None:
        raise StoryError(f"there is no {node}")
    return host


# ---------------------------------------------------------------- the job


OPTIONS = {
    r"at step (?P<n>\d+)": "at",
    r"on (?P<n>\d+) nodes?": "nodes",
    r"until (?P<n>\d+)": "until",
    r"at least (?P<n>\d+)": "least",
    r"saving every (?P<n>\d+)": "save",
    r"auditing all": "audit",
    r"comparing states": "compare",
    r"backup (?P<n>\d+)": "backup",
    r"minding who is late": "late",
    r"feeding": "feed",
    r"protecting every (?P<n>\d+)": "protect",
    r"(?P<n>\d+) processes each": "procs",
    r"spread over (?P<n>\d+) nodes": "spread",
    r"(?P<n>\d+) spares? on each node": "spares",
    r"(?P<n>\d+) hot spares? on each node": "hot",
}


def _options(text: str) -> dict[str, int]:
    found = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, match = next(
            ((name, m) for p, name in OPTIONS.items() if (m := re.fullmatch(p, each))), ("", None)
        )
        if match is None:
            raise StoryError(f"unknown option: {each}")
        found[name] = int(match.groupdict().get("n") or 1)
    return found


def begin(text: str, machines: Machines) -> Cluster:
    """Make the cluster of a story from its first command."""
    match = re.fullmatch(r"workers (\d+) virtual (\d+)(.*)", text)
    if match is None:
        raise StoryError("a story's first command is: workers N virtual V, and options")
    workers, virtual = int(match[1]), int(match[2])
    options = _options(match[3])
    setting = _setting(workers, virtual, options)
    cluster = Cluster(setting, machines)
    cluster.start_coordinator()
    for host in cluster.hosts.values():
        cluster.start_agent(host)
    if "at" in options:
        _run(cluster, options["at"])
    return cluster


def _setting(workers: int, virtual: int, options: dict[str, int]) -> Setting:
    nodes, late = options.get("nodes", workers), "late" in options
    save, compares = options.get("save", 0), "compare" in options
    policy = StepPolicy(
        audit=1.0 if "audit" in options else 0.0,
        cycle=1 if compares else 0,
        keeps=save > 0,
        balance=None,
        backup=BackupPolicy(workers=options.get("backup", 0)),
        patience=Patience(steps=2, copies=1.0) if late else Patience(steps=1 << 30),
        saves=SavePolicy(enabled=save > 0, every=save, compared=compares),
        replication=ReplicationPolicy(every=options.get("protect", 0)),
    )
    least = options.get("least", 1)
    coordinator = CoordinatorPolicy(
        virtual_ranks=virtual,
        nodes_min=nodes,
        workers_min=least,
        speculation=1.0 if late else 0.0,
        feeds="feed" in options,
        spares=options.get("spares", options.get("hot", 0)),
        hot_spares="hot" in options,
        procs=options.get("procs", 1),
        spread=options.get("spread", 1),
        redundancy=Redundancy(data=1, parity=1) if "protect" in options else Redundancy(),
    )
    return Setting(
        workers=workers,
        virtual=virtual,
        nodes=nodes,
        until=options.get("until", 100),
        coordinator=coordinator,
        step=policy,
    )


def _run(cluster: Cluster, target: int) -> None:
    """Run without faults until that number of steps is committed; show only the result."""
    for _ in range(ROUNDS_MAX):
        cluster.settle()
        if not sum(_goes_on(cluster, process, target) for process in cluster.newest()):
            break
    news = [
        ("coordinator", tuple(line for line in lines if not line.startswith(("journal:", "to "))))
        for who, lines in cluster.blocks
        if who == "coordinator"
    ]
    cluster.blocks = news
    show(cluster)
    members = [p for p in cluster.newest() if p.runs and p.machine.snapshot().view]
    if not members or any(p.machine.snapshot().committed < target for p in members):
        raise StoryError("\n".join(["they do not come so far:", *merged(cluster.blocks)]))


def _goes_on(cluster: Cluster, process: Process, target: int) -> bool:
    """Do the next thing that this worker waits for; False if there is none."""
    if not process.runs:
        return False
    if process.machine.snapshot().loop == 0:
        return _enter(cluster, process)
    if any(deliver(cluster, process) for deliver in _EXCHANGES.values()):
        return True
    if any(act(cluster, process) for act in (_keep, _apply, _copy, _write, _protect, _recall)):
        return True
    return process.machine.snapshot().committed < target and _compute(cluster, process)


@command("show")
def show(cluster: Cluster) -> None:
    """Show the status of every process and node."""
    view = cluster.view()
    if view is not None:
        cluster.blocks.append(("now", (view_text(view),)))
    for process in cluster.newest():
        state = "dead" if not process.alive else status_text(process.machine.snapshot())
        cluster.blocks.append((process.name, (state,)))
    for node, held in cluster.memories.held():
        cluster.blocks.append((node, (held,)))


@command(r"steps pass until (?P<target>\d+)")
def steps_pass(cluster: Cluster, target: str) -> None:
    """Run without faults until that number of steps is committed."""
    _run(cluster, int(target))


@command(r"(?P<seconds>[\d.]+) s pass(?P<silence> in silence)?")
def time_passes(cluster: Cluster, seconds: str, silence: str | None) -> None:
    """Advance the clock, and deliver control messages in that time unless there is silence."""
    cluster.wait(float(seconds), heard=silence is None)


# ---------------------------------------------------------------- control messages


@command("control settles")
def control_settles(cluster: Cluster) -> None:
    """Deliver all control messages, and the messages that follow from them."""
    cluster.settle()


@command(r"coordinator: reports")
def reports(cluster: Cluster) -> None:
    """Deliver all reports under way to the coordinator."""
    if not cluster.hear_reports():
        raise StoryError("no report is under way")
    cluster.review()


@command(rf"coordinator: report of {NODE}")
def report_of(cluster: Cluster, node: str) -> None:
    """Deliver the reports of a node to the coordinator."""
    if not cluster.hear_reports(host_of(cluster, node)):
        raise StoryError(f"no report of {node} is under way")
    cluster.review()


@command(rf"(?:nodes: directives|{NODE}: directive)")
def directives(cluster: Cluster, node: str | None) -> None:
    """Deliver the coordinator's directives to the agents."""
    hosts = [host_of(cluster, node)] if node else list(cluster.hosts.values())
    if not sum(cluster.hear_directives(host) for host in hosts):
        raise StoryError("no directive is under way")


@command(rf"(?:nodes: hear their workers|{NODE}: hears its workers)")
def workers_heard(cluster: Cluster, node: str | None) -> None:
    """Deliver the statuses of workers to their agents, and the ends of workers."""
    hosts = [host_of(cluster, node)] if node else list(cluster.hosts.values())
    if not sum(cluster.hear_workers(host) for host in hosts):
        raise StoryError("no worker has said anything")


@command(WHO + "directives?")
def directed(cluster: Cluster, who: str) -> None:
    """Deliver the directives of agents to their workers."""
    each_of(cluster, who, cluster.be_directed, "is told nothing")


# ---------------------------------------------------------------- exchanges


def _exchange(kind: str, events: Callable[[Cluster, Process], Iterator[ev.WorkerEvent]]) -> Any:
    """Return a function that delivers one exchange to a worker, once all members took part."""

    def deliver(cluster: Cluster, process: Process) -> bool:
        group = cluster.groups.get(process.work.view)
        if group is None or process.worker in group.closed:
            return False
        missing = group.missing(kind, process.worker)
        if missing is None or missing:
            return False
        for event in list(events(cluster, process)):
            cluster.feed(process, event)
        return True

    return deliver


def _connect(cluster: Cluster, process: Process) -> bool:
    """Start the group's work, once all its members are connected."""
    group = cluster.groups.get(process.work.view)
    if group is None or process.worker in group.closed or process.worker in group.connected:
        return False
    if not set(group.view.workers) <= group.here:
        return False
    group.connected.add(process.worker)
    cluster.feed(process, ev.Connected(group.view.number))
    return True


def _gathered(topic: Topic) -> Any:
    def events(cluster: Cluster, process: Process) -> Iterator[ev.WorkerEvent]:
        yield cluster.groups[process.work.view].gathered(topic, process.worker)

    return _exchange(topic.value, events)


def _summed(cluster: Cluster, process: Process) -> Iterator[ev.WorkerEvent]:
    group, compares = cluster.groups[process.work.view], cluster.setting.step.cycle > 0
    yield group.summed(process.worker, process.work, compares=compares)


def _checked(cluster: Cluster, process: Process) -> Iterator[ev.WorkerEvent]:
    yield cluster.groups[process.work.view].checked(process.worker)


def _compared(cluster: Cluster, process: Process) -> Iterator[ev.WorkerEvent]:
    yield from cluster.groups[process.work.view].compared(process.worker, process.work)


def _loaded(cluster: Cluster, process: Process) -> Iterator[ev.WorkerEvent]:
    group = cluster.groups[process.work.view]
    group.hear("checkpoint", process.worker)
    process.work.flipped = 0
    yield ev.Loading()
    yield ev.StateObtained(SourceKind.STORE, group.view.number)


def _missed(cluster: Cluster, process: Process) -> bool:
    group, step = cluster.groups.get(process.work.view), process.work.receiving
    if group is None or step is None or process.worker in group.closed:
        return False
    if group.sent.get(process.worker, []).count(step) < len(group.view.donors):
        return False
    process.work.receiving = None
    cluster.feed(process, ev.StepObtained(SourceKind.MEMBERS, group.view.number, step))
    return True


def _noted(cluster: Cluster, process: Process) -> bool:
    group = cluster.groups.get(process.work.view)
    notes = group.notes.pop(process.worker, []) if group is not None else []
    for note in notes:
        cluster.feed(process, note)
    return bool(notes)


_EXCHANGES: dict[str, Callable[[Cluster, Process], bool]] = {
    "group is built": _connect,
    "checkpoint is loaded": _exchange("checkpoint", _loaded),
    "states are compared": _exchange("states", _compared),
    "agreed": _gathered(Topic.AGREE),
    "missed step arrives": _missed,
    "hears? who is done": _noted,
    "hears? who counts": _noted,
    "buckets are summed": _exchange("sum", _summed),
    "audits are here": _gathered(Topic.AUDIT),
    "sums are checked": _exchange("check", _checked),
    "votes are here": _gathered(Topic.VOTE),
    "confessions are here": _gathered(Topic.REPORT_FAULT),
}


@command(WHO + f"(?P<what>{'|'.join(_EXCHANGES)})")
def exchanged(cluster: Cluster, who: str, what: str) -> None:
    """Hand an exchange on."""
    deliver = next(each for name, each in _EXCHANGES.items() if re.fullmatch(name, what))
    each_of(cluster, who, lambda process: deliver(cluster, process), "cannot hear that yet")


@command("the view begins")
def view_begins(cluster: Cluster) -> None:
    """Build the groups, compare the states, and let the members agree."""
    names = ("group is built", "checkpoint is loaded", "states are compared", "agreed")
    before = len(cluster.blocks)
    for name in names:
        for process in cluster.newest():
            _EXCHANGES[name](cluster, process)
    if len(cluster.blocks) == before:
        raise StoryError("there is no group to be built")


# ---------------------------------------------------------------- scripts


def _enter(cluster: Cluster, process: Process) -> bool:
    status = process.machine.snapshot()
    if status.loop and not process.work.left:
        return False
    process.work.left = False
    if cluster.setting.coordinator.feeds:
        cluster.feed(process, ev.Reachable(f"address{process.worker}"))
    cluster.feed(process, ev.LoopEntered())
    cluster.feed(process, ev.AtBoundary())
    return True


def _compute(cluster: Cluster, process: Process, vrank: int | None = None) -> bool:
    """Finish the tasks under way, or the one of a virtual rank."""
    found = False
    while isinstance(task := process.work.doing, ef.Compute):
        if vrank is not None and (found or task.vrank != vrank):
            break
        found = True
        done = process.work.computed(task)
        for event in [done] if done is not None else []:
            cluster.feed(process, event)
        if done is None:
            cluster.go_on(process)
    return found


def _apply(cluster: Cluster, process: Process) -> bool:
    commit = process.work.doing
    if not isinstance(commit, ef.Commit):
        return False
    process.work.doing, process.work.open_step = None, -1
    if commit.step + 1 >= process.until:
        cluster.feed(process, ev.LoopFinishing())
        cluster.feed(process, ev.LoopEnded())
    else:
        cluster.feed(process, ev.AtBoundary())
    return True


def _copy(cluster: Cluster, process: Process) -> bool:
    save = process.work.doing
    if not isinstance(save, ef.CopyState):
        return False
    process.work.doing = None
    if save.sink is SinkKind.FOLLOWERS:
        cluster.feeds.copied(process.worker, save)
        process.work.copied = save.step
    elif save.sink is SinkKind.MEMORY:
        cluster.memories.copied(process.worker, save)
    else:
        process.work.saving.append((save.step, save.view))
    order = save.order.number if save.order is not None else 0
    cluster.feed(process, ev.StateCopied(save.sink, save.step, order=order))
    return True


def _keep(cluster: Cluster, process: Process) -> bool:
    view = process.machine.view
    event = cluster.memories.keep_step(process.worker, view) if view is not None else None
    if event is not None:
        cluster.feed(process, event)
    return event is not None


def _protect(cluster: Cluster, process: Process) -> bool:
    event = cluster.memories.keep_state(process.worker, process.work.flipped)
    if event is not None:
        cluster.feed(process, event)
    return event is not None


def _recall(cluster: Cluster, process: Process) -> bool:
    view = process.machine.view
    events = cluster.memories.read(process.worker, view) if view is not None else []
    for event in events:
        cluster.feed(process, event)
    return bool(events)


def _be_fed(cluster: Cluster, process: Process) -> bool:
    event = cluster.feeds.arrives(process.worker)
    if event is not None:
        cluster.feed(process, event)
    return event is not None


def _load(cluster: Cluster, process: Process) -> bool:
    events = cluster.feeds.loaded(process.worker)
    for event in events:
        cluster.feed(process, event)
    return bool(events)


def _write(cluster: Cluster, process: Process) -> bool:
    """Write one share; the first member's writer waits for all other shares."""
    if not process.work.saving:
        return False
    step, view = process.work.saving[0]
    rank, written = view.rank(process.worker), cluster.shares.setdefault((step, view.number), set())
    if rank == 0 and written != set(range(1, len(view.members))):
        return False
    process.work.saving.pop(0)
    written.add(rank)
    event = ev.SaveEnded(step, view.number, durable=rank == 0, took_s=0.5, first=rank == 0)
    cluster.feed(process, event)
    return True


_DOINGS: dict[str, tuple[Callable[[Cluster, Process], bool], str]] = {
    "tasks are done": (_compute, "computes nothing"),
    "pieces of the step are kept": (_keep, "keeps no step"),  # the pieces in the nodes' memory
    "pieces of the state are kept": (_protect, "keeps no state"),
    "pieces are read": (_recall, "reads nothing"),  # the state, or a gradient, is decoded from them
    "(?:is|are) fed": (_be_fed, "is sent nothing yet"),  # the shares of the state, or of a step
    "the state is loaded": (_load, "loads no state"),  # the state that it was fed
    "step is applied": (_apply, "applies nothing"),
    "shares are copied": (_copy, "copies nothing"),
}


def _register_doings() -> None:
    """Register a command for each thing that scripts and their helpers do."""
    for phrase, (act, complaint) in _DOINGS.items():

        def carry_out(
            cluster: Cluster, who: str, act: Any = act, complaint: str = complaint
        ) -> None:
            each_of(cluster, who, lambda process: act(cluster, process), complaint)

        command(WHO + phrase)(carry_out)


_register_doings()


@command(WHO + "enters? (?:its|their) loops?(?: until (?P<until>\\d+))?")
def entered(cluster: Cluster, who: str, until: str | None) -> None:
    """Make scripts enter their loops and ask for steps."""
    for process in named(cluster, who):
        process.until = int(until or process.until)
    each_of(cluster, who, lambda process: _enter(cluster, process), "is in its loop")


@command(WORKER + r": task of virtual rank (?P<vrank>\d+) is done")
def task_done(cluster: Cluster, worker: str, vrank: str) -> None:
    """Finish a task of a worker's script."""
    if not _compute(cluster, process_of(cluster, worker), int(vrank)):
        raise StoryError(f"worker {worker} does not compute that")


@command(WHO + "shares are written")
def written(cluster: Cluster, who: str) -> None:
    """Write the shares; the share of the first member comes last."""
    found = [process for process in reversed(named(cluster, who)) if _write(cluster, process)]
    if not found:
        raise StoryError("no share can be written")


@command(WHO + "leaves? the loop")
def left(cluster: Cluster, who: str) -> None:
    """Make the scripts of released workers leave the step."""

    def leave(process: Process) -> bool:
        if not isinstance(process.work.doing, ef.Release):
            return False
        process.work.doing, process.work.left = None, True
        return True

    each_of(cluster, who, leave, "is not released")


@command(WHO + "scripts? ends?(?P<wrongly> with an error)?")
def script_ends(cluster: Cluster, who: str, wrongly: str | None) -> None:
    """End the scripts of these processes on their own."""
    for process in named(cluster, who):
        cluster.end(process, 1 if wrongly else 0, "ValueError" if wrongly else "")
