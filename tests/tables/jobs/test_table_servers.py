"""Jobs whose tables are on servers: the same bits on any number of these, also if some are lost."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Start, computed_twice, finish
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.tables import EmbeddingBag
from holdfast.tables.core.placement import SHARDS, find_holders
from memory_kit import recalls
from places import TESTS

STEPS = 60
MEMORY = ("--redundancy", "replicate:1", "--protect-every", "4")
Digest = Callable[[int], str]


def flags(servers: int, replicas: int = 1) -> tuple[str, ...]:
    return "--servers", str(servers), "--replicas", str(replicas)


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory) -> Digest:
    """Return digest(steps): the result of the undisturbed run on one worker with all rows."""
    known: dict[int, str] = {}

    def compute(steps: int) -> str:
        if steps not in known:
            script = str(TESTS / "scripts" / "tables.py")
            path = tmp_path_factory.mktemp("tables") / f"run{steps}"
            with LocalRun(path, ["--virtual", "4"], [script, "--steps", str(steps)]) as run:
                known[steps] = finish(run)
        return known[steps]

    return compute


def servers_of(run: LocalRun, count: int) -> dict[int, int]:
    """Wait until all servers listen; returns their process ids by number."""

    def listening() -> dict[int, int]:
        found = {s["number"]: s["pid"] for s in run.status()["servers"]}
        return found if len(found) == count else {}

    run.until_members(1)
    found: dict[int, int] = run.until(listening, 60, f"{count} servers")
    return found


def until_step(run: LocalRun, step: int) -> None:
    run.until(lambda: run.status()["step"] >= step, 60, f"step {step}")


def until_replaced(run: LocalRun, number: int, pids: dict[int, int]) -> None:
    """Wait until another process has taken a server's place."""
    what = f"another process of server {number}"
    run.until(lambda: servers_of(run, len(pids))[number] != pids[number], 30, what)


def paced(
    start: Start, steps: int, workers: int, options: tuple[str, ...], *words: str
) -> LocalRun:
    """Return a run that is slow enough to be disturbed; `words`: more for the script."""
    pace = ("--steps", str(steps), "--task-s", "0.03", *words)
    return start(*pace, nproc=workers, script="tables.py", options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "replicas"), [(1, 1, 1), (2, 2, 1), (2, 3, 2), (4, 2, 2)]
)
def test_the_result_does_not_depend_on_servers(
    workers: int, servers: int, replicas: int, start: Start, digest: Digest
) -> None:
    run = start(nproc=workers, script="tables.py", options=flags(servers, replicas))
    with run:
        assert finish(run) == digest(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [False, True])
def test_rows_that_are_read_as_float16_have_the_same_bits_on_servers(
    keyed: bool, start: Start, digest: Digest
) -> None:
    words = ("--half", "--keyed") if keyed else ("--half",)
    found = []
    for workers, options in ((1, ()), (2, flags(2, 2)), (2, flags(3))):
        with start(*words, nproc=workers, script="tables.py", options=options) as run:
            found.append(finish(run))
    assert len(set(found)) == 1
    assert found[0] != digest(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_written_rows_are_the_same_on_servers_and_after_losses_of_workers(
    lost: int, start: Start
) -> None:
    """A joining worker runs the lines that write rows again; if all are lost, they count again."""
    words = ("--written", "--steps", str(STEPS))
    with start(*words, nproc=1, script="tables.py") as alone:
        expected = finish(alone)
    with paced(start, STEPS, 2, flags(2), "--written") as run:
        servers_of(run, 2)
        until_step(run, 10)
        for worker in list(run.members())[:lost]:
            strike(run.members()[worker])
        assert finish(run) == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_is_lost_and_another_one_serves_its_rows(
    how: signal.Signals, start: Start, digest: Digest
) -> None:
    run = paced(start, STEPS, 2, flags(3, 2))
    with run:
        pids = servers_of(run, 3)
        until_step(run, 10)
        assert strike(pids[1], how)
        until_replaced(run, 1, pids)
        assert finish(run) == digest(STEPS)
    assert not run.events("back")


@pytest.mark.slow
def test_servers_are_lost_one_after_the_other(start: Start, digest: Digest) -> None:
    run = paced(start, 150, 2, flags(2, 2))
    with run:
        pids = servers_of(run, 2)
        for number in (0, 1, 0):
            before = run.status()["step"]
            assert strike(pids[number])
            until_replaced(run, number, pids)
            pids = servers_of(run, 2)
            until_step(run, before + 25)  # by then it has a copy of all rows
        assert finish(run) == digest(150)
    assert not run.events("back")


@pytest.mark.slow
def test_a_worker_and_a_server_are_lost_together(start: Start, digest: Digest) -> None:
    run = paced(start, STEPS, 2, flags(2, 2))
    with run:
        pids = servers_of(run, 2)
        until_step(run, 10)
        assert strike(pids[0])
        assert strike(run.members()[1])
        assert finish(run) == digest(STEPS)
    assert not run.events("back")


@pytest.mark.slow
def test_rows_that_are_lost_everywhere_are_computed_again(start: Start, digest: Digest) -> None:
    run = paced(start, STEPS, 2, flags(2))
    with run:
        pids = servers_of(run, 2)
        until_step(run, 30)  # beyond what workers keep
        assert strike(pids[0])
        assert finish(run) == digest(STEPS)
    assert "are lost" in run.events("tables")[0]["text"]
    assert run.events("back")


@pytest.mark.slow
def test_all_workers_are_lost_and_servers_begin_again_with_them(
    start: Start, digest: Digest
) -> None:
    run = paced(start, STEPS, 2, flags(2))
    with run:
        servers_of(run, 2)
        until_step(run, 30)
        for pid in run.members().values():
            strike(pid)
        assert finish(run) == digest(STEPS)


def saving(tmp_path: Path, servers: int, replicas: int = 1) -> tuple[str, ...]:
    """Return the flags of a job with servers that saves checkpoints."""
    return *flags(servers, replicas), "--store", str(tmp_path / "store"), "--save-every", "10"


def until_saved(tmp_path: Path, run: LocalRun, step: int) -> None:
    """Wait until a checkpoint of this step or a later one is there."""
    store = Checkpoints(open_storage(str(tmp_path / "store")))
    run.until(lambda: any(each >= step for each in store.steps()), 60, f"a checkpoint of {step}")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), MEMORY])
