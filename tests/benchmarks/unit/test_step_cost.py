"""The cost of a step for a process, where it can be counted rather than timed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FREE_AND_TAKE = """
import resource, sys, torch, holdfast
holdfast.join()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    for each in [torch.empty(1 << 20).fill_(1.0) for _ in range(16)]: pass
for _ in range(3): step()
before = faults()
for _ in range(10): step()
sys.stdout.write(str((faults() - before) // 10))
"""
PAGES = (16 << 22) // os.sysconf("SC_PAGE_SIZE")  # pages of the memory that it takes


@pytest.mark.slow
@pytest.mark.parametrize("mine", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}])
def test_memory_that_a_step_frees_is_there_in_the_next_unless_the_user_wants_otherwise(
    mine: dict[str, str],
) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    found = subprocess.run(
        [sys.executable, "-c", FREE_AND_TAKE],
        env={**inherited, **mine},
        capture_output=True,
        text=True,
        check=True,
    )
    faults = int(found.stdout)
    assert faults > PAGES / 4 if mine else faults < PAGES / 100, found.stdout
