"""Puts a worker together: makes its parts and connects them.

Effects that concern several parts are carried out here, at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import (
    EventNoted,
    HeirsSeen,
    Loading,
    Reachable,
    SinkKind,
    SourceKind,
    StateLost,
)
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.policies import ReplicationPolicy
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import Peer, WorkerId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.plugins import find_service
from holdfast.engine.state.memory.arena import PieceArena
from holdfast.engine.state.memory.pieces import PiecePost
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.sharded_optimizers import GatheredState, ShardedOptimizers
from holdfast.engine.train.checkpoint.state import PROTECTED_AS, Capture
from holdfast.engine.train.data.data_workers import protect_data_workers
from holdfast.engine.train.exchange.gpu_transport import (
    DeviceCopies,
    GpuTransport,
    HostRooms,
    gpu_id_of,
)
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tcp_transport import TcpListener, TcpTransport
from holdfast.engine.train.process_settings import (
    advice,
    check_torch,
    prepare_scalers,
    write_kernels_whole,
)
from holdfast.engine.train.script.environment import WorkerEnvironment, kind_of_processor
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder
from holdfast.engine.train.script.optimizer_watch import OptimizerWatch
from holdfast.engine.train.script.rank_states import RankStates, StateCosts
from holdfast.engine.train.script.script_guard import ScriptGuard, compose_guard
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.script.script_thread import ScriptThread
from holdfast.engine.train.script.service_link import HostedService, ServiceLink
from holdfast.engine.train.script.step_runner import StepRunner, TaskRunner
from holdfast.engine.train.shards.inner_group import LOOPBACK, InnerGroup
from holdfast.engine.train.shards.shard_links import (
    FollowingLink,
    FollowingMachine,
    LeadingShard,
    Meeting,
    ShardChannel,
)
from holdfast.engine.train.state.fed_receiver import FedReceiver
from holdfast.engine.train.state.feeder import Feeder
from holdfast.engine.train.state.replicator import PieceTarget, Recalling, Replicator
from holdfast.engine.train.state.restorer import NoStore, Restorer
from holdfast.engine.train.state.saver import Saver, WriterLink, say
from holdfast.engine.train.state.step_image import MissedSteps
from holdfast.engine.train.step.agent_link import AgentLink, SoloLink
from holdfast.engine.train.step.buckets import FilledBuckets
from holdfast.engine.train.step.driver import Driver, Link, Monitor
from holdfast.engine.train.step.engine import Engine, Exchange
from holdfast.engine.train.step.gradient_digest import TaskDigest
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.mover import StateMover, StateSink, StateSource
from holdfast.engine.train.step.step_data import StepData
from holdfast.engine.train.step.step_table import Buffers, StepTable
from holdfast.engine.train.step.time_sheet import TaskClock, TimeSheet
from holdfast.engine.train.step.trained import Named
from holdfast.engine.train.torch_groups import find_store, open_store

NCCL_IN_THE_CLEAR = "--tls does not encrypt what GPUs exchange by NCCL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Connects a worker to its job, before there is anything to train."""

    environment: WorkerEnvironment
    seed: int
    driver: Driver
    link: AgentLink | SoloLink | FollowingLink | Link
    #: Connects the worker's processes, if there are several.
    inner: InnerGroup | None = None
    # None: chosen by the device of the parameters
    make_transport: Callable[[], Transport] | None = None


def step_policy(spec: JobSpec, seed: int, *, writes: bool) -> StepPolicy:
    """Return the settings of a job that matter within a step; `writes`: there is a writer here."""
    silent, saves, backup = spec.silent_errors, spec.checkpoints, spec.backup()
    return StepPolicy(
        seed=seed,
        audit=silent.audit,
        audit_tolerance=silent.audit_tolerance,
        cycle=silent.fingerprint_steps,
        keeps=bool(saves.store),
        # The time of dropped tasks is unknown.
        balance=BalancePolicy() if spec.stragglers.rebalance and not backup.workers else None,
        backup=backup,
        patience=Patience(copies=0.0 if backup.workers else spec.copies),
        saves=SavePolicy(
            enabled=bool(saves.store) and writes,
            every=saves.every or 0,
            pace=spec.pace(),
            compared=silent.fingerprint_steps > 0,
        ),
        restore_s=spec.nodes.abandon_s,
        replication=ReplicationPolicy(
            redundancy=spec.redundancy(),
            every=spec.memory.every or 0,
            is_sharded=spec.workers.shard_optimizer,
        ),
        script_cycle=silent.fingerprint_steps,
        processor=kind_of_processor(),
    )