def test_rows_that_are_lost_everywhere_come_from_a_checkpoint(
    more: tuple[str, ...], start: Start, digest: Digest, tmp_path: Path
) -> None:
    """The nodes' memory has a newer state, which is of no use without its rows."""
    run = paced(start, 80, 2, (*saving(tmp_path, 2), *more))
    with run:
        pids = servers_of(run, 2)
        until_saved(tmp_path, run, 20)
        until_step(run, 50)
        assert strike(pids[0])
        assert finish(run) == digest(80)
    assert "are lost" in run.events("tables")[0]["text"]
    (back,) = [event["text"] for event in run.events("back")]
    assert int(back.rpartition(" ")[2]) >= 20
    assert recalls(run) == []


@pytest.mark.parametrize(
    ("staleness", "shares"),
    [
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_all_workers_are_lost_and_the_memory_of_their_node_has_the_rest(
    staleness: int, shares: bool, start: Start, digest: Digest
) -> None:
    """With --shard-optimizer the loss of one ends all of them."""
    late = ("--staleness", str(staleness))
    options = (*flags(3, 2), *late, *MEMORY, *(("--shard-optimizer",) if shares else ()))
    expected = digest(STEPS)
    if staleness:
        with start(nproc=1, script="tables.py", options=(*flags(1), *late)) as run:
            expected = finish(run)
    run = paced(start, STEPS, 2, options)
    with run:
        servers_of(run, 3)
        until_step(run, 30)
        for pid in list(run.members().values())[: 1 if shares else 2]:
            strike(pid)
        assert finish(run) == expected
    (step,) = recalls(run)
    assert step >= 30
    assert not run.events("back")
    assert computed_twice(run) == []


@pytest.mark.slow
def test_everything_but_the_memory_of_a_node_is_lost(
    start: Start, digest: Digest, tmp_path: Path
) -> None:
    """The state is recalled, its rows prove to be lost, and the newest checkpoint counts."""
    run = paced(start, 80, 2, (*saving(tmp_path, 2), *MEMORY))
    with run:
        pids = servers_of(run, 2)
        until_saved(tmp_path, run, 20)
        until_step(run, 50)
        for pid in (*pids.values(), *run.members().values()):
            strike(pid)
        assert finish(run) == digest(80)
    assert len(recalls(run)) == 1
    assert len(run.events("back")) == 1


@pytest.mark.slow
def test_a_job_whose_every_process_was_killed_goes_on_with_its_rows(
    start: Start, digest: Digest, tmp_path: Path
) -> None:
    run = paced(start, 80, 2, saving(tmp_path, 3, 2))
    with run:
        until_saved(tmp_path, run, 20)
        for pid in (run.pid, *run.leftovers()):
            strike(pid)
    with LocalRun(run.run_dir.path, [], [], command=["resume", str(run.run_dir.path)]) as again:
        assert finish(again) == digest(80)
    assert "from the checkpoint of step" in again.events("view")[-1]["text"]


CHANGES = ("--stale", "12", "0", "--stale", "30", "5")


@pytest.mark.parametrize(
    ("staleness", "changes"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(8, (), marks=pytest.mark.slow),
        pytest.param(8, CHANGES, marks=pytest.mark.slow),
    ],
)
def test_stale_reads_are_the_same_on_any_servers_and_after_losses(
    staleness: int, changes: tuple[str, ...], start: Start, digest: Digest
) -> None:
    late = ("--staleness", str(staleness))
    with start(*changes, nproc=1, script="tables.py", options=(*flags(1), *late)) as run:
        found = finish(run)
    assert found != digest(STEPS)
    if changes:
        with start(nproc=1, script="tables.py", options=(*flags(1), *late)) as run:
            assert finish(run) != found
    run = paced(start, STEPS, 2, (*flags(3, 2), *late), *changes)
    with run:
        pids = servers_of(run, 3)
        until_step(run, 10)
        assert strike(pids[0])
        assert strike(run.members()[1])
        assert finish(run) == found


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_stale_reads_are_the_same_after_a_checkpoint(
    whole: bool, start: Start, tmp_path: Path
) -> None:
    late = ("--staleness", "3")
    with start(nproc=1, script="tables.py", options=(*flags(1), *late)) as run:
        found = finish(run)
    run = paced(start, STEPS, 2, (*saving(tmp_path, 2), *late))
    with run:
        pids = servers_of(run, 2)
        until_saved(tmp_path, run, 20)
        if not whole:
            until_step(run, 40)
            assert strike(pids[0])
            assert finish(run) == found
            assert "are lost" in run.events("tables")[0]["text"]
            return
        for pid in (run.pid, *run.leftovers()):
            strike(pid)
    with LocalRun(run.run_dir.path, [], [], command=["resume", str(run.run_dir.path)]) as again:
        assert finish(again) == found
        assert "from the checkpoint of step" in again.events("view")[-1]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_losses_change_nothing(seed: int, start: Start, digest: Digest) -> None:
    dice = random.Random(seed)
    workers, servers = dice.randint(2, 4), dice.randint(2, 3)
    run = paced(start, 200, workers, flags(servers, 2))
    with run:
        servers_of(run, servers)
        at = 0
        for _ in range(4):
            at += dice.randint(10, 40)
            until_step(run, at)
            number = dice.randrange(servers + workers)
            how = dice.choice((signal.SIGKILL, signal.SIGSTOP))
            if number < servers:
                strike(servers_of(run, servers)[number], how)
            else:
                strike(dice.choice(list(run.until_members(1).values())), how)
        assert finish(run) == digest(200)


def flip_in_memory(pid: int, wanted: list[bytes]) -> int:
    """Change one bit of each of these patterns that a process has; return how many it has."""
    found = 0
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in lines:
            place, mode, *_ = line.split()
            if not mode.startswith("rw"):
                continue
            start, stop = (int(each, 16) for each in place.split("-"))
            memory.seek(start)
            part = memory.read(stop - start)
            for each in wanted:
                at = part.find(each)
                memory.seek(start + at)
                # An array that has moved by now is left alone: its old place may have a new use.
                if at >= 0 and memory.read(len(each)) == each:
                    memory.seek(start + at)
                    memory.write(bytes([each[0] ^ 0x10]))
                    found += 1
    return found


@pytest.mark.slow
def test_bits_that_flip_in_a_servers_memory_change_nothing(start: Start) -> None:
    """They flip in unused rows, which stay where they are until the end reads all rows."""
    used, rows = 200, 1000
    first = EmbeddingBag(rows, 4, name="users", seed=0).weight.detach().numpy()
    mine = [r for r in range(used, rows - SHARDS) if find_holders(2, 2)[r % SHARDS][0] == 1]
    pairs = [first[row].tobytes() + first[row + SHARDS].tobytes() for row in mine[::50]]
    words = ("--rows", str(rows), "--task-s", "0.05", "--steps", "40")
    with start(*words, nproc=1, script="tables.py", options=("--virtual", "4")) as run:
        plain = finish(run)
    with start(*words, nproc=2, script="tables.py", options=flags(2, 2)) as run:
        server = servers_of(run, 2)[1]
        until_step(run, 5)
        assert flip_in_memory(server, pairs) == len(pairs)
        assert finish(run) == plain
    assert any("server 1: memory with rows of" in e["text"] for e in run.events("tables"))
    assert not run.events("back")
