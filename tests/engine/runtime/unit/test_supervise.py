"""Processes that crash again and again: some are given up, other ones end everything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.engine.core.errors import WorldError
from holdfast.engine.runtime.supervise import RESTARTS_MAX, Kept, Supervisor


def keep(*, spared: bool) -> Kept:
    return Kept("agent", lambda starts: ["false"], spared=spared)


def test_a_process_that_can_be_spared_is_given_up_and_the_first_one_runs_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first node's agent is such a process: it may lack descriptors; the coordinator stays."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent = keep(spared=True)
    agent.give_up = lambda: pipe.write_text("an end")
    first = Kept("coordinator", lambda starts: ["cat", str(pipe)])
    assert Supervisor([first, agent]).run() == 0
    told = f"the agent died {RESTARTS_MAX + 1} times in a minute: it is given up"
    assert told in capfd.readouterr().err
    assert (first.code, agent.starts) == (0, RESTARTS_MAX + 1)


@pytest.mark.parametrize("spared", [True, False])
def test_a_process_that_all_need_ends_everything(spared: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waits = Kept("coordinator", lambda starts: ["cat", str(pipe)])
    kept = [keep(spared=True), waits] if spared else [waits, keep(spared=False)]
    with pytest.raises(WorldError, match="the agent died 11 times in a minute"):
        Supervisor(kept).run()