def compose_control(environment: WorkerEnvironment, seed: int, fd: int | None) -> Control:
    """Connect to the agent, if there is one (`fd`), and answer it from now on."""
    me = environment
    protect_data_workers()
    channels = [ShardChannel(socket.socket(fileno=each)) for each in me.shard_fds]
    if me.shard:
        return _compose_following(me, seed, channels[0], fd)
    times = TimeSheet.of_process(me.run_dir, me.worker, me.incarnation, me.host)
    policy = step_policy(me.spec, seed, writes=me.orders_fd is not None)
    machine = WorkerMachine(me.worker, me.incarnation, policy)
    if fd is None:
        solo = SoloLink(me.worker, me.spec.virtual_ranks)
        driver = Driver(machine, solo, Monitor(), times=times)
        return Control(environment=me, seed=seed, driver=driver, link=solo)
    link = AgentLink(socket.socket(fileno=fd), me.worker)
    if not channels:
        driver = Driver(machine, link, Monitor(), times=times)
        link.start(driver)
        return Control(environment=me, seed=seed, driver=driver, link=link)
    host = me.host if me.spec.workers.spread > 1 else LOOPBACK
    store = open_store(host)
    for channel in channels:
        channel.send(Meeting(host, store.port))
    leading = LeadingShard(me.worker, channels, link)
    driver = Driver(machine, link, Monitor(), leading, times)
    link.start(driver)  # the agent is answered while the processes meet
    inner = InnerGroup(0, len(channels) + 1, store, host)
    leading.start(driver)
    return Control(environment=me, seed=seed, driver=driver, link=link, inner=inner)


def _compose_following(
    me: WorkerEnvironment, seed: int, channel: ShardChannel, fd: int | None
) -> Control:
    """Connect to the worker's process of shard 0, in which its machine is."""
    meeting = channel.receive_first(Meeting)
    host = me.host if me.spec.workers.spread > 1 else LOOPBACK
    store = find_store(meeting.host, meeting.port)
    inner = InnerGroup(me.shard, me.spec.workers.procs, store, host)
    machine = FollowingMachine(me.worker, me.incarnation, channel)
    agent = None if fd is None else socket.socket(fileno=fd)
    link = FollowingLink(channel, machine, me.shard, agent)
    driver = Driver(machine, link, Monitor())
    link.start(driver)
    return Control(environment=me, seed=seed, driver=driver, link=link, inner=inner)


def compose_progress(control: Control) -> ScriptState:
    """Return the progress of a script at its first line."""
    driver = control.driver

    def note(text: str) -> None:
        if driver.leads:
            driver.post(EventNoted("script", text))

    return ScriptState(RankStates(StateCosts(driver.times, note)))


def _sharding(control: Control, protected: Mapping[str, Any]) -> ShardedOptimizers | None:
    """Return the part that shares out the optimizers' state; None if each worker keeps all."""
    if not control.environment.spec.workers.shard_optimizer:
        return None

    def wait_for_end() -> None:
        while True:  # the control plane has this process ended
            control.driver.next_for_script()

    return ShardedOptimizers(protected, wait_for_end)


def _saver(
    control: Control,
    protected: Mapping[str, Any],
    buffers: Buffers,
    fingerprint_whole: Callable[[], int],
    capture: Capture | None,
    service: HostedService,
) -> Saver:
    """Return the part that saves this worker's shares; it refuses without a store or a writer."""
    me, driver, writer = control.environment, control.driver, None
    if me.spec.checkpoints.store and me.orders_fd is not None:
        orders = socket.socket(fileno=me.orders_fd)
        writer = WriterLink(orders, me.spec.job, Peer(me.worker, me.shard), me.spec.workers.procs)

    def fingerprint_at_rest() -> int:
        buffers.remember()
        return fingerprint_whole()

    return Saver(writer, protected, driver.post, fingerprint_at_rest, capture, service.save)


def _replicator(
    control: Control,
    identity: PeerIdentity,
    protected: Mapping[str, Any],
    data: StepData,
    capture: Capture | None,
) -> Replicator | None:
    """Return the part that puts pieces into the node's memory; None without redundancy."""
    me, driver = control.environment, control.driver
    redundancy = me.spec.redundancy()
    if not redundancy.data or not me.memory_fds:
        return None
    procs, spread = me.spec.workers.procs, me.spec.workers.spread
    here = procs // spread  # this worker's processes on this node
    share = me.memory_bytes // (me.spec.workers.nproc * here)
    arena = PieceArena(me.memory_fds[me.shard % here], me.worker, share)
    post = None
    if spread > 1 and control.inner is not None:
        post = PiecePost(arena, identity)
        post.meet(control.inner.exchange_texts("pieces", post.listen(me.host)))
    target = PieceTarget(
        arena=arena, worker=me.worker, shard=me.shard, procs=procs, spread=spread, post=post
    )
    return Replicator(target, redundancy, protected, data, driver.post, driver.fail, capture)


