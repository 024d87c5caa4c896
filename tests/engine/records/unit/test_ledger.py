"""The ledger: an honest run is proved, and every planted corruption is found."""

import dataclasses
import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.engine.commands.ledger_command import main, render
from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.records import ledger_audit
from holdfast.engine.records.ledger import (
    DoubtLine,
    LedgerEntry,
    LedgerWriter,
    ledger_path,
    newer_format_in,
)
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.train.data.sampling import SamplePlan
from ledger_kit import OWNERS, PLAN, STEPS, audit, entry, header, write, write_run


def edit(path, step, /, **changes):
    """Change fields of a step's line; a value may be a function of the old one."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if line.get("step") == step:
            for name, value in changes.items():
                line[name] = value(line[name]) if callable(value) else value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def first_changed(value):
    return lambda old: [value, *old[1:]]


def drop(path, steps):
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step") not in steps]
    path.write_bytes(b"".join(kept))


def test_an_honest_run_is_proved(tmp_path):
    write_run(tmp_path)
    report = audit(tmp_path)
    assert report.findings == ()
    assert report.ok
    assert (report.files, report.copies, report.steps) == (2, 2 * STEPS, STEPS)
    assert report.samples == 2 * 50 + 2 * 12  # two epochs, and two steps of the third
    assert (report.lost, report.repeated, report.replayed, report.torn) == (0, 0, (), 0)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@settings(max_examples=20)
@given(st.data())
def test_any_honest_run_is_proved(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    plan = SamplePlan(
        length=data.draw(st.integers(20, 200)),
        batch_size=data.draw(st.integers(1, 5)),
        virtual_ranks=4,
        seed=data.draw(st.integers(0, 2**64 - 1)),
        shuffle=data.draw(st.booleans()),
        drop_last=data.draw(st.booleans()),
    )
    steps = data.draw(st.integers(1, 60))
    for worker in (0, 1):
        write(run, worker, [entry(s, plan=plan) for s in range(steps)], plan=plan)
    report = audit(run)
    assert report.ok, report.findings
    assert report.samples == plan.samples_before(steps)


def test_copies_may_begin_and_end_anywhere(tmp_path):
    write(tmp_path, 0, [entry(s) for s in range(7)])
    write(tmp_path, 1, [entry(s) for s in range(5, STEPS)])
    assert audit(tmp_path).ok


def test_a_copy_may_have_learnt_of_the_commit_in_a_later_view(tmp_path):
    _, path = write_run(tmp_path)
    edit(path, 4, view=2)
    report = audit(tmp_path)
    assert report.ok
    assert report.replayed == ()


def test_a_replay_after_all_workers_were_lost_is_reported_but_no_fault(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker, [entry(s) for s in range(8)])
        again = [entry(s, incarnation=2, view=2) for s in range(5, STEPS)]
        write(tmp_path, worker, again, incarnation=2)
    report = audit(tmp_path)
    assert report.ok, report.findings
    assert report.replayed == (5, 6, 7)
    assert report.samples == 2 * 50 + 2 * 12


def test_withdrawn_steps_do_not_count(tmp_path):
    """A withdrawal holds for all; the same steps were done again, with another loss."""
    wrong = [dataclasses.replace(entry(s), loss=9.0) for s in range(4, 9)]
    write(tmp_path, 0, [*[entry(s) for s in range(4)], *wrong])
    path = write(tmp_path, 1, [*[entry(s) for s in range(4)], *wrong[:3]])
    again = [entry(s, incarnation=2, view=3) for s in range(4, STEPS)]
    write(tmp_path, 0, again, incarnation=2)
    write(tmp_path, 1, again, incarnation=2)
    assert not audit(tmp_path).ok
    writer = LedgerWriter(path)
    writer.doubt(DoubtLine(step=4, view=2, again=True))
    writer.close()
    report = audit(tmp_path)
    assert (report.ok, report.inexact_since, report.steps) == (True, None, STEPS), report.findings


def test_steps_that_may_be_wrong_and_were_kept_are_reported_as_not_exact(tmp_path, capsys):
    path, _ = write_run(tmp_path)
    for step in (9, 5):
        writer = LedgerWriter(path)
        writer.doubt(DoubtLine(step=step, view=1, again=False))
        writer.close()
    report = audit(tmp_path)
    assert (report.ok, report.inexact_since) == (True, 5)
    assert main(["verify", str(tmp_path)]) == 0
    assert "not exact: from step 5 on" in capsys.readouterr().out
    assert report.to_dict()["inexact_since"] == 5


def test_a_second_dataset_in_the_same_job_is_proved_too(tmp_path):
    other = SamplePlan(length=30, batch_size=2, virtual_ranks=4, seed=11, first_step=STEPS)
    writer = LedgerWriter(ledger_path(tmp_path, 0, 1))
    writer.begin(header())
    for step in range(STEPS):
        writer.append(entry(step))
    writer.begin(header(plan=other))
    for step in range(STEPS, STEPS + 4):
        writer.append(entry(step, plan=other))
    writer.close()
    report = audit(tmp_path)
    assert report.ok, report.findings
    assert report.samples == 2 * 50 + 2 * 12 + 30


def corrupt_digest(paths):
    for path in paths:
        edit(path, 3, digests=first_changed("0" * 16))


def wrong_count(paths):
    for path in paths:
        edit(path, 3, counts=first_changed(2))


def one_copy(name, value):
    def plant(paths):
        edit(paths[1], 3, **{name: value})

    return plant


def missing_step(paths):
    for path in paths:
        drop(path, {3})


def missing_start(paths):
    for path in paths:
        drop(path, {0, 1})


def twice_in_one_file(paths):
    lines = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(b"".join([*lines, lines[-1]]))


def moved_without_total_loss(paths):
    edit(paths[1], 3, view=2, hosts=lambda old: [[0, 1], *[[1, 2]] * 3])


def survivor_wrote_both(paths):
    edit(paths[1], 3, view=2, hosts=[[5, 9]] * 4)  # strangers host it, but both writers lived on
    copy = paths[1].with_name("worker-00000-00001-copy.jsonl")
    copy.write_bytes(paths[0].read_bytes())
    edit(copy, 3, view=2, hosts=[[5, 9]] * 4)


def other_hosts_in_the_same_view(paths):
    edit(paths[1], 3, hosts=[[7, 7]] * 4)


def vrank_missing(paths):
    edit(paths[1], 3, counts=lambda old: old[1:])


def vrank_twice(paths):
    edit(paths[1], 3, hosts=lambda old: [*old, old[0]])


def garbage_in_the_middle(paths):
    lines = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(b"".join([*lines[:4], b"\xff\x00{]\n", *lines[4:]]))


def no_header(paths):
    lines = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(b"".join(lines[1:]))


def bad_plan(paths):
    text = paths[1].read_text().replace('"length":50', '"length":0')
    paths[1].write_text(text)


def other_plan(paths):
    paths[1].write_text(paths[1].read_text().replace('"length":50', '"length":51'))


def other_virtual_ranks(paths):
    paths[1].write_text(
        paths[1].read_text().replace('"virtual_ranks":4,"plan"', '"virtual_ranks":5,"plan"')
    )


def enormous_plan(paths):
    for path in paths:
        text = path.read_text().replace('"length":50', f'"length":{2**48}')
        path.write_text(text.replace('"batch_size":3', f'"batch_size":{2**40}'))


def before_the_plan(paths):
    for path in paths:
        path.write_text(path.read_text().replace('"first_step":0', '"first_step":2'))


def far_away_step(paths):
    edit(paths[1], STEPS - 1, step=2**47)


def endless_line(paths):
    paths[1].write_bytes(paths[1].read_bytes() + b"x" * 5000)


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (corrupt_digest, "worker-00000-00001.jsonl:5: step 3 virtual rank 0 used other samples"),
        (wrong_count, "step 3 virtual rank 0 used 2 samples, its plan has 3"),
        (one_copy("loss", (0.5).hex()), "step 3 differs from worker-00000-00001.jsonl:5 in loss"),
        (one_copy("digests", first_changed("1" * 16)), "in digests"),
        (one_copy("counts", first_changed(9)), "in counts"),
        (one_copy("handed", {"1": "2" * 16}), "in handed"),
        (missing_step, "no copy of step 3"),
        (missing_start, "no copy of step 0 to 1"),
        (twice_in_one_file, "step 11 is written twice by incarnation (1, 1)"),
        (moved_without_total_loss, "committed again in view 2 by [(0, 1), (1, 1)], which had"),
        (survivor_wrote_both, "committed again in view 2 by [(0, 1)"),
        (other_hosts_in_the_same_view, "step 3 was committed again in view 1"),
        (vrank_missing, "step 3 has 3 counts for 4 virtual ranks"),
        (vrank_twice, "step 3 has 5 hosts for 4 virtual ranks"),
        (garbage_in_the_middle, "worker-00001-00001.jsonl:5: malformed"),
        (no_header, "worker-00001-00001.jsonl:1: step 0 comes before any header"),
        (bad_plan, "worker-00001-00001.jsonl:1: a dataset of length 0"),
        (other_plan, "in plan"),
        (other_virtual_ranks, "the plan has 4 virtual ranks but the header 5"),
        (enormous_plan, "too large to be recomputed"),
        (before_the_plan, "step 0 is before the plan's first, 2"),
        (far_away_step, f"no copy of step 12 to {2**47 - 1}"),
        (one_copy("loss", "1,5"), "malformed"),
        (one_copy("step", -1), "malformed"),
        (one_copy("step", 2**70), "malformed"),
        (one_copy("digests", ["x"] * 4), "malformed"),
        (one_copy("hosts", "all"), "malformed"),
        (one_copy("kind", "stepp"), "malformed"),
        (endless_line, "longer than 4096 bytes"),
    ],
)
def test_every_planted_corruption_is_found(tmp_path, monkeypatch, plant, text):
    monkeypatch.setattr(ledger_audit, "LINE_BYTES_MAX", 4096)
    paths = write_run(tmp_path)
    plant(paths)
    report = audit(tmp_path)
    assert not report.ok
    assert any(text in finding for finding in report.findings), report.findings


def test_samples_of_missing_and_wrong_steps_count_as_lost(tmp_path):
    paths = write_run(tmp_path)
    missing_step(paths)
    assert audit(tmp_path).lost == 12
    edit(paths[0], 6, digests=first_changed("2" * 16))
    report = audit(tmp_path)
    assert report.lost == 12 + 3
    assert report.samples == 2 * 50 + 2 * 12 - 15


class Doubling:
    """A plan whose epochs use some samples twice and other samples never; all else is honest."""

    def __init__(self, plan):
        self._plan = plan

    def __getattr__(self, name):
        return getattr(self._plan, name)

    def step_tasks(self, step):
        return [np.minimum(task, 47) for task in self._plan.step_tasks(step)]


def test_a_plan_that_repeats_samples_is_found_out(tmp_path):
    plan = Doubling(PLAN)
    for worker in (0, 1):
        write(tmp_path, worker, [entry(s, plan=plan) for s in range(10)], plan=plan)
    report = verify(tmp_path, lambda plain: Doubling(SamplePlan.from_dict(plain)))
    assert report.findings == ()
    assert (report.repeated, report.lost) == (4, 4)
    assert not report.ok


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_counted_but_no_fault(tmp_path, cut):
    paths = write_run(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-cut])
    report = audit(tmp_path)
    assert report.ok
    assert report.torn == 1
    assert report.copies == 2 * STEPS - 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_no_damage_makes_a_traceback(tmp_path, seed):
    rng = random.Random(seed)
    paths = write_run(tmp_path)
    text = bytearray(paths[0].read_bytes())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        match rng.randrange(3):
            case 0:
                text[at] ^= 1 << rng.randrange(8)
            case 1:
                del text[at : at + rng.randrange(80)]
            case _:
                text[at:at] = rng.choice([b"\n", b"[" * 3000, b"9" * 30, b"null", b'"', b"\x00"])
        if not text:
            break
    paths[0].write_bytes(text)
    if any(newer_format_in(line) for line in bytes(text).splitlines(keepends=True)):
        with pytest.raises(UserError, match="was written by a newer Holdfast"):
            audit(tmp_path)
        return
    report = audit(tmp_path)
    assert report.steps >= STEPS  # the other copy is whole
    json.dumps(report.to_dict())


def test_findings_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_audit, "FINDINGS_MAX", 5)
    write_run(tmp_path)[0].write_bytes(b"?\n" * 50)
    report = audit(tmp_path)
    assert len(report.findings) == 6
    assert "more than 5" in report.findings[-1]


def test_a_run_without_ledger_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        audit(tmp_path)


def test_an_empty_ledger_proves_nothing(tmp_path):
    write(tmp_path, 0, [])
    assert not audit(tmp_path).ok


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.0, 0.1])
def test_any_loss_survives_exactly(tmp_path, loss):
    one = entry(0)
    for worker in (0, 1):
        changed = LedgerEntry(
            place=one.place,
            view=1,
            hosts=one.hosts,
            counts=one.counts,
            digests=one.digests,
            loss=loss,
        )
        path = write(tmp_path, worker, [changed])
    assert audit(tmp_path).ok
    stored = json.loads(path.read_bytes().splitlines()[1])["loss"]
    assert str(float.fromhex(stored)) == str(loss)


def failing_write(error_number, accept):
    real = os.write

    def write_some(file, data):
        if len(data) > accept:
            return real(file, data[:accept])
        raise OSError(error_number, os.strerror(error_number))

    return write_some


# ---------------------------------------------------------------- backup workers


def without(one, worker):
    """Return a step in which this worker's results were dropped."""
    kept = [owner != worker for owner in OWNERS]
    return dataclasses.replace(
        one,
        counts=[n if k else 0 for n, k in zip(one.counts, kept, strict=True)],
        digests=[d if k else 0 for d, k in zip(one.digests, kept, strict=True)],
    )


