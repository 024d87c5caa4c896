"""The nodes that a manager does not give are reported with its reason, once and when it changes."""

from __future__ import annotations

from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.fleet.fleet_process import WaitingReport


def placed(number: int, why: str | None = None) -> Placement:
    holding = Holding.RUNNING if why is None else Holding.WAITING
    return Placement(id=PlacementId(f"hf-{number}"), handle="", holding=holding, why=why or "")


def test_a_reason_to_wait_is_reported_once_it_has_lasted() -> None:
    report = WaitingReport("YARN")
    short = [placed(1), placed(2, "no room")]
    assert [list(report.read(short, now)) for now in (100.0, 109.0)] == [[], []]
    assert list(report.read(short, 110.0)) == ["YARN gives 1 of 2 nodes; no room"]
    assert [list(report.read(short, now)) for now in (112.0, 500.0)] == [[], []]


def test_another_reason_is_reported_after_a_while() -> None:
    report = WaitingReport("YARN")
    both = [placed(1, "no room"), placed(2, "no room"), placed(3, "")]
    list(report.read(both, 0.0))
    assert list(report.read(both, 20.0)) == ["YARN gives 0 of 3 nodes; no room"]
    one = [placed(1), placed(2, "nm2 is full"), placed(3, "nm3 is full")]
    assert list(report.read(one, 30.0)) == []
    assert list(report.read(one, 80.0)) == ["YARN gives 1 of 3 nodes; nm2 is full; nm3 is full"]


def test_a_manager_that_gives_no_reason_is_named_all_the_same() -> None:
    report = WaitingReport("Slurm")
    assert list(report.read([placed(1), placed(2, "")], 0.0)) == []
    assert list(report.read([placed(1), placed(2, "")], 10.0)) == ["Slurm gives 1 of 2 nodes"]


def test_nothing_is_reported_when_all_run() -> None:
    report = WaitingReport("Slurm")
    for now in (0.0, 100.0):
        assert list(report.read([placed(1), placed(2)], now)) == []
    late = [placed(1), placed(2, "later")]
    assert list(report.read(late, 300.0)) == []  # the wait begins again
    assert list(report.read(late, 310.0)) == ["Slurm gives 1 of 2 nodes; later"]


def test_what_is_waited_for_now_is_kept_for_the_jobs_status() -> None:
    report = WaitingReport("Ray")
    shown = []
    for now, why in (
        (0.0, "no room"),
        (9.0, "no room"),
        (10.0, "no room"),
        (20.0, "node2 is full"),
    ):
        list(report.read([placed(1, why)], now))
        shown.append(report.current)
    start = "Ray gives 0 of 1 nodes"
    assert shown == ["", "", f"{start}; no room", f"{start}; node2 is full"]
    list(report.read([placed(1)], 30.0))
    assert report.current == ""


def test_a_placement_that_ends_for_a_reason_is_reported_once() -> None:
    report = WaitingReport("YARN")

    def ended(number: int, why: str) -> Placement:
        id_ = PlacementId(f"hf-{number}")
        return Placement(id=id_, handle="", holding=Holding.ENDED, host="nm1", why=why)

    assert list(report.read([placed(1), placed(2), ended(3, "long ago")], 0.0)) == []
    now = [ended(1, "its disk is full"), ended(2, ""), ended(3, "long ago")]
    assert list(report.read(now, 1.0)) == ["hf-1 has ended on nm1: its disk is full"]
    assert list(report.read(now, 2.0)) == []
    assert list(report.read([], 3.0)) == []
    late = [ended(1, "its disk is full"), ended(2, "it used too much memory")]
    assert list(report.read(late, 4.0)) == ["hf-2 has ended on nm1: it used too much memory"]
    assert list(report.read(late, 5.0)) == []
