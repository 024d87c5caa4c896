"""Workers spread over hosts whose networks are separate, and are really cut.

Each host has a loopback of its own, and one interface that leads to the other hosts: processes that
meet over anything else do not meet at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_memory_tier import recalls, until_step

from conftest import RUN_S, SCRIPTS, computed_twice, finish
from holdfast.engine.runtime.local_run import LocalRun
from labs.lab import LabRun
from labs.network_lab import Lab
from places import ROOT

EXAMPLE = ROOT / "examples" / "fsdp.py"
STEPS = 16
HELD = 6  # the step after which a job waits until something was done to it
GROUP = ("--nproc", "1", "--procs-per-worker", "2", "--virtual", "4")

pytestmark = [
    pytest.mark.skipif(bool(Lab.available()), reason=Lab.available() or "-"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the last line of one worker on one node."""
    path = tmp_path_factory.mktemp("quiet") / "run"
    with LocalRun(path, GROUP, [str(EXAMPLE), "--steps", str(STEPS)]) as run:
        return finish(run)


@contextlib.contextmanager
def spread(
    lab: Lab, path: Path, *options: str, nodes_min: int = 2, faults: str = "-"
) -> Iterator[LabRun]:
    """Run a job on all hosts of a lab, each of whose workers has two of them."""
    flags = [*GROUP, "--nodes-per-worker", "2", "--protect-every", "3", *options]
    words = [str(SCRIPTS / "sharded.py"), faults, "-", str(EXAMPLE), "--steps", str(STEPS)]
    with LabRun(lab, path / "run", flags, words, nodes_min=nodes_min) as run:
        run.until_members(nodes_min // 2, RUN_S)
        yield run


def last(run: LabRun) -> set[str]:
    assert run.wait(RUN_S) == 0, run.log()
    return run.last_lines()


def go(path: Path) -> None:
    """Continue a held job."""
    (path / "go").touch()


def teams(run: LabRun) -> list[list[int]]:
    """Return the hosts of each worker: the hosts that joined first."""
    told = [event["text"] for event in run.events("node") if "are spread over" in event["text"]]
    names = [text.split(" nodes ")[1].split(", ") for text in told]
    return [[int(name.removeprefix("node")) for name in team] for team in names]


def lost(run: LabRun) -> list[str]:
    return [event["text"] for event in run.events("lost")]


def test_a_worker_is_spread_over_hosts(tmp_path: Path, expected: str) -> None:
    with Lab(2) as lab, spread(lab, tmp_path) as run:
        assert expected in last(run)
    assert lost(run) == []


def test_a_host_is_cut_off_and_one_that_waits_takes_its_place(
    tmp_path: Path, expected: str
) -> None:
    """The lost node's part comes from the memory of the other one."""
    hold = f"held:0.0:{HELD}"
    options = ("--nodes-max", "4", "--redundancy", "replicate:2")
    with Lab(3) as lab, spread(lab, tmp_path, *options, faults=hold) as run:
        until_step(run, HELD)
        run.until(lambda: len(run.status()["agents"]) == 3, RUN_S, "a node that waits")
        (team,) = teams(run)
        (further,) = [number for number in team if number]  # the coordinator is on host 0
        with lab.cut(lab.hosts[further]):
            run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
            go(tmp_path)
            assert expected in last(run)
    assert computed_twice(run) == []


def test_two_hosts_of_a_worker_are_separated(tmp_path: Path, expected: str) -> None:
    """Both reach the coordinator and the other worker, which continues; their worker comes back."""
    hold = f"held:0.0:{HELD},held:1.0:{HELD}"
    with Lab(4) as lab, spread(lab, tmp_path, nodes_min=4, faults=hold) as run:
        until_step(run, HELD)
        (team,) = [each for each in teams(run) if 0 not in each]
        with lab.cut_pair(*(lab.hosts[number] for number in team)) as fault:
            run.until(lambda: lost(run), RUN_S, "the loss of the worker")
            assert fault.dropped() > 0
            run.until(lambda: len(run.events("view")) > 1, RUN_S, "a view without it")
        go(tmp_path)
        assert expected in last(run)
    assert recalls(run) == []
    assert computed_twice(run) == []
