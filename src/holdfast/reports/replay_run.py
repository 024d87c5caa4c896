"""Prepares a job that computes steps of another run again: on one worker, from a checkpoint of it.

The other run is only read. The new job's checkpoints go to a fork of the store, which is thrown
away with the new job's run directory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Iterable
from pathlib import Path

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec, with_settings
from holdfast.engine.net.secret import SECRET_BYTES_MIN
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import check_exists, fork_store, open_storage

ALONE = {
    "workers.nproc": 1,
    "workers.spread": 1,
    "workers.spares": 0,
    "workers.hot_spares": False,
    "workers.min": 1,
    "nodes.min": 1,
    "nodes.max": 1,
    "nodes.election": "",
    "stragglers.backup": 0,
    "memory.redundancy": "none",
    "servers.replicas": 1,
}


def find_beginnings(spec: JobSpec, wanted: Iterable[int]) -> dict[int, int]:
    """Return for each step the newest checkpoint from which it can be computed, 0 for none.

    UserError if the store cannot be read.
    """
    stored: list[int] = []
    if store := spec.checkpoints.store:
        check_exists(store)
        try:
            stored = Checkpoints(open_storage(store)).steps()
        except WorldError as error:
            raise UserError(f"the run's store {store} cannot be read: {error}") from None
    return {step: max((s for s in stored if s <= step), default=0) for step in wanted}


def prepare_replay(spec: JobSpec, begin: int, path: Path) -> RunDir:
    """Make a run directory at `path` for a job that goes on from step `begin` of another one.

    UserError if that is a job which cannot be computed by one worker.
    """
    if spec.compat.enabled:
        raise UserError("a run with --compat has no steps that could be computed again")
    forked = fork_store(spec.checkpoints.store, begin, path / "store") if begin else ""
    alone = with_settings(
        spec,
        {
            **ALONE,
            "workers.virtual": spec.virtual_ranks,
            "checkpoints.store": forked,
            "servers.count": min(spec.servers.count, 1),
        },
    )
    alone = dataclasses.replace(alone, job=secrets.token_hex(JOB_BYTES_MAX // 2))
    found = RunDir(path)
    found.create(alone, secrets.token_bytes(SECRET_BYTES_MIN))
    asyncio.run(_write_record(found, begin))
    return found


async def _write_record(run_dir: RunDir, begin: int) -> None:
    """Let the job know of the checkpoint that it begins from."""
    journal = FileJournal(run_dir.journal)
    loaded = await journal.load()
    await journal.save(JobRecord(term=loaded.term, saved=(begin,) if begin else ()))
    journal.close()