def _store_source(
    me: WorkerEnvironment, loaded: LoadedState, loading: Callable[[], None], service: HostedService
) -> StateSource:
    """Return the reader of the job's checkpoints, which refuses without a store."""
    if not (where := me.spec.checkpoints.store):
        return NoStore()
    store, procs = Checkpoints(open_storage(where, say), say), me.spec.workers.procs
    return Restorer(store, loaded, loading, service.note_checkpoint, me.shard, procs)


def _mover(
    control: Control,
    protected: Mapping[str, Any],
    data: StepData,
    guard: ScriptGuard,
    saver: Saver,
    receiver: FedReceiver,
    replicator: Replicator | None,
    service: HostedService,
) -> StateMover:
    """Return the mover of this worker's states, with all sources and sinks."""
    me, driver, loaded = control.environment, control.driver, guard.loaded
    identity, rate = me.identity(), me.spec.nodes.join_rate * 1e6
    loading, post, missed = partial(driver.post, Loading()), driver.post, MissedSteps(data)
    process, redundancy = Peer(me.worker, me.shard), me.spec.redundancy()
    compares = guard.fingerprints.cycle > 0
    sources: dict[SourceKind, StateSource] = {
        SourceKind.STORE: _store_source(me, loaded, loading, service),
        SourceKind.MEMORY: Recalling(process, data, loaded, identity, redundancy, loading, post),
        SourceKind.MEMBERS: missed,
        SourceKind.FEED: receiver,
    }
    sinks: dict[SinkKind, StateSink] = {
        SinkKind.FOLLOWERS: Feeder(
            me.worker, protected, data, post, identity, rate, compares=compares
        ),
        SinkKind.STORE: saver,
        SinkKind.LATE: missed,
    }
    if replicator is not None:
        sinks[SinkKind.MEMORY] = replicator
    return StateMover(sources, sinks, loaded, loading)


def _step_data(
    control: Control,
    guard: ScriptGuard,
    progress: ScriptState,
    trained: Sequence[Named],
    sharding: ShardedOptimizers | None,
) -> tuple[StepData, FilledBuckets]:
    """Return the data of a step, and the queue that hands full buckets to the engine."""
    monitor, count = control.driver.monitor, control.environment.spec.virtual_ranks
    cycle = control.environment.spec.silent_errors.digest_steps
    filled, digest = FilledBuckets(monitor), TaskDigest(cycle)
    by_row = progress.row_updates.group(progress.trained.row_parameters())
    gradients = Gradients(trained, count, monitor, filled.note, digest.note, by_row)
    gradients.attach()
    clock = TaskClock(next((p.device for _, p in trained if p.is_cuda), None))
    table = StepTable(count, len(gradients.used))
    buffers = Buffers(guard.modules)
    return StepData(gradients, table, buffers, clock, digest, guard.attributes, sharding), filled


def _transport_maker(
    host: str, identity: PeerIdentity, gpu: torch.device | None
) -> Callable[[], Transport]:
    """Return a function that makes a view's transport, for parameters on this GPU or the host."""
    listener = TcpListener(host, identity)
    if gpu is None:
        return lambda: TcpTransport(listener)
    rooms, gpu_id = HostRooms(DeviceCopies(gpu)), gpu_id_of(gpu)
    return lambda: GpuTransport(TcpTransport(listener), gpu, rooms, gpu_id)


def _connect_service(
    control: Control, protected: Mapping[str, Any], progress: ScriptState, script: ScriptThread
) -> None:
    """Connect the script with the servers of the job's hosted service, if there are any."""
    settings = control.environment.spec.servers
    if not settings.count:
        return
    me, driver, link = control.environment, control.driver, control.link

    def find_address(number: int) -> str:
        return link.servers.get(number, "") if isinstance(link, AgentLink) else ""

    def find_heir(number: int) -> str:
        return link.heirs.get(number, "") if isinstance(link, AgentLink) else ""

    def find_part() -> tuple[int, int] | None:
        view = driver.view
        if view is None or view.member(WorkerId(me.worker)) is None:
            return None
        return view.rank(WorkerId(me.worker)), len(view.members)

    def lose(why: str) -> NoReturn:
        driver.post(EventNoted(settings.service, why))
        driver.post(StateLost())
        while True:
            driver.next_for_script()

    def can_write() -> bool:
        # A worker that joins runs lines between loops and above an epoch's first step again.
        return script.is_yielding and not script.epoch_start.is_above

    known = link.layout if isinstance(link, AgentLink) else None
    client = find_service(settings.service).connect(
        ServiceLink(
            settings=settings,
            identity=me.identity(),
            layout=known or ServerLayout(count=settings.count, goal=settings.count),
            find_address=find_address,
            find_heir=find_heir,
            find_part=find_part,
            report=lambda *found: driver.post(HeirsSeen(*found)),
            lose=lose,
            note=lambda text: driver.post(EventNoted(settings.service, text)),
            is_in_step=lambda: script.steps.is_open,
            can_write=can_write,
        ),
        protected,
    )
    if isinstance(link, AgentLink):
        link.note_layout = client.change_layout
        if link.layout is not None:
            client.change_layout(link.layout)
    progress.service.use(client)


