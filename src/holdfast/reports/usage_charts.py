"""Draws the use of processors, memory and network of each node for the report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.engine.core.plain_text import escape_html
from holdfast.engine.records.usage_lines import NodeUsage
from holdfast.reports.charts import Mark, Point, draw_lines

NODES_MAX = 16
OPEN_MAX = 2  # the charts of more nodes are folded up
MEASURES = {  # by key: a title, and the unit in which it is drawn
    "cores": ("Busy processors", 1.0),
    "memory": ("Memory, in GB", 1e9),
    "network": ("Network, in MB/s", 1e6),
}
HEIGHT = 150.0


def draw_usage(nodes: Sequence[NodeUsage], marks: Sequence[Mark], began: float) -> list[str]:
    """Return the part of the page on the machines; empty if no node was measured."""
    if not nodes:
        return []
    shown = "open" if len(nodes) <= OPEN_MAX else ""
    found = [
        "<h2>Machines</h2>",
        '<p class="dim">The bold line is the node, and each thin one a worker with the processes '
        "that it has started. Memory that processes share counts for each of them.</p>",
    ]
    for node in nodes[:NODES_MAX]:
        head = node.header
        curves = node.list_curves(began)
        charts = "".join(
            f"<p>{title}</p>{_draw(curves[measure], unit, marks)}"
            for measure, (title, unit) in MEASURES.items()
        )
        found.append(
            f"<details {shown}><summary><b>{escape_html(head.node)}</b> "
            f'<span class="dim">{head.cores} processors, {head.memory_bytes / 1e9:.3g} GB</span>'
            f"</summary>{charts}</details>"
        )
    if len(nodes) > NODES_MAX:
        found.append(f'<p class="dim">{len(nodes) - NODES_MAX} further nodes are not drawn.</p>')
    return found


def _draw(curves: Mapping[str, Sequence[Point]], unit: float, marks: Sequence[Mark]) -> str:
    lines = {name: [(x, y / unit) for x, y in points] for name, points in curves.items()}
    return draw_lines(lines, marks, label="seconds since the run began", height=HEIGHT)
