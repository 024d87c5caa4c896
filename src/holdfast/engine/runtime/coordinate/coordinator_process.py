"""Runs the coordinator process: who it is, when it may act, and how it ends.

  python -m holdfast.engine.runtime.coordinate.coordinator_process RUN_DIR LISTEN_FD PARENT_PID ...

It listens on a socket that it inherits, so that a restarted coordinator has the same address. Alone
it keeps its journal in the run directory; with an election it first stands by until it leads, and
its journal is in etcd.

Exit status: 0 the job succeeded, 1 it failed (the reason is in result.json) or cannot be run as
asked, DEPOSED (or SIGALRM) it led the job and does no longer; anything else is a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from holdfast.engine.core.errors import Deposed, HoldfastError, WorldError
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership import coordinator as machine
from holdfast.engine.core.membership.group import GroupMachine
from holdfast.engine.host.lifetime import Orders, die_with_parent
from holdfast.engine.net.channel import connect
from holdfast.engine.net.descriptors import raise_limit
from holdfast.engine.net.secret import load_secret
from holdfast.engine.net.standard_streams import RareLines, print_line
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.coordinate.coordinator_server import (
    CRASHED,
    CoordinatorServer,
    CoordinatorSetup,
    leave,
)
from holdfast.engine.runtime.leadership.election import (
    Election,
    EtcdJournal,
    Leader,
    Leadership,
    open_election,
)
from holdfast.engine.runtime.leadership.journal import DEPOSED, FileJournal, Loaded, PatientJournal
from holdfast.engine.runtime.outlet import flush_outlets, free_output
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import StopRequest

LOOK_S = 0.5  # between two looks at the other coordinators
START_S = 120.0  # to reach etcd at first; later on it may be away for as long as it likes


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    die_with_parent(options.parent_pid)
    raise_limit()
    orders = Orders.receive()
    listener = socket.socket(fileno=options.listen_fd)
    host = options.host or listener.getsockname()[0]
    run_dir = RunDir(options.run_dir)
    free_output(str(run_dir.events))
    try:
        secret = load_secret(os.environ, file=options.secret_file, run_dir=run_dir.path)
        setup = CoordinatorSetup(
            run_dir=run_dir, secret=secret, listener=listener, host=host, tls=options.tls
        )
        if options.election is None:
            return 1 if asyncio.run(work_alone(setup, orders, options.resume)) else 0
        return Candidate(open_election(options.election), setup, orders, options.guest).run()
    except HoldfastError as error:
        leave(error)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m holdfast.engine.runtime.coordinate.coordinator_process"
    )
    found.add_argument("run_dir", type=Path)
    found.add_argument("listen_fd", type=int)
    found.add_argument("parent_pid", type=int)
    found.add_argument("--host", help="how others reach this machine; default: the socket's")
    found.add_argument("--election", metavar="URL", help="where coordinators are elected")
    found.add_argument("--secret-file", type=Path, help="default: RUN_DIR/secret, $HOLDFAST_SECRET")
    found.add_argument("--tls", type=Path, metavar="DIR", help="with tls.crt, tls.key and ca.crt")
    found.add_argument("--resume", action="store_true", help="whatever the journal says of an end")
    found.add_argument(
        "--guest",
        action="store_true",
        help="an order to end means that another should take over, not that the job should stop",
    )
    return found


def make_machine(spec: JobSpec, loaded: Loaded) -> machine.CoordinatorMachine | GroupMachine:
    forgotten = loaded.term if loaded.damage else 0
    if spec.compat.enabled:
        now = time.monotonic()
        return GroupMachine(spec.group_policy(), loaded.term, loaded.record, now, forgotten)
    return machine.CoordinatorMachine(
        spec.policy(), loaded.term, loaded.record, time.monotonic(), forgotten
    )


async def work_alone(setup: CoordinatorSetup, orders: Orders, resume: bool = False) -> str:
    """Coordinate as the job's only coordinator, ensured by its journal's lock; return the outcome.

    `resume`: how the job ended before does not count.
    """
    file = FileJournal(setup.run_dir.journal)
    loaded = await file.load()
    if resume and loaded.record is not None:
        record = dataclasses.replace(loaded.record, outcome=None)
        if setup.run_dir.take_earlier_end():  # no process of it runs: there is no need to wait
            record = dataclasses.replace(record, view=None, slots=())
        loaded = dataclasses.replace(loaded, record=record)
    spec = setup.run_dir.spec()
    core = make_machine(spec, loaded)
    journal = PatientJournal(
        file, spec.lease().abandon_s, print_line, lambda: core.snapshot().record.outcome is not None
    )
    server = CoordinatorServer(setup, spec, core, journal)
    if resume:
        server.say("resume", "the job is resumed: all of its processes had ended")
    if loaded.damage:
        server.say("journal", _damage_line(loaded.damage, spec))
    orders.watch(server.interrupt)
    return await server.run()


class Candidate:
    """Stands by until it leads, then coordinates until the job or its term is over.

    Each of the three parts of its life (standing by, leading, resigning) has an event loop of its
    own, so no task of one part can act in the next.
    """

    def __init__(
        self, election: Election, setup: CoordinatorSetup, orders: Orders, guest: bool
    ) -> None:
        self._election = election
        self._setup = setup
        self._orders = orders
        self._guest = guest
        self._stopping: asyncio.Task[None] | None = None

    def run(self) -> int:
        spec, leadership = asyncio.run(self._stand_by())
        # The kernel ends this process when its term ends, even if it hangs or is stopped.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        leadership.on_prolonged(_end_after)
        outcome: str | None = None
        with contextlib.suppress(asyncio.CancelledError):
            outcome = asyncio.run(self._coordinate(spec, leadership))
        with contextlib.suppress(WorldError):  # the lease then runs out by itself
            asyncio.run(leadership.resign())
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return DEPOSED if outcome is None else 1 if outcome else 0

    async def _stand_by(self) -> tuple[JobSpec, Leadership]:
        self._orders.watch(self._terminate)
        turning_away = asyncio.ensure_future(self._turn_away())
        spec = await self._find_spec()
        port = self._setup.listener.getsockname()[1]
        leadership = await self._election.campaign(self._setup.host, port, print_line)
        turning_away.cancel()
        return spec, leadership

    async def _find_spec(self) -> JobSpec:
        """Find the job: the first coordinator has it in its run directory, standbys in etcd."""
        run_dir, secret, election = self._setup.run_dir, self._setup.secret, self._election
        if run_dir.job.exists():
            spec = run_dir.spec()
            await election.ask_patiently(
                lambda: election.publish(spec, secret), print_line, START_S
            )
            return spec
        lines, known = RareLines(print_line), lambda: election.read_job(secret)
        found = await election.ask_patiently(known, print_line, START_S)
        while found is None:
            lines.put(f"standing by: nobody has begun the job {election.job}")
            await asyncio.sleep(LOOK_S)
            found = await election.ask_patiently(known, print_line)
        return found

    async def _turn_away(self) -> None:
        """Close every connection at once, so that clients learn that a standby does not lead."""
        listener = self._setup.listener
        listener.setblocking(False)
        while True:
            stranger, _ = await asyncio.get_running_loop().sock_accept(listener)
            stranger.close()

    def _terminate(self, number: int) -> None:
        if self._guest:
            leave(Deposed("this standby ends"))
        self._stopping = asyncio.ensure_future(self._pass_on_stop())

    async def _pass_on_stop(self) -> None:
        """Ask the leader to end the job, as our operator wants, until this standby ends too.

        A leader may lose its term before other candidates know of the stop, so each one is asked,
        once: a leader that is asked again ends the job without a last checkpoint.
        """
        asked, problems = 0, RareLines(print_line)
        while True:
            try:
                found = await self._election.leader()
                if found is not None and found.term > asked:
                    await self._ask_to_stop(found)
                    asked = found.term
            except (OSError, WorldError) as error:
                problems.put(f"cannot reach the leader to stop the job: {error}")
            await asyncio.sleep(LOOK_S)

    async def _ask_to_stop(self, leader: Leader) -> None:
        setup, tls = self._setup, client_of(self._setup.tls)
        job = setup.run_dir.spec().job if setup.run_dir.job.exists() else ""
        channel = await connect(leader.host, leader.port, setup.secret, job=job, tls=tls)
        channel.send(StopRequest(reason="interrupted"))
        await channel.finish()

    async def _coordinate(self, spec: JobSpec, leadership: Leadership) -> str:
        setup, journal = self._setup, EtcdJournal(leadership)
        holding = asyncio.ensure_future(leadership.hold())
        holding.add_done_callback(_fall)
        loaded = await journal.load()
        core = make_machine(spec, loaded)
        server = CoordinatorServer(setup, spec, core, journal, leadership.check)
        port = setup.listener.getsockname()[1]
        server.say("elected", f"{setup.host}:{port} coordinates in term {loaded.term}")
        if loaded.damage:
            server.say("journal", _damage_line(loaded.damage, spec))
        if self._guest:
            me = asyncio.current_task()
            self._orders.watch(lambda number: me and me.cancel())
        else:
            self._orders.watch(server.interrupt)
            if self._stopping is not None:  # the order came while there was no leader
                server.interrupt(signal.SIGTERM)
        return await server.run()


def _damage_line(damage: str, spec: JobSpec) -> str:
    """Return the line on a lost record: for a while the agents are asked, and changes wait."""
    lease = spec.policy().lease
    return (
        f"{damage}; waiting up to {lease.fence_s:g} s for agents to report their processes, or "
        f"{lease.abandon_s:g} s if some that could act stay silent"
    )


def _end_after(left_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6))  # 0 would mean never


def _fall(holding: asyncio.Task[None]) -> None:
    """End this process, since its lease could not be renewed."""
    if holding.cancelled():
        return
    error = holding.exception()
    if isinstance(error, HoldfastError):
        leave(error)
    traceback.print_exception(error)
    flush_outlets()
    os._exit(CRASHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
