"""The coordinator around its machine: the order of effects, and one process at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.core.directives import AgentReport, Directive, WantedProcess
from holdfast.engine.core.errors import Deposed
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    Finish,
    Persist,
    SendDirective,
)
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.net.channel import connect
from holdfast.engine.runtime.coordinate import coordinator_server
from holdfast.engine.runtime.coordinate.coordinator_process import make_machine
from holdfast.engine.runtime.coordinate.coordinator_server import (
    CoordinatorServer,
    CoordinatorSetup,
    EffectPipe,
)
from holdfast.engine.runtime.launcher import incarnation_after
from holdfast.engine.runtime.leadership.journal import MemoryJournal, MemoryStore, unseal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import JoinReply, JoinRequest
from support import HOST, SPEC, WAIT_S, CoordinatorProcess, until


def record(term: int, release_loop: int = 0) -> JobRecord:
    return JobRecord(term=term, release_loop=release_loop)


def directive(agent: str, seq: int) -> SendDirective:
    name = AgentId(agent)
    return SendDirective(Directive(term=1, seq=seq, agent=name, agent_incarnation=Incarnation(1)))


def drain(pipe: EffectPipe) -> list[CoordinatorEffect]:
    found = []
    while (effect := pipe.pop()) is not None:
        found.append(effect)
    return found


def test_effects_keep_their_order() -> None:
    pipe = EffectPipe()
    effects = [Announce("a", "1"), directive("x", 1), Announce("b", "2"), directive("y", 2)]
    pipe.push(effects)
    pipe.push([Finish("")])
    assert drain(pipe) == [*effects, Finish("")]


def test_only_the_newest_of_repeated_effects_is_kept_and_never_before_its_record() -> None:
    pipe = EffectPipe()
    pipe.push([Persist(record(1, 1)), directive("x", 1), directive("y", 2)])
    pipe.push([Announce("a", "1")])
    pipe.push([Persist(record(1, 2)), directive("x", 3)])
    found = drain(pipe)
    assert found == [
        Persist(record(1, 2)),
        directive("y", 2),
        Announce("a", "1"),
        directive("x", 3),
    ]
    pipe.push([Announce("a", "1"), Persist(record(1, 3)), directive("x", 4)])
    assert pipe.pop() == Announce("a", "1")
    pipe.push([Persist(record(1, 4)), directive("x", 5)])
    assert drain(pipe) == [Persist(record(1, 4)), directive("x", 5)]


class GatedJournal(MemoryJournal):
    """Saves only once the test lets it."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.asked = 0
        self.gate = asyncio.Semaphore(0)

    async def save(self, record: JobRecord) -> None:
        self.asked += 1
        await self.gate.acquire()
        await super().save(record)


def test_nothing_is_sent_before_its_record_is_durable(tmp_path: Path) -> None:
    async def scenario() -> None:
        run_dir = RunDir(tmp_path / "run")
        run_dir.create(SPEC, bytes(range(32)))
        journal = GatedJournal(MemoryStore())
        core = make_machine(SPEC, await journal.load())
        listener = socket.create_server((HOST, 0))
        setup = CoordinatorSetup(
            run_dir=run_dir, secret=run_dir.secret(), listener=listener, host=HOST
        )
        server = CoordinatorServer(setup, SPEC, core, journal)
        serving = asyncio.ensure_future(server.run())
        journal.gate.release()  # for the new term
        channel = await connect(*listener.getsockname(), run_dir.secret())
        report = AgentReport(agent=AgentId("node0"), incarnation=Incarnation(1), seq=1, slots=1)
        channel.send(report)
        answer = asyncio.ensure_future(channel.receive(Directive))
        while journal.asked < 2:
            await asyncio.sleep(0)
        for _ in range(100):  # every ready callback gets its turn
            await asyncio.sleep(0)
        assert not answer.done()
        journal.gate.release()
        found = await asyncio.wait_for(answer, WAIT_S)
        assert found.wanted == (WantedProcess(worker=WorkerId(0), incarnation=Incarnation(1)),)
        assert unseal(journal._store.data or b"").slots == core.snapshot().record.slots
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        channel.close()

    asyncio.run(scenario())


