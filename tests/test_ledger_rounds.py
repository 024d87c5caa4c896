"""What the ledger proves of script steps that consist of several of the job's."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.observe.ledger import Place, Uses
from test_ledger import OWNERS, PLAN, audit, entry, write


def of_rounds(*places):
    """Entries of a job whose script's steps consist of several of the job's."""
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
