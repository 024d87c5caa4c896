"""A job whose nodes are all taken away is saved before, and continues elsewhere."""

from __future__ import annotations

from test_coordinator_machine import begun, status

from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.last_saves import ORDERS_PER_TERM


def test_a_job_that_is_taken_away_whole_is_saved_at_once_and_as_late_as_can_be() -> None:
    job = begun("a", "b", keeps=True)
    job.say("a", 0, committed=6)
    job.node("a", draining="taken away", leaves_in_s=60.0)
    assert not job.told["a"].save_wanted  # worker 1 can continue
    job.node("b", draining="taken away", leaves_in_s=50.0)
    first = job.told["a"].save_wanted
    assert first > 7 * ORDERS_PER_TERM  # no coordinator before this one, of term 7, has used it
    job.pass_time(103.0)
    job.say("a", 0, committed=9, saved=7)  # it took three seconds
    job.pass_time(152.5)
    assert job.told["a"].save_wanted == first
    job.pass_time(153.5)
    assert job.told["a"].save_wanted == first + 1
    texts = [e.text for e in job.done if isinstance(e, ce.Announce) and e.kind == "save"]
    assert len(texts) == 2
    assert texts[0] == "all workers are taken away in 60 s: a checkpoint is made"


def test_a_job_that_was_taken_away_whole_goes_on_elsewhere_at_once() -> None:
    """The state of silent nodes is waited for, but not once they are gone as announced."""
    job = begun("a", "b", keeps=True)
    first = job.number
    job.say("a", 0, committed=6, saved=7)
    for name in ("a", "b"):
        job.node(name, draining="taken away", leaves_in_s=20.0)
    taken_at = job.now + 20.0
    job.pass_time(taken_at - 3.0)
    job.known = {"c": status(2)}  # no report of the other workers arrives any more
    job.hear("c", *job.known.values())
    job.pass_time(taken_at)
    assert job.number == first
    job.pass_time(taken_at + 2.0)
    assert job.number > first
    assert job.view is not None
    assert (job.view.workers, job.view.resume_step) == ((2,), 7)


def test_a_job_whose_nodes_are_all_to_be_left_some_time_is_saved_every_few_seconds() -> None:
    job = begun("a", "b", keeps=True)
    job.say("a", 0, committed=6)
    job.node("a", draining="asked")
    assert not job.told["a"].save_wanted  # worker 1 can continue
    job.node("b", draining="asked")
    first = job.told["a"].save_wanted
    assert first
    for now, orders in ((105.0, 0), (119.0, 0), (120.5, 1), (139.0, 1), (141.0, 2)):
        job.pass_time(now)
        assert job.told["a"].save_wanted == first + orders
    (text,) = (e.text for e in job.done if isinstance(e, ce.Announce) and e.kind == "save")
    assert text.startswith("all nodes are to be left, and nobody has said when they end")