def test_an_agent_that_starts_again_counts_on_whatever_its_clock_says(tmp_path: Path) -> None:
    """Its node's clock was set back, so the time is no incarnation that is greater than before."""
    later = Incarnation(1 << 40)

    async def scenario() -> None:
        run_dir = RunDir(tmp_path / "run")
        run_dir.create(SPEC, bytes(range(32)))
        journal = MemoryJournal(MemoryStore())
        core = make_machine(SPEC, await journal.load())
        listener = socket.create_server((HOST, 0))
        setup = CoordinatorSetup(
            run_dir=run_dir, secret=run_dir.secret(), listener=listener, host=HOST
        )
        serving = asyncio.ensure_future(CoordinatorServer(setup, SPEC, core, journal).run())
        channel = await connect(*listener.getsockname(), run_dir.secret())
        channel.send(AgentReport(agent=AgentId("n"), incarnation=later, seq=1, slots=1))
        found = []
        for name in ("n", "other", ""):
            channel.send(JoinRequest(name=name))
            while isinstance(reply := await channel.receive(JoinReply, Directive), Directive):
                pass
            assert reply is not None
            found.append(incarnation_after(reply.incarnation))
        assert found[0] == later + 1
        assert max(found[1:]) < later
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        channel.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_coordinator_that_may_be_deposed_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left(Exception):
        """Stands for the end of this process."""

    def leave(error: Exception) -> None:
        raise Left(str(error))

    def check() -> None:
        raise Deposed("its term is over")

    class Recorder:
        def __init__(self) -> None:
            self.sent: list[object] = []

        def send(self, message: object) -> None:
            self.sent.append(message)

    async def act(check: Callable[[], None], agent: Recorder) -> None:
        journal = MemoryJournal(MemoryStore())
        core = make_machine(SPEC, await journal.load())
        listener = socket.create_server((HOST, 0))
        setup = CoordinatorSetup(run_dir=RunDir(tmp_path), secret=b"", listener=listener, host=HOST)
        server = CoordinatorServer(setup, SPEC, core, journal, check)
        server._nodes.record_report(AgentId("x"), agent, 0.0)  # type: ignore[arg-type]
        server._carry_out([directive("x", 1)])

    monkeypatch.setattr(coordinator_server, "leave", leave)
    agent = Recorder()
    asyncio.run(act(lambda: None, agent))
    assert len(agent.sent) == 1
    with pytest.raises(Left, match="its term is over"):
        asyncio.run(act(check, agent))
    assert len(agent.sent) == 1


# ---------------------------------------------------------------- the process


def events(run_dir: RunDir, kind: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        found = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
        return [event["text"] for event in found if event["kind"] == kind]
    return []


def term_saved(run_dir: RunDir) -> int:
    found = run_dir.load_record()
    return found.term if found else 0


def test_a_damaged_journal_is_one_event(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    # It waits for agents that may know more for as long as they may act without it.
    hurried = with_settings(SPEC, {"nodes.lease_s": 0.5, "nodes.abandon_s": 1.0})
    run_dir.create(hurried, bytes(range(32)))
    run_dir.journal.write_bytes(b"\0" * 100)
    with CoordinatorProcess(run_dir):
        until(lambda: term_saved(run_dir), "a new record")
    (text,) = events(run_dir, "journal")
    assert f"{run_dir.journal} is damaged: it begins with" in text
    assert "journal.damaged-1" in text


def test_a_second_coordinator_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create(SPEC, bytes(range(32)))
    with CoordinatorProcess(run_dir):
        until(lambda: term_saved(run_dir) == 1, "the first's record")
        with CoordinatorProcess(run_dir) as second:
            _, text = second.communicate(timeout=WAIT_S)
            assert second.returncode == 1
        (line,) = text.splitlines()
        assert f"another coordinator has the journal {run_dir.journal}" in line
    with CoordinatorProcess(run_dir):  # the first one's death has freed it
        until(lambda: term_saved(run_dir) == 2, "the third's record")
