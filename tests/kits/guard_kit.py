"""Runs scripts that break the promise, and collects their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.job import Job
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 6


def told(
    script: Callable[[Job, ThreadWorker], Any],
    workers: int = 2,
    kill_at: dict[int, int] | None = None,
    **settings: Any,
) -> str:
    """Run a script that breaks the promise until the job ends; return its workers' errors."""
    given = {"workers.nproc": workers, "workers.virtual": 4, "silent_errors.fingerprint_steps": 4}
    spec = with_settings(SPEC, given | settings)
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, script, at, waits=True)
    outcome = cluster.run()
    assert outcome, "the job came to its end"
    found = {str(error) for error in cluster.errors if isinstance(error, UserError)}
    assert found, cluster.errors
    assert not any("wrongly" in text for text in cluster.told("wrong")), "a worker was blamed"
    return " / ".join(sorted(found))
