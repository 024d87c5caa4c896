"""Sends steps and incidents of a job to OpenTelemetry as spans, and numbers as metrics.

Make one on all workers before the loops: `OpenTelemetry(job)`. The worker that acts for the job
sends. The SDK's queues are bounded: training does not wait for a collector that is slow or away.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.incidents import Incident
from holdfast.engine.train.job import Job
from holdfast.reports.trackers import Tracker, describe_ended, name_of

_NS = 1_000_000_000


class OpenTelemetry(Tracker):
    """Exports by OTLP over HTTP, to the collector that the `OTEL_EXPORTER_OTLP_...` variables name.

    Each step is a span from the end of the step before to its own end, each incident a span from
    its first sign to its end. Ids follow from the job's name: a span that is sent twice is the
    same one.
    """

    def __init__(self, job: Job) -> None:
        """Check that the packages are there. UserError."""
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk  # noqa: F401
        except ImportError:
            raise UserError(
                "OpenTelemetry needs its SDK and the exporter: pip install 'holdfast[otel]'"
            ) from None
        super().__init__(job)
        self._sender: _Sender | None = None  # made on the worker that acts for the job only
        self._before = 0  # end of the last step, in nanoseconds

    def log_step(self, index: int, numbers: Mapping[str, float]) -> None:
        sender, now = self._open(), time.time_ns()
        named = {"holdfast.step": index, **{f"holdfast.{k}": v for k, v in numbers.items()}}
        sender.span("step", str(index), self._before or now, now, named)
        self._before = now
        sender.measure(named)

    def log_incident(self, index: int, number: int, incident: Incident) -> None:
        began, ended = (round(at * _NS) for at in (incident.began_at, incident.ended_at))
        costs = {f"holdfast.cost.{k}": v for k, v in incident.cost.items()}
        attributes = {"holdfast.step": index, "holdfast.incident": describe_ended(incident)}
        sender = self._open()
        sender.span("incident", incident.name, began, ended, {**attributes, **costs})
        sender.measure({"holdfast.incidents": number})

    def _open(self) -> _Sender:
        self._sender = self._sender or _Sender(name_of(self._job))
        return self._sender


class _Sender:
    """Sends by the SDK's providers, which send the rest of their queues when the process ends."""

    def __init__(self, job: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        class Ids(IdGenerator):
            """Returns ids that follow from the name of the span."""

            name = ""

            def generate_trace_id(self) -> int:
                return _id_of(self.name, 16)

            def generate_span_id(self) -> int:
                return _id_of(self.name, 8)

        resource = Resource.create({"service.name": "holdfast", "holdfast.job": job})
        self._job = job
        self._ids = Ids()
        spans = TracerProvider(id_generator=self._ids, resource=resource)
        spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        meters = MeterProvider([reader], resource=resource)
        self._tracer = spans.get_tracer("holdfast")
        self._meter = meters.get_meter("holdfast")
        self._gauges: dict[str, Any] = {}

    def span(
        self, kind: str, name: str, began: int, ended: int, attributes: Mapping[str, Any]
    ) -> None:
        """Send a span; times in nanoseconds since the epoch."""
        self._ids.name = f"{self._job} {kind} {name}"
        found = self._tracer.start_span(kind, start_time=began, attributes=dict(attributes))
        found.end(end_time=ended)

    def measure(self, numbers: Mapping[str, float]) -> None:
        """Set gauges to these numbers."""
        for name, number in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(number)


def _id_of(name: str, size: int) -> int:
    found = hashlib.blake2b(name.encode(), digest_size=size).digest()
    return int.from_bytes(found, "big") or 1
