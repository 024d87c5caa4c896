"""Reads records of runs: reports, a dashboard, comparisons, replays, traces, metrics."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Plugin

PLUGIN = Plugin(
    commands={
        "events": Command(
            text="print the event log of a run", module="holdfast.reports.commands.events_command"
        ),
        "explain": Command(
            text="list the incidents of a run, or tell the story and the cost of one",
            module="holdfast.reports.commands.explain_command",
        ),
        "top": Command(
            text="show a running job on the terminal, and keep the picture up to date",
            module="holdfast.reports.commands.top_command",
        ),
        "report": Command(
            text="write a page about a run: where the time went, and what faults cost",
            module="holdfast.reports.commands.report_command",
        ),
        "trace": Command(
            text="write a run as a trace for Perfetto",
            module="holdfast.reports.commands.trace_command",
        ),
        "metrics": Command(
            text="serve a run's metrics to Prometheus",
            module="holdfast.reports.commands.metrics_command",
        ),
        "dashboard": Command(
            text="show a run in a browser, and drain nodes and move workers there",
            module="holdfast.reports.commands.dashboard_command",
        ),
        "compare": Command(
            text="find the first step at which two runs of one job differ, and what differs",
            module="holdfast.reports.commands.compare_command",
        ),
        "replay": Command(
            text="compute steps of a run again, and compare them with its records",
            module="holdfast.reports.commands.replay_command",
        ),
        "audit": Command(
            text="compute a random share of a run's steps again, and compare them",
            module="holdfast.reports.commands.audit_command",
        ),
        "dump": Command(
            text="collect files that help to understand a run elsewhere",
            module="holdfast.reports.commands.dump_command",
        ),
        "incident": Command(
            text="make a coordinator's decisions again, from a recording",
            module="holdfast.reports.commands.incident_command",
        ),
    },
    listeners={"dashboard": "holdfast.reports.commands.dashboard_command"},
)
