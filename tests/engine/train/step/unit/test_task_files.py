"""Tests that files which tasks write and read back are named if something else changes them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.task_effects import FILES_MAX, TOLD_MAX, TaskFiles
from loop_kit import dataset, protected
from script_search.compose import compose
from script_search.runs import SILENT, TOLD, Run, judge
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker


def ask(path: Path, value: str | None = None) -> list[str]:
    """Write a value to a database, or read all of them."""
    with contextlib.closing(sqlite3.connect(path)) as table, table:
        table.execute("create table if not exists kept (value text)")
        if value is not None:
            table.execute("insert into kept values (?)", [value])
        return [row[0] for row in table.execute("select value from kept")]


def replace(path: Path, value: str) -> None:
    """Write a file next to this one, and put it in its place."""
    new = path.with_suffix(".new")
    new.write_text(value)
    new.replace(path)


def low_level(path: Path, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, value.encode())
    os.close(fd)


WAYS: dict[str, tuple[Callable[[Path, str], Any], Callable[[Path], Any]]] = {
    "text": (lambda p, v: p.write_text(v), lambda p: p.read_text()),
    "replace": (replace, lambda p: p.read_text()),
    "os.open": (low_level, lambda p: os.close(os.open(p, os.O_RDONLY))),
    "database": (ask, ask),
}


class Kit:
    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.files = TaskFiles(self.told.append)
        self.path = folder / "kept"

    @contextlib.contextmanager
    def task(self) -> Iterator[Path]:
        self.files.begin_task()
        try:
            yield self.path
        finally:
            self.files.end_task()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def elsewhere(act: Callable[[], Any]) -> None:
    """Do something in another thread, as another worker would."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_something_else_changes_is_named_once(kit: Kit, way: str) -> None:
    write, read = WAYS[way]
    with kit.task() as path:
        write(path, "1")
    for _ in range(3):
        elsewhere(lambda: write(kit.path, "another's"))
        with kit.task() as path:
            write(path, "22")
            read(path)
    (text,) = kit.told
    assert "the file kept " in text
    assert "job.rank_state" in text


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_this_worker_alone_is_not_told(kit: Kit, way: str) -> None:
    write, read = WAYS[way]
    for number in range(3):
        with kit.task() as path:
            write(path, str(number))
            read(path)
            write(path, str(number))
        with kit.task() as path:
            read(path)
    assert not kit.told


def test_a_file_that_tasks_only_read_or_only_write_is_not_told(kit: Kit, tmp_path: Path) -> None:
    record = tmp_path / "record"
    for number in range(3):
        elsewhere(lambda n=number: (record.write_text("x" * n), kit.path.write_text("y" * n)))
        with kit.task() as path:
            record.read_text()
            path.write_text(str(number))
    assert not kit.told


def test_reads_between_tasks_count_for_nothing(kit: Kit) -> None:
    with kit.task() as path:
        path.write_text("1")
    elsewhere(lambda: kit.path.write_text("another's"))
    kit.path.read_text()
    assert not kit.told


def test_descriptors_and_odd_names_do_no_harm(kit: Kit) -> None:
    with kit.task() as path:
        path.write_text("1")
        fd = os.open(path, os.O_RDONLY)
        with open(fd) as file:
            file.read()
        with pytest.raises(ValueError, match="null"):
            Path("a\0b").write_text("1")
        with sqlite3.connect(":memory:") as table:
            table.execute("select 1")
    assert not kit.told


def test_the_number_of_files_and_of_messages_is_bounded(kit: Kit, tmp_path: Path) -> None:
    every = [tmp_path / f"{number}.txt" for number in range(FILES_MAX + 50)]
    with kit.task():
        for path in every:
            path.write_text("1")
    assert len(kit.files._left) == FILES_MAX
    for path in every:
        elsewhere(lambda p=path: p.write_text("another's"))
    with kit.task():
        for path in every:
            path.read_text()
    assert len(kit.told) == TOLD_MAX
    assert not kit.files._foreign or len(kit.files._foreign) <= FILES_MAX


@pytest.mark.slow
def test_two_workers_that_share_a_file_are_told(tmp_path: Path) -> None:
    """The same gradients everywhere, so that no other check can notice it."""
    shared = tmp_path / "kept.txt"

    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=12):
            for x, y in step:
                shared.write_text("x" * (me.worker + 1))
                shared.read_text()
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    assert any("the file kept.txt " in text for text in events(script, 2))
    assert not any("the file" in text for text in events(script, 1))


def events(script: Callable[[Job, ThreadWorker], Any], workers: int) -> list[str]:
    given = {"workers.nproc": workers, "workers.virtual": 4, "silent_errors.fingerprint_steps": 4}
    cluster = ThreadCluster(with_settings(SPEC, given), script)
    assert not cluster.run(), cluster.errors
    return cluster.told("script")


def test_temporary_files_of_tasks_are_not_told(kit: Kit) -> None:
    for _ in range(3):
        with kit.task(), tempfile.NamedTemporaryFile("w+") as file:
            file.write("1")
            file.flush()
            Path(file.name).read_text()
    assert not kit.told


def test_the_search_counts_a_script_that_an_event_has_named() -> None:
    script = compose(118)
    said = f"the file {script.names[0]}.db: the result depends on the workers"
    runs = Run(name="", digest="a"), Run(name="", digest="b", events=(said,))
    assert judge(script, runs) == TOLD
    other = Run(name="", digest="b", events=(f"the attribute {script.names[0]} is set back",))
    assert judge(script, (runs[0], other)) == SILENT
