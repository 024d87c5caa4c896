"""Reads the use of time of a run, for tests of reports."""

from __future__ import annotations

import pytest

from holdfast.engine.records.goodput import Goodput, share_out
from holdfast.engine.runtime.local_run import LocalRun


def goodput_of(run: LocalRun) -> Goodput:
    """Return the goodput of a run, whose parts must sum up to wall time x workers."""
    found = share_out(run.run_dir.path, run.events())
    assert found is not None
    assert found.total_s == pytest.approx(found.wall_s * len(found.workers), abs=1e-3)
    assert all(seconds >= -1e-6 for seconds in found.parts().values())
    return found
