"""Readers of a run besides the report: the live picture, metrics for Prometheus, and the trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from conftest import Start, finish
from holdfast.cli.main import main
from holdfast.engine.records.goodput import share_out
from holdfast.engine.records.incidents import list_incidents
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.summary import STEPS_MIN, describe_left, estimate_left_s
from holdfast.engine.records.time_lines import (
    ClockLine,
    ProcessHeader,
    ProcessTimes,
    SpentLine,
    TimesWriter,
    TimeUse,
    choose_clock,
    measure,
    read_clocks,
    times_path,
    write_clock,
)
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.commands.trace_command import trace_entries
from holdfast.reports.dashboard.run_files import RunFiles
from places import ROOT


def metrics_in(text: str) -> dict[str, float]:
    """Return the samples of a scrape by name and labels."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def scrape(run: LocalRun, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["metrics", str(run.run_dir.path), "--once"]) == 0
    return metrics_in(capsys.readouterr().out)


@pytest.mark.slow
def test_a_disturbed_run_while_it_works_and_after_its_end(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    steps, gate = 14, tmp_path / "gate"
    options = ("--steps", str(steps), "--fault", "SIGKILL:gather:4:2", "--hold", "8", str(gate))
    with start(*options) as run:
        path = str(run.run_dir.path)
        run.until(lambda: run.events("resumed"), 60, "the fault is over")
        run.until(lambda: run.status()["step"] >= 8, 60, "step 8 is reached")
        found = scrape(run, capsys)
        assert main(["top", path, "--once"]) == 0
        picture = capsys.readouterr().out
        gate.touch()
        finish(run)
    assert found["holdfast_up"] == 1
    assert 8 <= found["holdfast_step"] < steps
    assert sum(v for name, v in found.items() if name.startswith("holdfast_workers{")) >= 3
    assert found['holdfast_nodes{state="heard"}'] == 1
    assert "training" in picture
    assert re.search(r"time left -|about .* left", picture)
    assert "worker 2 was lost" in picture
    assert re.search(r"goodput \d+\.\d%", picture)
    assert re.search(r"loss \d", picture)

    goodput = share_out(path, run.events())
    assert goodput is not None
    found = scrape(run, capsys)
    assert found["holdfast_up"] == 0
    assert "holdfast_step" not in found  # unknown is not zero
    incidents = list_incidents(run.events())  # a busy machine may add one
    assert found["holdfast_incidents_total"] == len(incidents) >= 1
    assert found['holdfast_events_total{kind="lost"}'] == len(run.events("lost"))
    for part, seconds in goodput.parts().items():
        name = f'holdfast_worker_time_seconds{{part="{part.value}"}}'
        assert found[name] == pytest.approx(seconds)
    assert found["holdfast_goodput_ratio"] == pytest.approx(goodput.share)
    assert found['holdfast_step_duration_seconds_bucket{le="+Inf"}'] == sum(
        goodput.step_counts.values()
    )
    check_dashboard(found)

    (clocks,) = read_clocks(path).values()
    assert all(abs(each.ahead_s) <= each.error_s for each in clocks)  # one machine has one clock
    assert main(["trace", path]) == 0
    entries = json.loads((Path(path) / "trace.json").read_text())["traceEvents"]
    spans = [e for e in entries if e["ph"] == "X" and e["cat"] == "worker"]
    times_s = sum(e["dur"] for e in spans) / 1e6
    assert times_s <= goodput.total_s
    assert times_s == pytest.approx(goodput.total_s, rel=0.5)
    assert [e["name"] for e in entries if e["ph"] == "b"] == [each.title for each in incidents]
    starts = {e["id"]: e["ts"] for e in entries if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in entries if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[each] <= ends[each] for each in starts)


def check_dashboard(found: dict[str, float]) -> None:
    """Check that Grafana's dashboard shows exactly the metrics that there are."""
    dashboard = (ROOT / "contrib" / "grafana" / "holdfast.json").read_text()
    shown = set(re.findall(r"holdfast_[a-z_]+", dashboard))
    told = {name.partition("{")[0] for name in found}
    live = {"holdfast_step", "holdfast_view", "holdfast_workers", "holdfast_nodes"}
    live |= {"holdfast_steps_per_second", "holdfast_loss"}
    assert shown <= told | live
    counted = {f"holdfast_step_duration_seconds_{end}" for end in ("count", "sum")}
    assert told <= shown | counted


@pytest.mark.slow
def test_metrics_are_served_to_whoever_asks(start: Start) -> None:
    pytest.importorskip("prometheus_client")
    with start("--steps", "2", nproc=1) as run:
        finish(run)
    command = [sys.executable, "-m", "holdfast.cli.main", "metrics", str(run.run_dir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=30) as answer:
                found = metrics_in(answer.read().decode())
        finally:
            process.kill()
    assert found["holdfast_up"] == 0
    assert found["holdfast_loss"] > 0


def test_a_tail_reads_nothing_twice_and_no_half_lines(tmp_path: Path) -> None:
    log, tail = tmp_path / "events.jsonl", RunTail(tmp_path)
    assert tail.look() == []
    one = json.dumps({"time": 1.0, "kind": "lost", "text": "gone"})
    log.write_text(one + "\n" + one[:10])
    assert [e["kind"] for e in tail.look()] == ["lost"]
    with open(log, "a") as file:
        file.write(one[10:] + "\nnonsense\n[]\n")
    assert len(tail.look()) == 1
    assert tail.look() == []
    assert len(tail.events) == 2


def test_the_rate_is_that_of_the_last_seconds() -> None:
    tail = RunTail(Path())
    assert tail.steps_per_s is None
    for second in range(40):
        tail.note_step(10 * min(second, 20) + 2 * max(second - 20, 0), float(second))
    assert tail.steps_per_s == pytest.approx(2.0)


def test_spans_of_a_trace_follow_each_other_without_gaps() -> None:
    lines = [
        SpentLine(step=1, spent={TimeUse.TASK: 1.0, TimeUse.WAIT: 0.5}),
        SpentLine(step=2, spent={TimeUse.STALL: 2.0}),
    ]
    process = ProcessTimes(3, 2, 100.0, "10.0.0.1", lines)
    entries = list(trace_entries([process], [{"time": 99.0, "kind": "node", "text": "came"}]))
    spans = [e for e in entries if e.get("cat") == "worker"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("task", 1e6, 1e6),
        ("wait", 2e6, 0.5e6),
        ("stall", 2.5e6, 2e6),
    ]
    names = [e["args"]["name"] for e in entries if e["ph"] == "M"]
    assert names == ["job", "events", "incidents", "node 10.0.0.1", "worker 3"]


def test_the_rate_does_not_count_the_time_before_the_first_step() -> None:
    tail = RunTail(Path())
    for second in range(10):
        tail.note_step(5 * max(second - 6, 0), float(second))
    assert tail.steps_per_s == pytest.approx(5.0)
    for second in range(10, 30):
        tail.note_step(15, float(second))
    assert tail.steps_per_s == 0.0


def spent(left: int, **uses: float) -> SpentLine:
    return SpentLine(0, {TimeUse(use): s for use, s in uses.items()}, left=left)


def test_the_time_left_follows_from_the_pace_of_steps_without_first_ones_and_pauses() -> None:
    first = [spent(0, starting=9.0), spent(100, joining=3.0, task=40.0)]
    steady = [spent(100 - n, task=1.5, wait=0.5) for n in range(1, 11)]
    assert estimate_left_s([first + steady[: STEPS_MIN - 1]]) is None
    assert estimate_left_s([first + steady]) == pytest.approx(90 * 2.0)
    pause = [spent(90, stall=60.0, wait=1.0), spent(89, transfer=5.0, task=1.0)]
    assert estimate_left_s([first + steady + pause]) == pytest.approx(89 * 22.0 / 11)
    fresh = [spent(0, starting=9.0), spent(80, task=30.0)]  # a process that was just started
    assert estimate_left_s([fresh, first + steady]) == pytest.approx(80 * 2.0)


def test_the_time_left_is_unknown_after_a_loop_and_when_the_job_went_back() -> None:
    steady = [spent(100 - n, task=1.0) for n in range(20)]
    assert estimate_left_s([]) is None
    assert estimate_left_s([[*steady, spent(0, end=1.0)]]) is None
    back = [spent(95, task=1.0), spent(94, task=1.0)]
    assert estimate_left_s([[*steady, *back]]) is None
    assert describe_left(0.2) == "about 1 s left"
    assert describe_left(754.4) == "about 12 min 34 s left"


def test_all_views_have_the_same_time_left(tmp_path: Path) -> None:
    writer = TimesWriter(times_path(tmp_path, 0, 1), ProcessHeader(0, 1, 100.0))
    assert RunTail(tmp_path).estimate_left_s() is None
    for n in range(2000):  # more than is read
        writer.append(spent(5000 - n, task=0.5))
    assert RunTail(tmp_path).estimate_left_s() == pytest.approx(3001 * 0.5)
    assert RunFiles(RunDir(tmp_path)).read_time_left() == {"left": pytest.approx(3001 * 0.5)}
    (tmp_path / "result.json").write_text('{"outcome": ""}')
    assert RunFiles(RunDir(tmp_path)).read_time_left() == {"left": None}


def test_a_clock_that_drifts_is_corrected_as_it_was_at_that_time() -> None:
    def compared(at: float, ahead_s: float, error_s: float) -> ClockLine:
        return ClockLine(host="a", at=at, ahead_s=ahead_s, error_s=error_s)

    vague, early, late = compared(0, 0.4, 0.5), compared(9, 0.1, 0.01), compared(90_000, 4, 0.001)
    lines = [vague, early, late]
    assert choose_clock(lines, 5.0) == early
    assert choose_clock(lines, 90_100.0) == late
    assert choose_clock(lines, 40_000.0) == early
    assert choose_clock((), 5.0) is None


def test_a_clock_that_is_three_seconds_ahead_is_corrected_and_named(tmp_path: Path) -> None:
    ahead_s, began = 3.0, 1000.0
    for node, skew in (("one", 0.0), ("two", ahead_s)):
        for at, there_s, back_s in ((began, 0.4, 0.1), (began + 1, 0.001, 0.005)):
            asked, heard = at + skew, at + there_s + back_s + skew
            line = measure(f"host-{node}", asked, at + there_s, heard)
            assert line is not None
            assert abs(line.ahead_s - skew) <= line.error_s
            write_clock(tmp_path, node, line)
    assert measure("x", 5.0, 5.0, 4.9) is None
    with open(tmp_path / "clocks" / "one.jsonl", "a") as file:
        file.write('{"host": 3}\nhalf')
    for worker, (host, skew) in enumerate((("host-one", 0.0), ("host-two", ahead_s))):
        header = ProcessHeader(worker, 1, began + skew, host)
        TimesWriter(times_path(tmp_path, worker, 1), header).append(spent(1, task=2.0))
    (tmp_path / "job.json").touch()
    event = json.dumps({"time": began, "kind": "node", "text": "came"})
    (tmp_path / "events.jsonl").write_text(event + "\n")
    assert main(["trace", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = [e["ts"] for e in entries if e.get("cat") == "worker"]
    assert starts == pytest.approx([0.0, 0.0], abs=4000)  # microseconds
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == [
        "job",
        "node host-one",
        "node host-two (clock 3.002 s ahead, corrected to 0.003 s)",
    ]
