"""Defines where bugs are planted, and which tests run before all other tests.

Tests are chosen by the functions that they reach (`checks.Reach`). Calls in processes that a test
starts are not seen; for the drivers of a step a few such tests are named here.
"""

from __future__ import annotations

from pathlib import Path

CORES = ("src/holdfast/engine/core/", "src/holdfast/tables/core/")
MEMORY = "src/holdfast/engine/state/memory/"
DRIVERS = (
    "src/holdfast/engine/train/step/driver.py",
    "src/holdfast/engine/train/exchange/seam.py",
    "src/holdfast/engine/train/script/script_thread.py",
    "src/holdfast/engine/train/script/step_runner.py",
    *(
        f"src/holdfast/engine/train/state/{name}.py"
        for name in ("gpu_pieces", "replicator", "step_image")
    ),
    *(
        f"src/holdfast/engine/train/step/{name}.py"
        for name in (
            *("buckets", "engine", "late_members"),
            *("step_data", "sum_runs"),
        )
    ),
)
ROOT = Path(__file__).resolve().parents[2]


def _find_test(name: str) -> str:
    (found,) = (ROOT / "tests").rglob(f"test_{name}.py")
    return str(found.relative_to(ROOT))


TEST_FILES = tuple(
    _find_test(name)
    for name in """
        absurd_sizes agent_machine audit backup buckets_judged coordinator_machine core decisions
        domains driver feeding fleet fleet_rules formation group_machine interval job_spec
        keyed_tables links measuring missed_steps newcomers order_book piece_memory piece_post
        policies progress protection replicator recalling replica_feeds review_schedule roster
        routine_lines row_servers sampling saves server_places shard_events slow_followers spares
        state_sources step_drivers step_image step_machine step_parts stories stragglers table_sim
        teams tensor_coding thread_cluster training transitions verdict_tables worker_machine
    """.split()
)
DRIVER_TESTS = (
    "tests/engine/jobs/test_exactness.py::test_a_kill_at_any_point_of_a_step[SIGKILL:gather:4:2]",
    "tests/engine/jobs/test_exactness.py::test_the_lost_worker_comes_back",
    "tests/engine/jobs/test_disturbed.py::test_a_late_worker_is_suspended_and_catches_up[0]",
    "tests/engine/jobs/test_memory_tier.py"
    "::test_every_worker_is_killed_and_no_step_is_lost[rs:2+1-3-1]",
)


def paths(root: Path) -> list[str]:
    """Return the files in which bugs are planted."""
    every = [path for part in (*CORES, MEMORY) for path in sorted((root / part).rglob("*.py"))]
    return [
        *(str(path.relative_to(root)) for path in every),
        *(name for name in DRIVERS if (root / name).exists()),
    ]


def test_files(root: Path) -> list[str]:
    """Return the test files whose reach is learnt."""
    return [name for name in TEST_FILES if (root / name).exists()]
