"""Turns the state of a run into Prometheus metrics, by the official client, at each scrape.

Needs `prometheus_client` and `starlette`, an extra. It reads the run's files; the caller asks the
coordinator.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.engine.core.plain_text import escape_controls
from holdfast.engine.records.goodput import Goodput, share_out
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.time_lines import CLASSES_PER_OCTAVE, SHORTEST_STEP_S
from holdfast.engine.runtime.job_status import JobStatus, NodeStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """Serves the text that `collect` returns. Requests that come during one `collect` share it.

    So any number of scrapes need one thread, and the run is read once at a time.
    """

    def __init__(self, collect: Callable[[], bytes]) -> None:
        self._collect = collect
        self._collecting: asyncio.Task[bytes] | None = None

    def application(self) -> Starlette:
        """Return the application for a server."""
        return Starlette(routes=[Route("/metrics", self._scrape)])

    async def _scrape(self, _: Request) -> Response:
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(asyncio.to_thread(self._collect))
        return Response(await asyncio.shield(self._collecting), media_type=CONTENT_TYPE)


class RunCollector(Collector):
    """Collects the metrics of one run. `ask` returns None if no coordinator answers."""

    def __init__(self, run_dir: Path, ask: Callable[[], JobStatus | None]) -> None:
        self._run_dir = run_dir
        self._ask = ask
        self._tail = RunTail(run_dir)

    def describe(self) -> Iterator[Metric]:
        """Return no metrics: their names are not looked up before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        tail = self._tail
        tail.look()
        tail.look_at_loss()
        status = self._ask()
        text = "Whether a coordinator answers."
        yield GaugeMetricFamily("holdfast_up", text, float(status is not None))
        if status is not None:
            tail.note_step(status.step, time.monotonic())
            yield from _job_metrics(status)
        if tail.steps_per_s is not None:
            text = "Steps committed a second, over the last scrapes."
            yield GaugeMetricFamily("holdfast_steps_per_second", text, tail.steps_per_s)
        if tail.loss is not None:
            yield GaugeMetricFamily("holdfast_loss", "Loss of the newest step.", tail.loss)
        yield from self._event_metrics()
        goodput = share_out(self._run_dir, tail.events)
        if goodput is not None:
            yield from _time_metrics(goodput)

    def _event_metrics(self) -> Iterator[Metric]:
        events = CounterMetricFamily("holdfast_events", "Lines of the event log.", labels=["kind"])
        for kind, count in collections.Counter(e["kind"] for e in self._tail.events).items():
            events.add_metric([escape_controls(kind)], count)
        yield events
        incidents = self._tail.incidents
        text = "Faults, and what followed until a step was committed again."
        yield CounterMetricFamily("holdfast_incidents", text, len(incidents))
        pauses_s = sum(each.cost.get("pause_s", 0.0) for each in incidents)
        text = "Seconds from the first sign of a fault to the next committed step."
        yield CounterMetricFamily("holdfast_incident_pause_seconds", text, pauses_s)


def _job_metrics(status: JobStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("holdfast_step", "Steps committed.", status.step)
    yield GaugeMetricFamily("holdfast_view", "Number of the present view.", status.view)
    workers = [worker.state.value for worker in status.workers]
    for name, text, states in (
        ("holdfast_workers", "Workers by state.", workers),
        ("holdfast_nodes", "Nodes by state.", map(_state_of, status.agents)),
    ):
        family = GaugeMetricFamily(name, text, labels=["state"])
        for state, count in collections.Counter(states).items():
            family.add_metric([state], count)
        yield family


def _state_of(node: NodeStatus) -> str:
    if node.silent:
        return "silent"
    return "draining" if node.draining else "heard"


def _time_metrics(goodput: Goodput) -> Iterator[Metric]:
    text = "Seconds of workers by their use; the parts add up to all time."
    times = GaugeMetricFamily("holdfast_worker_time_seconds", text, labels=["part"])
    for part, seconds in goodput.parts().items():
        times.add_metric([part.value], seconds)
    yield times
    text = "Productive share of all workers' time."
    yield GaugeMetricFamily("holdfast_goodput_ratio", text, goodput.share)
    text = "Share of wall time in which steps that count were under way."
    yield GaugeMetricFamily("holdfast_ettr_ratio", text, goodput.ettr)
    text = "How long steps took, counted by each worker."
    yield HistogramMetricFamily("holdfast_step_duration_seconds", text, *_histogram(goodput))


def _histogram(goodput: Goodput) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets, a factor of two apart, and about the sum of all steps."""
    counts, buckets, seen = goodput.step_counts, [], 0
    for octave in range(max(counts, default=0) // CLASSES_PER_OCTAVE + 1):
        first = octave * CLASSES_PER_OCTAVE
        seen += sum(counts.get(first + k, 0) for k in range(CLASSES_PER_OCTAVE))
        buckets.append((f"{SHORTEST_STEP_S * 2 ** (octave + 1):g}", float(seen)))
    return [*buckets, ("+Inf", float(seen))], goodput.step_seconds
