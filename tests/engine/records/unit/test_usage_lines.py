"""The use of nodes and workers: measured, merged, bounded, read again, and drawn."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from holdfast.engine.host.host import HostReader
from holdfast.engine.host.lifetime import SessionUse
from holdfast.engine.host.usage import Usage, measure_usage
from holdfast.engine.records.time_lines import ClockLine, write_clock
from holdfast.engine.records.usage_lines import (
    NodeUsage,
    UsageHeader,
    UsageLine,
    UsageWriter,
    WorkerUse,
    list_nodes,
    merge_lines,
    read_all_usage,
    read_usage,
)
from holdfast.engine.runtime.node.usage_watch import UsageWatch, make_line
from holdfast.reports.charts import Mark
from holdfast.reports.usage_charts import NODES_MAX, draw_usage

HEADER = UsageHeader(node="a/b", host="10.0.0.1", cores=8, memory_bytes=64 * 10**9)
GB = 10**9


def line(at: float, cores: float = 2.0, *, span_s: float = 5.0, **workers: float) -> UsageLine:
    uses = {int(name[1:]): WorkerUse(cores, int(at)) for name, cores in workers.items()}
    return UsageLine(at, span_s, cores, int(at) * GB, 1e6, 2e6, uses)


def test_merged_lines_average_over_time_and_keep_the_most_memory() -> None:
    found = merge_lines([line(5.0, 1.0, w1=1.0), line(20.0, 4.0, span_s=15.0, w1=3.0, w2=4.0)])
    assert (found.at, found.span_s) == (20.0, 20.0)
    assert found.cores == pytest.approx(1.0 / 4 + 4.0 * 3 / 4)
    assert found.memory_bytes == 20 * GB
    assert found.workers[1] == WorkerUse(pytest.approx(1.0 / 4 + 3.0 * 3 / 4), 20)
    assert found.workers[2].cores == pytest.approx(3.0)


def test_a_file_stays_small_and_covers_the_whole_time(tmp_path: Path) -> None:
    writer = UsageWriter(tmp_path, HEADER, bytes_max=4000)
    for n in range(1, 2001):
        writer.append(line(5.0 * n, n % 3, w1=1.0))
        (path,) = (tmp_path / "usage").iterdir()
        assert path.stat().st_size < 4500
    assert list_nodes(tmp_path) == ["a/b"]
    found = read_usage(tmp_path, "a/b")
    assert found is not None
    assert found.header == HEADER
    covered = sum(each.span_s for each in found.lines)
    assert covered == pytest.approx(found.lines[-1].at)
    assert found.lines[-1].at > 0.9 * 10_000
    cores = sum(each.cores * each.span_s for each in found.lines) / covered
    assert cores == pytest.approx(1.0, abs=0.02)


def test_a_node_that_begins_again_goes_on_with_its_file_and_odd_lines_are_left_out(
    tmp_path: Path,
) -> None:
    UsageWriter(tmp_path, HEADER).append(line(100.0, w1=1.0))
    path = next((tmp_path / "usage").iterdir())
    with path.open("a") as file:
        file.write('{"kind":"used","at":-1}\n{"kind":"odd"}\nno JSON\n')
    UsageWriter(tmp_path, HEADER).append(line(105.0))
    UsageWriter(tmp_path, HEADER).append(line(200.0, w2=2.0))
    path.with_name("broken.jsonl").write_text("nothing\n")
    clock = ClockLine(host=HEADER.host, at=100.0, ahead_s=50.0, error_s=0.1)
    write_clock(tmp_path, HEADER.node, clock)
    (found,) = read_all_usage(tmp_path)
    curves = found.list_curves(40.0)
    times = [at for at, _ in curves["cores"]["node"]]
    assert times == [7.5, 12.5, 102.5, 107.5]  # the middles, by the coordinator's clock
    values = {name: [y for _, y in points] for name, points in curves["cores"].items()}
    assert [math.isnan(y) for y in values["node"]] == [False, False, True, False]
    assert [math.isnan(y) for y in values["worker 1"]] == [False, True, True, True]
    assert values["worker 2"][-1] == 2.0
    assert curves["network"]["sent"][0][1] == 2e6
    assert read_usage(tmp_path, "broken") is None
    path.write_text(path.read_text().partition("\n")[2])  # as a mirror has the end of a long file
    assert len(read_all_usage(tmp_path)[0].lines) == 3
    assert read_usage(tmp_path, "../usage/a%2Fb") is None


def test_the_use_between_two_looks_is_a_difference() -> None:
    def look(at: float, cpu_s: float, sent: int, sessions: dict[int, SessionUse]) -> Usage:
        return Usage(
            at=1e9 + at,
            at_s=at,
            cpu_s=cpu_s,
            memory_bytes=7,
            received=0,
            sent=sent,
            sessions=sessions,
        )

    before = look(0.0, 10.0, 100, {41: SessionUse(5.0, 1), 42: SessionUse(5.0, 1)})
    now = look(4.0, 16.0, 50, {41: SessionUse(11.0, 2), 43: SessionUse(9.0, 3)})
    found = make_line(before, now, {1: 41, 2: 42, 3: 43})
    assert (found.span_s, found.cores, found.sent) == (4.0, 1.5, 0.0)  # the counter began again
    assert found.workers == {1: WorkerUse(1.5, 2)}


def test_this_machine_is_measured(tmp_path: Path) -> None:
    session = os.getsid(0)
    watch = UsageWatch(tmp_path, "n", "h", lambda: {3: session})
    watch.look()
    limit = measure_usage(HostReader(), ()).cpu_s + 0.2
    while measure_usage(HostReader(), ()).cpu_s < limit:
        pass
    watch.look()
    (usage,) = read_all_usage(tmp_path)
    (found,) = usage.lines
    assert usage.header.cores == os.cpu_count()
    assert 0 < found.cores <= 1.5 * usage.header.cores
    assert found.workers[3].cores > 0
    assert found.workers[3].memory_bytes > 1e6
    assert 1e6 < found.memory_bytes < usage.header.memory_bytes


def test_network_devices_count_and_bridges_over_them_do_not(tmp_path: Path) -> None:
    table = ["Inter-| Receive", " face |bytes"]
    for name, sent in (("lo", 1), ("eth0", 20), ("docker0", 300)):
        table.append(f"  {name}: {10 * sent} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0")
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text("\n".join(table))
    reader = HostReader(tmp_path)
    assert (measure_usage(reader, ()).received, measure_usage(reader, ()).sent) == (3200, 320)
    (tmp_path / "sys/class/net/eth0/device/x").mkdir(parents=True)
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("1000\n")
    (counters / "port_xmit_data").write_text("100\n")
    assert (measure_usage(reader, ()).received, measure_usage(reader, ()).sent) == (4200, 420)


def test_a_node_is_drawn_with_its_workers_and_marks() -> None:
    lines = [line(5.0 * n, w1=1.0, w2=0.5) for n in range(1, 9)]
    nodes = [NodeUsage(HEADER, lines)] * (NODES_MAX + 2)
    page = "".join(draw_usage(nodes, [Mark(20.0, "lost", target="incident-1.7")], 0.0))
    assert page.count("<svg") == 3 * NODES_MAX
    assert page.count('href="#incident-1.7"') == 3 * NODES_MAX
    assert page.count("<title>worker 2</title>") == 2 * NODES_MAX
    assert "2 further nodes are not drawn" in page
    assert draw_usage([], [], 0.0) == []
    assert json.dumps(page).count("nan") == 0
