"""Where the time of a run goes: parts sum up to the whole, and faults are charged for theirs."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.records.goodput import Goodput, measure_union, share_times
from holdfast.engine.records.incidents import Part
from holdfast.engine.records.summary import summarize
from holdfast.engine.records.time_lines import ProcessTimes, SpentLine, TimeUse
from holdfast.reports.commands.report_command import RunFacts, write_page

T0 = 1_000_000.0


def spent(step: int, **uses: float) -> SpentLine:
    return SpentLine(step=step, spent={TimeUse(name): s for name, s in uses.items()})


def process(worker: int, incarnation: int, began: float, *lines: SpentLine) -> ProcessTimes:
    return ProcessTimes(worker, incarnation, T0 + began, lines=list(lines))


def event(time: float, kind: str, **more: object) -> dict[str, object]:
    return {"time": T0 + time, "kind": kind, "text": f"about {kind}", **more}


FIRST_VIEW = event(2, "view", view=1, step=0, id="1.1")


def share(processes: list[ProcessTimes], events: list[dict[str, object]]) -> Goodput:
    found = share_times(processes, events)
    assert found is not None
    total = sum(found.parts().values())
    assert total == pytest.approx(sum(s.seconds for s in found.stretches))
    return found


def test_a_worker_that_is_killed_and_replaced() -> None:
    events = [
        event(0, "node", node="a"),
        FIRST_VIEW,
        event(10.1, "lost", worker=1, id="1.2"),
        event(10.2, "view", view=2, step=8, id="1.3", causes=["1.2"]),
        event(10.7, "resumed", view=2, step=8, id="1.4", causes=["1.3"], cost={"pause_s": 0.6}),
        event(20, "stopped"),
    ]
    processes = [
        process(
            0,
            1,
            0.5,
            spent(0, starting=1.0, joining=0.5),
            spent(8, task=7.0, update=0.5, wait=0.5),
            spent(8, stall=0.5),
            spent(9, again=0.5, task=0.5),
            spent(18, task=7.5, data=0.5, end=0.5),
        ),
        process(1, 1, 0.5, spent(0, starting=1.5), spent(8, task=8.0)),
        process(1, 2, 12.0, spent(8, starting=1.0, joining=1.0), spent(18, task=6.0)),
    ]
    found = share(processes, events)
    assert found.wall_s == 20.0
    assert found.total_s == pytest.approx(40.0)
    parts = found.parts()
    assert parts[Part.PRODUCTIVE] == pytest.approx(7.5 + 0.5 + 7.5 + 8.0 + 6.0)
    assert parts[Part.STARTING] == pytest.approx(2.0 + 2.0 + 2.0)  # from the run's beginning on
    assert parts[Part.STALLED] == 0.5
    assert parts[Part.AGAIN] == 0.5
    # From its last line to the start of the next process, and at the end of the run.
    assert found.parts(1)[Part.DEGRADED] == pytest.approx(2.0)
    assert found.parts(0)[Part.DEGRADED] == pytest.approx(0.0)
    (cost,) = found.costs
    assert cost.parts[Part.STALLED] == 0.5
    assert cost.parts[Part.DEGRADED] == pytest.approx(2.0)
    assert cost.parts[Part.STARTING] == pytest.approx(2.0)
    assert cost.parts[Part.AGAIN] == 0.5
    assert 0.85 < found.ettr < 0.95  # all but the start, the stall and the last wait
    assert found.steps == 18


def test_steps_that_the_job_goes_back_behind_are_lost() -> None:
    events = [
        FIRST_VIEW,
        event(13, "back", id="1.2"),
        event(13.5, "view", view=2, step=4, id="1.3", causes=["1.2"], again=True),
        event(20, "stopped"),
    ]
    processes = [
        process(0, 1, 0, spent(0, starting=2.0), spent(2, task=4.0), spent(6, task=6.0)),
        process(0, 2, 14, spent(4, starting=1.0), spent(9, task=5.0)),
    ]
    found = share(processes, events)
    parts = found.parts()
    assert parts[Part.LOST] == pytest.approx(3.0)  # two of the four steps in the line
    assert parts[Part.PRODUCTIVE] == pytest.approx(4.0 + 3.0 + 5.0)
    assert parts[Part.DEGRADED] == pytest.approx(2.0)
    assert parts[Part.STARTING] == pytest.approx(3.0)


def test_nothing_is_lost_if_no_view_repeats_steps() -> None:
    """A line may list steps before and after a planned view."""
    join = event(5, "view", view=2, step=3)
    found = share(
        [process(0, 1, 0, spent(0, starting=2.0), spent(6, task=6.0))], [FIRST_VIEW, join]
    )
    assert found.parts()[Part.LOST] == 0.0


def test_the_time_until_a_job_is_resumed_is_in_no_figure() -> None:
    events = [FIRST_VIEW, event(8, "save"), event(30, "resume", id="2.s1"), event(40, "stopped")]
    lives = [
        process(0, 1, 0, spent(0, starting=2.0), spent(6, task=8.0)),
        process(0, 2, 32, spent(6, starting=1.0), spent(12, task=7.0)),
    ]
    found = share(lives, events)
    assert found.still_s == pytest.approx(20.0)
    assert found.wall_s == found.total_s == pytest.approx(20.0)
    assert found.parts()[Part.DEGRADED] == pytest.approx(2.0)  # from then to the process
    assert found.parts()[Part.PRODUCTIVE] == pytest.approx(15.0)
    text = "for 20 s more the whole job was down or frozen"
    assert text in " ".join(summarize(found))
    facts = RunFacts(name="run", script="train.py", outcome="", goodput=found, losses={})
    assert text in write_page(facts)


def test_the_time_in_which_all_workers_were_frozen_is_in_no_figure() -> None:
    def frozen(worker: int, before: float, seconds: float) -> ProcessTimes:
        after = spent(9, task=20.0 - before - seconds)
        lines = spent(4, task=before), spent(4, frozen=seconds), after
        return process(worker, 1, 0, *lines)

    found = share([frozen(0, 5.0, 10.0), frozen(1, 4.0, 10.0)], [event(0, "view", view=1, step=0)])
    assert found.still_s == pytest.approx(9.0)
    assert found.parts()[Part.DEGRADED] == pytest.approx(2.0)  # each was frozen alone for a second
    assert found.total_s == pytest.approx(2 * 11.0)
    assert found.share == pytest.approx(20.0 / 22.0)


def test_workers_whose_times_are_elsewhere_are_named_with_their_share() -> None:
    views = [
        event(0, "view", view=1, step=0, members="0, 1, 5-6"),
        event(15, "view", view=2, step=9, members="0"),
        event(20, "stopped"),
    ]
    lives = [process(worker, 1, 0, spent(9, task=20.0)) for worker in (0, 1)]
    found = share(lives, views)
    assert found.missing == {5: 15.0, 6: 15.0}
    assert found.missing_share == pytest.approx(30.0 / 65.0)
    lines = summarize(found)
    assert lines[1].startswith("goodput 100.0% of the time of 2 workers")
    assert lines[3].startswith("the times of workers 5, 6 are missing, 46% of all workers' time: ")


def test_of_many_views_the_earliest_later_one_says_what_is_lost() -> None:
    resumes = [(4.5, 5), (6.5, 7), (8, 20)]
    views = [event(t, "view", view=n, step=s, again=True) for n, (t, s) in enumerate(resumes, 2)]
    lines = [spent(2, task=2.0), spent(6, task=2.0), spent(8, task=2.0), spent(12, task=4.0)]
    found = share([process(0, 1, 0, *lines)], [event(0, "view", view=1, step=0), *views])
    # The last of four steps, then both of two, which step 5 comes before, then all behind step 7.
    assert found.parts()[Part.LOST] == pytest.approx(2.0 / 4 + 2.0 + 4.0)


def test_workers_that_come_later_or_go_on_purpose() -> None:
    events = [
        FIRST_VIEW,
        event(8, "leave", worker=1, id="1.2"),
        event(9, "join", id="1.3"),
        event(20, "stopped"),
    ]
    processes = [
        process(0, 1, 0, spent(0, starting=2.0), spent(6, task=18.0)),
        process(1, 1, 0, spent(0, starting=2.0), spent(3, task=6.0)),
        process(2, 1, 9, spent(3, starting=1.0), spent(6, task=10.0)),
    ]
    found = share(processes, events)
    assert found.total_s == pytest.approx(20 + 8 + 11)
    assert found.parts()[Part.DEGRADED] == 0


def test_two_processes_of_one_worker_never_count_at_once() -> None:
    events = [FIRST_VIEW, event(10, "stopped")]
    processes = [
        process(0, 1, 0, spent(0, starting=2.0), spent(5, task=5.0)),  # frozen, and fenced late
        process(0, 2, 6, spent(4, starting=1.0), spent(6, task=2.0)),
    ]
    found = share(processes, events)
    assert found.total_s == pytest.approx(10.0)
    assert found.parts()[Part.PRODUCTIVE] == pytest.approx(4.0 + 2.0)
    assert found.parts()[Part.DEGRADED] == pytest.approx(1.0)


def test_there_is_nothing_to_share_out_without_times() -> None:
    assert share_times([], [FIRST_VIEW]) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=20))
def test_unions(pairs: list[tuple[float, float]]) -> None:
    intervals = [(began, began + seconds) for began, seconds in pairs]
    found = measure_union(intervals)
    ticks = 0.05
    inside = sum(any(began <= k * ticks < ended for began, ended in intervals) for k in range(2500))
    assert found == pytest.approx(inside * ticks, abs=ticks * (len(pairs) + 1) * 2)


@st.composite
def lives(draw: st.DrawFn) -> list[ProcessTimes]:
    """Return processes of a few workers that may overlap, end early, or have written no line."""
    found = []
    for worker in range(draw(st.integers(1, 4))):
        at = draw(st.floats(0, 5))
        for incarnation in range(1, draw(st.integers(1, 4)) + 1):
            step, lines = 0, []
            for _ in range(draw(st.integers(0, 5))):
                step += draw(st.integers(0, 3))
                uses = draw(st.dictionaries(st.sampled_from(TimeUse), st.floats(0, 9), max_size=3))
                lines.append(SpentLine(step=step, spent=uses))
            found.append(ProcessTimes(worker, incarnation, T0 + at, lines=lines))
            at += draw(st.floats(0.01, 20))
    return found


@given(lives(), st.lists(st.tuples(st.floats(0, 60), st.integers(0, 9)), max_size=4))
def test_the_parts_sum_up_to_wall_time_x_workers(
    processes: list[ProcessTimes], resumes: list[tuple[float, int]]
) -> None:
    views = [
        event(time, "view", view=n, step=step, again=True)
        for n, (time, step) in enumerate(resumes, 2)
    ]
    found = share(processes, [event(5.5, "view", view=1, step=0), *views])
    expected = found.wall_s * len(found.workers)
    assert found.total_s == pytest.approx(expected)
    assert all(seconds >= -1e-6 for seconds in found.parts().values())
    for worker in found.workers:
        theirs = [s for s in found.stretches if s.worker == worker]
        for one, other in itertools.pairwise(theirs):
            pairs = [(max(a, one.ended), min(b, other.began)) for a, b in found.still]
            still_s = measure_union([(a, b) for a, b in pairs if a < b])
            assert other.began - one.ended == pytest.approx(still_s, abs=1e-6)


def test_the_page_names_what_happened_and_needs_nothing_else() -> None:
    events = [
        FIRST_VIEW,
        event(9, "lost", worker=1, id="1.2", text="worker 1 <was> lost"),
        event(9.2, "view", view=2, step=4, id="1.3", causes=["1.2"]),
        event(9.5, "resumed", view=2, step=4, id="1.4", causes=["1.3"], cost={"pause_s": 0.5}),
    ]
    found = share(
        [process(w, 1, 0, spent(0, starting=2.0), spent(6, task=7.0)) for w in range(2)], events
    )
    losses = {step: 1.0 / (step + 1) for step in range(6)} | {3: float("nan")}
    facts = RunFacts(name="r<1>", script="train.py", outcome="", goodput=found, losses=losses)
    page = write_page(facts)
    assert "worker 1 &lt;was&gt; lost" in page
    for text in ("<was>", "r<1>", "http", "<script"):
        assert text not in page
    assert page.count("<svg") == page.count("</svg>") == 2  # no steps were timed: no third chart
    names = re.findall(r' id="([^"]+)"', page)
    assert sorted(names) == ["incident-1.2", "loss-1.2", "workers-1.2"]
    links = re.findall(r'href="#([^"]+)"', page)
    assert sorted(links) == ["incident-1.2", *sorted(names)]  # from two marks, and to both
    assert "nan" not in page
    lines = summarize(found)
    assert lines[0].startswith("6 steps in")
    assert lines[2].startswith("1 incident: pauses of 500 ms")


def test_a_run_without_the_checkpoints_that_it_was_asked_for_was_not_without_incidents() -> None:
    times = [process(0, 1, 0, spent(6, task=5.0))]
    why = {"text": "step 5 is not saved: the disk is full"}
    lost, saved = event(3, "unsaved", **why), event(4, "save", text="step 6 is saved, in 0.2 s")
    for events, unsaved in (([FIRST_VIEW, saved, lost], True), ([FIRST_VIEW, lost, saved], False)):
        found = share_times(times, events)
        assert found is not None
        last = summarize(found)[-1]
        expected = "step 5 is not saved: the disk is full; no later step was saved either"
        assert last == (expected if unsaved else "no incidents")
