"""Trackers in real jobs: no step twice, one run though the leader dies, incidents reported."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Start, finish
from holdfast.engine.records.incidents import list_incidents

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
    [
        pytest.param("tensorboard", "tensorboard", read_tensorboard, marks=pytest.mark.slow),
        ("mlflow", "mlflow.tracking", read_mlflow),
    ],
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
    assert numbers <= set(range(1, len(list_incidents(run.events())) + 1))


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP requests as a collector does, and keeps their bodies by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.bodies: dict[str, list[bytes]] = {}

    def decode(self, path: str, make: Callable[[], Any]) -> list[Any]:
        """Return the requests that this path has got."""
        found = []
        for body in self.bodies.get(path, []):
            request = make()
            request.ParseFromString(body)
            found.append(request)
        return found


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.mark.slow
def test_a_collector_receives_steps_incidents_and_numbers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    spans_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    metrics_pb2 = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"
    )
    where = tmp_path / "logs"
    where.mkdir()
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with start("otel", str(where), str(STEPS), nproc=2, script="tracked.py") as run:
            finish(run)
        name = run.run_dir.spec().job
        requests = collector.decode("/v1/traces", spans_pb2.ExportTraceServiceRequest)
        measures = collector.decode("/v1/metrics", metrics_pb2.ExportMetricsServiceRequest)
        collector.shutdown()
    groups = [group for request in requests for group in request.resource_spans]
    resources = {a.key: a.value.string_value for g in groups for a in g.resource.attributes}
    assert resources["holdfast.job"] == name
    spans = [span for g in groups for scope in g.scope_spans for span in scope.spans]
    steps = Counter(
        attribute.value.int_value
        for span in spans
        if span.name == "step"
        for attribute in span.attributes
        if attribute.key == "holdfast.step"
    )
    assert set(steps.values()) == {1}
    assert set(range(STEPS // 2 + 1, STEPS)) <= steps.keys()  # a leader that dies may lose its own
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    told = [
        attribute.value.string_value
        for span in spans
        if span.name == "incident"
        for attribute in span.attributes
        if attribute.key == "holdfast.incident"
    ]
    assert any("was lost" in text for text in told)
    numbers = {
        metric.name
        for request in measures
        for group in request.resource_metrics
        for scope in group.scope_metrics
        for metric in scope.metrics
    }
    assert {"holdfast.loss", "holdfast.step", "holdfast.rate", "holdfast.incidents"} <= numbers
