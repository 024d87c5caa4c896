"""What people bring to their scripts: the same bits with it, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Start, finish

KILLS = "worker 1 step 2 kill\nworker 0 step 5 kill\n"


@pytest.fixture
def faults(tmp_path: Path) -> tuple[str, str]:
    """Return the options of a run in which the first worker and then the other one is killed."""
    path = tmp_path / "faults.txt"
    path.write_text(KILLS)
    return "--faults", str(path)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_activation_checkpoints_draw_the_same_dropout_again(
    start: Start, faults: tuple[str, str]
) -> None:
    """Kept or computed again, by either way and after deaths, activations are the same."""
    last = []
    for reentrant, nproc, options in (
        ("none", 1, ()),
        ("False", 2, faults),
        ("True", 2, faults),
    ):
        with start(reentrant, nproc=nproc, script="recomputed.py", options=options) as run:
            last.append(finish(run))
    assert last == last[:1] * 3
    assert len(run.events("lost")) == 2


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_loader_of_torchdata_gives_the_batches_of_pytorchs(
    start: Start, faults: tuple[str, str]
) -> None:
    """The job's state has the place in the data, whatever state the loader has."""
    pytest.importorskip("torchdata.stateful_dataloader")
    last = []
    for kind, nproc, options in (("torch", 1, ()), ("torchdata", 2, faults)):
        with start(kind, nproc=nproc, script="stateful_loader.py", options=options) as run:
            last.append(finish(run))
    assert last == last[:1] * 2
    assert len(run.events("lost")) == 2