def _check_is_trained(trained: Collection[object], protected: Mapping[str, Any]) -> None:
    # Some optimizers update frozen parameters, whose gradients are not the job's to sum.
    if not trained and not any(getattr(o, "trains_frozen", False) for o in protected.values()):
        raise UserError("nothing to train: protect a torch.nn.Module with parameters")


def _check_process(
    control: Control,
    modules: list[tuple[str, torch.nn.Module]],
    trained: list[tuple[str, torch.nn.Parameter]],
) -> None:
    """Check the process's settings, and make those that a worker needs. UserError."""
    me, driver = control.environment, control.driver
    if me.worker == 0 and (text := advice(dict(modules))):
        driver.post(EventNoted("compiled", text))
    is_joined = control.inner is not None
    check_torch(modules, trained, me.spec.workers.procs, is_joined=is_joined, post=driver.post)
    prepare_scalers()
    write_kernels_whole()


def _guard(
    control: Control,
    protected: Mapping[str, Any],
    progress: ScriptState,
    sharding: ShardedOptimizers | None,
) -> ScriptGuard:
    return compose_guard(
        control.driver,
        control.environment.spec,
        protected,
        progress,
        sharding,
        owns_process=isinstance(control.link, AgentLink | SoloLink | FollowingLink),
        is_alone=isinstance(control.link, SoloLink),
    )


def compose_worker(
    control: Control, protected: Mapping[str, Any], progress: ScriptState
) -> ScriptThread:
    """Put together the parts that train the protected objects, and start the engine. UserError."""
    protected = {**protected, PROTECTED_AS: progress}
    me, spec, driver = control.environment, control.environment.spec, control.driver
    identity = me.identity()
    backs_up = bool(spec.backup().workers)
    modules = [(n, o) for n, o in protected.items() if isinstance(o, torch.nn.Module)]
    trained = progress.trained.watch(dict(modules))
    _check_is_trained(trained, protected)
    devices = [p.device for _, p in trained if p.is_cuda]
    _check_process(control, modules, trained)
    sharding = _sharding(control, protected)
    is_alone = isinstance(control.link, SoloLink)
    guard = _guard(control, protected, progress, sharding)
    data, filled = _step_data(control, guard, progress, trained, sharding)
    capture = GatheredState(sharding).capture if sharding is not None else None
    # The process of shard 0 writes the worker's ledger.
    recorder = LedgerRecorder(replace(me, run_dir=None) if me.shard else me, control.seed, driver)
    receiver = FedReceiver(data, guard.loaded, driver.post, driver.fail, identity)
    if me.tls is not None and devices and (me.worker, me.shard, me.incarnation) == (0, 0, 1):
        driver.post(EventNoted("tls", NCCL_IN_THE_CLEAR))
    make_transport = _transport_maker(me.host, identity, devices[0] if devices else None)

    def fingerprint_whole() -> int:
        return guard.fingerprints.take_all(data.buffers.start)

    exchange = Exchange(
        me=Peer(me.worker, me.shard),
        make_transport=control.make_transport or make_transport,
        fingerprint=fingerprint_whole,
        describe=lambda: guard.comparison.describe(data.buffers.start),
        backs_up=backs_up,
    )
    service = progress.service
    saver = _saver(control, protected, data.buffers, fingerprint_whole, capture, service)
    replicator = _replicator(control, identity, protected, data, capture)
    mover = _mover(control, protected, data, guard, saver, receiver, replicator, service)
    engine = Engine(driver, control.link, data, filled, mover, exchange, recorder.doubt)
    driver.serve(engine)
    runner = TaskRunner(driver, data, backs_up, control.inner, guard.files)
    engine.start()
    if isinstance(control.link, SoloLink):
        control.link.start(driver)
    steps = StepRunner(driver, data, runner, guard, mover, recorder, progress)
    script = ScriptThread(driver, data, steps, mover)
    large = sum(p.nbytes for _, p in trained) > spec.nodes.join_pause * 1e6
    can_join_fed = spec.nodes.join_rate and spec.workers.procs == 1 and sharding is None
    if can_join_fed and large and not is_alone:
        driver.post(Reachable(receiver.listen(me.host)))
    _connect_service(control, protected, progress, script)
    OptimizerWatch(protected, lambda: steps.is_open, progress.row_updates, sharding).start()
    return script