def test_samples_dropped_by_choice_are_reported_and_no_fault(tmp_path):
    left_out = {2: 0, 4: 1, 7: 1}  # in step 4 it has no sample
    entries = [without(entry(s), left_out.get(s)) for s in range(STEPS)]
    for worker in (0, 1):
        write(tmp_path, worker, entries, backup=1)
    report = audit(tmp_path)
    assert report.findings == ()
    assert report.ok
    assert (report.dropped, report.dropped_in) == (12, 2)
    assert (report.lost, report.repeated, report.samples) == (0, 0, 112)
    assert report.to_dict()["dropped"] == 12
    text = render(report)
    assert "not exact: 12 samples of late workers were dropped by choice, in 2 steps" in text
    assert "every other sample was used exactly once" in text


def test_samples_dropped_without_declaration_are_lost(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker, [without(entry(s), 1) for s in range(5)])
    report = audit(tmp_path)
    assert not report.ok
    assert report.lost == 24
    assert report.dropped == 0
    assert any("virtual rank 2 used 0 samples, its plan has 3" in f for f in report.findings)


def test_the_number_of_backup_workers_must_be_declared_in_every_copy(tmp_path):
    for worker in (0, 1):
        write(tmp_path, worker, [without(entry(s), 1) for s in range(5)], backup=1 - worker)
    findings = audit(tmp_path).findings
    assert any("the number of backup workers differs: 1 in worker-00000" in f for f in findings)


