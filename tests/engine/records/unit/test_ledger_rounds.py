"""The ledger's proof where one step of the script is several steps of the job."""

from __future__ import annotations

import dataclasses

import pytest
from test_ledger import OWNERS, PLAN, audit, entry, write

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger import LedgerEntry, Place, Uses
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.train.data.read_plans import StreamPlan
from holdfast.engine.train.data.sampling import plan_of


def of_rounds(*places):
    """Return entries of a job whose script's steps consist of several of the job's."""
    found = []
    for place in places:
        plain = entry(place.index)
        used = place.uses is not Uses.NO_SAMPLES
        counts = plain.counts if used else (0,) * len(OWNERS)
        digests = plain.digests if used else (0,) * len(OWNERS)
        found.append(dataclasses.replace(plain, place=place, counts=counts, digests=digests))
    return found


SAMPLES, SAME, NONE = Uses.SAMPLES, Uses.SAME_SAMPLES, Uses.NO_SAMPLES
HONEST = (
    *(Place(0, 0, NONE), Place(1, 0, SAMPLES), Place(2, 0, SAME), Place(3, 1, SAMPLES)),
    *(Place(4, 1, NONE), Place(5, 2, SAMPLES)),
)


def test_steps_of_several_rounds_are_proved(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker, of_rounds(*HONEST))
    report = audit(tmp_path)
    assert report.ok, report.findings
    assert (report.steps, report.samples) == (6, 3 * PLAN.step_samples(0))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({3: Place(3, 0, SAMPLES)}, "step 3 uses the samples of step 1 again"),
        ({1: Place(1, 0, SAME)}, "step 1 is the first to use its samples"),
        ({2: Place(2, 0, SAMPLES)}, "step 2 uses the samples of step 1 again"),
        ({3: Place(3, 1, NONE)}, ""),  # its samples are lost
        ({5: Place(5, 1, SAME)}, ""),
    ],
)
def test_rounds_that_use_other_samples_are_found(tmp_path, changed, words):
    places = [changed.get(place.step, place) for place in HONEST]
    for worker in (0, 1):
        write(tmp_path, worker, of_rounds(*places))
    report = audit(tmp_path)
    if words:
        assert any(words in finding for finding in report.findings)
    elif changed == {3: Place(3, 1, NONE)}:
        assert report.lost == PLAN.step_samples(1)
    assert report.ok == (changed == {5: Place(5, 1, SAME)})


def test_copies_of_a_step_agree_on_what_it_uses(tmp_path):
    write(tmp_path, 0, of_rounds(*HONEST))
    write(tmp_path, 1, of_rounds(*HONEST[:2], Place(2, 1, SAME), *HONEST[3:]))
    assert any("step 2 differs" in finding for finding in audit(tmp_path).findings)


# ---------------------------------------------------------------- streams

STREAM = StreamPlan(batch_size=3, virtual_ranks=4, seed=11)


def of_stream(*steps):
    """Return entries of a stream: for each shard the epoch, the samples taken, and the count."""
    return [
        LedgerEntry(
            place=Place(index, index),
            view=1,
            hosts=tuple((owner, 1) for owner in OWNERS),
            counts=[count for _, _, count in shards],
            digests=[STREAM.digest(v, *each) for v, each in enumerate(shards)],
            loss=0.5,
        )
        for index, shards in enumerate(steps)
    ]


FIRST = ((0, 0, 3), (0, 0, 3), (0, 0, 2), (0, 0, 3))
SECOND = ((0, 3, 3), (1, 0, 3), (1, 0, 2), (0, 3, 1))  # the second shard had three samples
THIRD = ((0, 6, 3), (2, 0, 3), (2, 0, 2), (1, 0, 3))


def test_a_stream_is_proved_shard_by_shard(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker, of_stream(FIRST, SECOND, THIRD), plan=STREAM)
    report = verify(tmp_path, plan_of)
    assert report.ok, report.findings
    assert (report.steps, report.samples) == (3, 11 + 9 + 11)


@pytest.mark.parametrize(
    "third",
    [
        ((0, 3, 3), *THIRD[1:]),  # read again
        ((0, 9, 3), *THIRD[1:]),  # left out
        (*THIRD[:3], (0, 4, 3)),  # after its end
        (*THIRD[:2], (3, 0, 2), THIRD[3]),  # an epoch left out
    ],
)
def test_other_samples_of_a_shard_than_the_next_are_found(tmp_path, third):
    for worker in (0, 1):
        write(tmp_path, worker, of_stream(FIRST, SECOND, third), plan=STREAM)
    (finding,) = verify(tmp_path, plan_of).findings
    assert "step 2 used other samples of shard" in finding


@pytest.mark.parametrize(
    "plain",
    [
        {"order": "stream-1"},
        {**STREAM.to_dict(), "more": 1},
        {**STREAM.to_dict(), "batch_size": "3"},
        {**STREAM.to_dict(), "batch_size": 0},
        {**STREAM.to_dict(), "virtual_ranks": 0},
    ],
)
def test_a_streams_plan_is_not_trusted(plain):
    with pytest.raises(UserError):
        plan_of(plain)
    assert plan_of(STREAM.to_dict()) == STREAM
