"""Finds faults of a job's settings, in sentences that name the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import SERVERS_MAX, SETTINGS, JobSpec
from holdfast.engine.core.settings import Setting, format_value, text_complaint

JOB_BYTES_MAX = 32  # a job's name is a field of fixed size in every greeting

Naming = Callable[[Setting, object], str]  # a setting with its value, as the reader wrote it

SPREAD_STAYS = (  # why a worker is not moved
    "a worker that is spread over several nodes is not moved by itself: drain one of its nodes "
    "(holdfast drain NODE), and a node that waits takes its place"
)


def as_flag(setting: Setting, value: object) -> str:
    """Name a setting as the command line does: `--nproc 4`."""
    return setting.flag if value is True else f"{setting.flag} {format_value(value)}"


def as_key(setting: Setting, value: object) -> str:
    """Name a setting as the job document does: `workers.nproc = 4`."""
    return f"{setting.key} = {format_value(value)}"


def find_problem(spec: JobSpec, name: Naming = as_key) -> str:
    """Return the fault of a job, in a sentence that names the remedy; empty: none."""
    return next(_problems(spec, name), "")


def _problems(spec: JobSpec, name: Naming) -> Iterator[str]:
    texts = {"job": (spec.job,), "cwd": (spec.cwd,), "script": (spec.script,), "args": spec.args}
    for key, values in texts.items():
        for text in values:
            if complaint := text_complaint(text):
                yield f"{key} {text!r} {complaint}"
    if len(spec.job.encode(errors="replace")) > JOB_BYTES_MAX:
        yield f"job {spec.job!r} must be at most {JOB_BYTES_MAX} bytes long"
    for each in SETTINGS.values():
        value = each.value_in(spec)
        if complaint := each.complaint(value):
            yield f"{name(each, value)} {complaint}"
    yield from _conflicts(spec, lambda key: name(SETTINGS[key], SETTINGS[key].value_in(spec)))


def _conflicts(spec: JobSpec, say: Callable[[str], str]) -> Iterator[str]:
    """Find settings that contradict each other; `say(key)` names one with its value."""
    workers, nodes, at_start = spec.workers, spec.nodes, spec.workers_at_start
    yield from _spread_conflicts(spec, say)
    if spec.nodes_max < nodes.min:
        yield f"{say('nodes.max')} must be at least {say('nodes.min')}"
    if spec.virtual_ranks < at_start:
        few = say("workers.nproc")
        if nodes.min > 1:
            few = f"the {at_start} workers of {few} and {say('nodes.min')}"
        yield (
            f"{say('workers.virtual')} is smaller than {few}: every worker needs a virtual rank, "
            "so use more virtual ranks or fewer workers"
        )
    if workers.min > workers.nproc * spec.nodes_max:
        most = workers.nproc * spec.nodes_max
        yield f"{say('workers.min')} must be from 1 to {most}, as many as there can be workers"
    if nodes.abandon_s < 2 * nodes.lease_s:
        yield f"{say('nodes.abandon_s')} must be at least twice {say('nodes.lease_s')}"
    least_s, most_s = spec.checkpoints.between_s
    if least_s > most_s:
        between = say("checkpoints.between_s")
        yield f"{between}: the shortest time must not be greater than the longest"
    backup = spec.stragglers.backup
    if not 0 <= backup < at_start:
        yield (
            f"{say('stragglers.backup')} must be from 0 to {at_start - 1}: a step of {at_start} "
            "workers needs the result of one at least"
        )
    yield from _optimizer_conflicts(spec, say)
    yield from _server_conflicts(spec, say)
    try:
        pieces = spec.redundancy().pieces
    except UserError as error:
        yield f"{say('memory.redundancy')} {error}"
        pieces = 0
    if pieces > spec.nodes_max:
        yield (
            f"{say('memory.redundancy')} needs {pieces} nodes, one for each piece, and at most "
            f"{spec.nodes_max} take part: allow more with --nodes-max, or use fewer pieces"
        )
    if workers.hot_spares and workers.spares == 0:
        yield f"{say('workers.hot_spares')} needs spares: say how many with --spares"
    if workers.hot_spares and backup:
        yield (
            f"{say('workers.hot_spares')} and {say('stragglers.backup')} exclude each other: set "
            "one of them to 0, or leave it out"
        )
    if backup and spec.silent_errors.audit:
        yield (
            f"{say('stragglers.backup')} and {say('silent_errors.audit')} exclude each other: "
            "dropped results cannot be compared, so set one of them to 0"
        )


def _spread_conflicts(spec: JobSpec, say: Callable[[str], str]) -> Iterator[str]:
    workers, spread = spec.workers, spec.workers.spread
    if spread == 1:
        return
    flag = say("workers.spread")
    if workers.procs % spread:
        yield (
            f"{say('workers.procs')} is no multiple of {flag}: each node runs the same number of a "
            "worker's processes"
        )
    for key, value in (("nodes.min", spec.nodes.min), ("nodes.max", spec.nodes_max)):
        if value % spread:
            yield (
                f"{say(key)} is no multiple of {flag}: nodes that are too few for a worker would "
                "wait for others"
            )
    if workers.spares != 0:
        yield (
            f"{flag} and {say('workers.spares')} exclude each other: nodes beyond --nodes-max wait "
            "until one is lost, and take its place"
        )


def _optimizer_conflicts(spec: JobSpec, say: Callable[[str], str]) -> Iterator[str]:
    workers = spec.workers
    if not workers.shard_optimizer:
        return
    flag = say("workers.shard_optimizer")
    if spec.memory.redundancy == "none" and not spec.checkpoints.store:
        yield (
            f"{flag} needs --redundancy, or at least --store: no worker holds all of the state, so "
            "that without them the loss of any one would cost all steps"
        )
    if workers.procs > 1:
        yield (
            f"{flag} and {say('workers.procs')} exclude each other: what fully_shard shards within "
            "a worker, optimizer included, is sharded already"
        )
    for key in ("workers.hot_spares", "stragglers.backup"):
        if SETTINGS[key].value_in(spec):
            yield (
                f"{flag} and {say(key)} exclude each other: every step needs every worker's share "
                "of the optimizer's state"
            )


def _server_conflicts(spec: JobSpec, say: Callable[[str], str]) -> Iterator[str]:
    count = spec.servers.count
    if not count:
        for name in ("replicas", "staleness", "copy_rate", "service"):
            key = f"servers.{name}"
            if SETTINGS[key].value_in(spec) != SETTINGS[key].default:
                yield f"{say(key)} needs servers: say how many with --servers"
        return
    if spec.servers.replicas > count:
        yield (
            f"{say('servers.replicas')} is greater than {say('servers.count')}: each replica "
            "of a row needs its own server, so use more servers or fewer replicas"
        )
    for key in ("workers.procs", "stragglers.backup"):
        if SETTINGS[key].value_in(spec) != SETTINGS[key].default:
            yield (
                f"{say('servers.count')} and {say(key)} exclude each other: leave one of them out"
            )


def find_scale_problem(spec: JobSpec, servers: int) -> str:
    """Return why a running job's service cannot be on this number of servers; "": they can."""
    replicas = spec.servers.replicas
    if not spec.servers.count:
        return (
            "this job has no servers: each worker holds all rows of tables, so there is nothing to "
            "scale; begin a job with --servers"
        )
    if servers < replicas:
        return (
            f"--servers {servers} is too few: each row is on {replicas} servers (--replicas), so "
            f"ask for {replicas} or more"
        )
    if servers > SERVERS_MAX:
        return f"--servers {servers} is too many: ask for {SERVERS_MAX} or fewer"
    return ""


_HEEDED = frozenset(  # with --compat
    {
        *("workers.nproc", "workers.seed", "workers.threads", "workers.hang_s"),
        *("nodes.min", "nodes.max", "nodes.election", "nodes.lease_s", "nodes.abandon_s"),
    }
)


def find_unheeded(spec: JobSpec, name: Naming) -> str:
    """Name a setting that a script for torchrun, or any other, has no use for; empty: none."""
    compat = spec.compat.enabled
    flag = SETTINGS["compat.enabled"].flag
    for each in SETTINGS.values():
        value = each.value_in(spec)
        if value == each.default or (each.section == "compat") == compat:
            continue
        if not compat:
            return f"{name(each, value)} has an effect only with {flag}: add that, or leave it out"
        if each.key not in _HEEDED:
            return (
                f"{name(each, value)} has no effect with {flag}: leave it out, or let the script "
                "call holdfast.join()"
            )
    return ""