def test_no_more_may_be_dropped_than_was_declared(tmp_path):
    for worker in (0, 1):
        one = without(without(entry(3), 0), 1)
        write(tmp_path, worker, [*map(entry, range(3)), one], backup=1)
    report = audit(tmp_path)
    assert "step 3 dropped the results of 2 workers, but may drop those of 1" in report.findings[0]
    assert report.lost == 12


def test_a_replay_may_drop_something_else(tmp_path):
    """The newest commit counts; copies of one must agree all the same."""
    for worker in (0, 1):
        write(tmp_path, worker, [without(entry(s), 0) for s in range(3)], backup=1)
        again = [entry(1, 2, view=2), without(entry(2, 2, view=2), 1)]
        write(tmp_path, worker, again, incarnation=2, backup=1)
    report = audit(tmp_path)
    assert report.findings == ()
    assert (report.replayed, report.dropped, report.dropped_in) == ((1, 2), 12, 2)
    edit(ledger_path(tmp_path, 1, 2), 2, counts=lambda old: [0, *old[1:]])
    assert any("differs from" in finding for finding in audit(tmp_path).findings)


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_names_the_path_and_leaves_no_half_line(tmp_path, monkeypatch, error_number):
    path = ledger_path(tmp_path, 0, 1)
    writer = LedgerWriter(path)
    writer.begin(header())
    writer.append(entry(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(error_number, accept=40))
        with pytest.raises(WorldError, match=str(path)) as caught:
            writer.append(entry(1))
        assert os.strerror(error_number) in str(caught.value)
    writer.append(entry(1))  # space was freed
    writer.close()
    report = audit(tmp_path)
    assert report.ok
    assert (report.steps, report.torn) == (2, 0)


def test_a_full_disk_is_its_machines_error():
    writer = LedgerWriter(Path("/dev/full"))
    with pytest.raises(WorldError, match=r"/dev/full.*free space there"):
        writer.begin(header())
    writer.close()


def test_a_place_that_cannot_be_written_is_the_worlds_error(tmp_path):
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(WorldError, match="ledger"):
        LedgerWriter(ledger_path(tmp_path, 0, 1)).begin(header())


def test_the_command_prints_and_exits_as_it_found(tmp_path, capsys):
    paths = write_run(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    assert "12 steps, 124 samples" in capsys.readouterr().out
    corrupt_digest(paths)
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["lost"] == 3
    assert told["findings"]
    assert main(["verify", str(tmp_path)]) == 1
    assert "NOT PROVED" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
