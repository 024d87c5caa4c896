"""Trackers in real jobs: no step twice, one run though the leader dies, incidents told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Start, finish
from holdfast.observe.incidents import find_incidents

STEPS = 20
Points = list[tuple[str, int, float]]  # name, step, value


def read_tensorboard(where: Path, name: str) -> Points:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: Points = []
    for path in sorted(where.glob("events.*")):
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.float_val:
                    found.append((value.tag, event.step, float(value.tensor.float_val[0])))
    return found


def read_mlflow(where: Path, name: str) -> Points:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(f"file://{where}/mlruns")
    experiment = client.get_experiment_by_name("holdfast").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.data.tags["holdfast.job"] == name
    assert any("was lost" in text for tag, text in run.data.tags.items() if "incident" in tag)
    histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    return [(point.key, point.step, point.value) for points in histories for point in points]


@pytest.mark.parametrize(
    ("kind", "package", "read"),
    [("tensorboard", "tensorboard", read_tensorboard), ("mlflow", "mlflow.tracking", read_mlflow)],
)
def test_no_step_is_logged_twice_and_incidents_are(
    kind: str,
    package: str,
    read: Callable[[Path, str], Points],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = tmp_path / "logs"
    where.mkdir()
    with start(kind, str(where), str(STEPS), nproc=2, script="tracked.py") as run:
        finish(run)
    points = read(where, run.run_dir.spec().job)
    losses = Counter(step for name, step, _ in points if name == "loss")
    assert set(losses.values()) == {1}
    assert set(range(STEPS)) - losses.keys() <= {STEPS // 2}  # the leader dies in its body
    assert {(step, round(v, 3)) for name, step, v in points if name == "rate"} == {
        (step, round(0.1 * step, 3)) for step in losses
    }
    numbers = {int(value) for name, _, value in points if name == "holdfast/incidents"}
    assert numbers
    assert numbers <= set(range(1, len(find_incidents(run.events())) + 1))
