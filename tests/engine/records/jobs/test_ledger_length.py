"""The ledger is as long as its run, and a step that is done again may agree on another value."""

import dataclasses
import json

import pytest

from conftest import finish
from holdfast.engine.commands.ledger_command import main
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.views import View
from holdfast.engine.records.ledger import Place, Uses
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.records.ledger_claims import claims_of_record
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import SamplePlan, plan_of
from ledger_kit import STEPS, audit, entry, write, write_run

# ---------------------------------------------------------------- how long it has to be


def result(run, step, outcome=""):
    (run / "result.json").write_text(json.dumps({"outcome": outcome, "step": step}))


def cut(path, steps):
    """Cut a file short after `steps` steps, at the end of a line."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: steps + 1]))


def test_a_ledger_that_was_cut_short_is_not_proved(tmp_path, capsys):
    paths = write_run(tmp_path)
    result(tmp_path, STEPS)
    assert audit(tmp_path).ok
    cut(paths[0], 5)
    assert audit(tmp_path).ok  # the other worker's copy has the rest
    cut(paths[1], 7)
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "7 of 12 steps" in said
    assert "proved up to step 7 of 12: result.json says" in said
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["steps"], told["job_steps"]) == (False, 7, 12)
    paths[1].unlink()
    assert "proved up to step 5 of 12" in audit(tmp_path).findings[0]


def test_a_run_that_failed_may_lack_the_step_that_it_had_just_committed(tmp_path):
    write_run(tmp_path)
    result(tmp_path, STEPS + 1, "worker 0 failed")
    assert audit(tmp_path).ok
    result(tmp_path, STEPS + 2, "worker 0 failed")
    assert not audit(tmp_path).ok
    result(tmp_path, STEPS + 1)
    assert not audit(tmp_path).ok


def test_the_record_says_how_long_a_running_job_is(tmp_path):
    write_run(tmp_path)
    view = initial_view_of(resume_step=STEPS + 1)
    for record, ok in (
        (None, True),
        (JobRecord(term=1, saved=(3, STEPS)), True),
        (JobRecord(term=1, saved=(3, STEPS + 1)), False),
        (JobRecord(term=1, view=view), True),
        (JobRecord(term=1, view=dataclasses.replace(view, resume_step=STEPS + 2)), False),
    ):
        claims = claims_of_record(record)
        assert verify(tmp_path, SamplePlan.from_dict, claims).ok == ok, record


def initial_view_of(resume_step):
    return View(
        number=1, members=(), owners=(0,), resume_step=resume_step, leader=0, joiners=(), reason=""
    )


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"outcome": "", "step": null}'])
def test_an_outcome_that_cannot_be_read_says_nothing(tmp_path, damage):
    write_run(tmp_path)
    (tmp_path / "result.json").write_text(damage)
    assert audit(tmp_path).ok


# ---------------------------------------------------------------- agreed values


def agreed_in(incarnation, value, hosts=None, step=STEPS):
    plain = entry(0, incarnation)
    return dataclasses.replace(
        plain,
        place=Place(step, step, Uses.NO_SAMPLES, value),
        view=incarnation,
        hosts=hosts or plain.hosts,
        counts=(0, 0, 0, 0),
        digests=(0, 0, 0, 0),
        loss=0.0,
    )


def test_a_value_that_is_agreed_on_again_after_all_were_lost_may_be_another(tmp_path):
    steps = [entry(s) for s in range(STEPS)]
    for worker in (0, 1):
        write(tmp_path, worker, [*steps, agreed_in(1, "17.25")])
        write(tmp_path, worker, [agreed_in(2, "99.5")], incarnation=2)
    report = audit(tmp_path)
    assert report.ok, report.findings
    assert report.replayed == (STEPS,)


def test_workers_that_agree_on_different_values_are_found(tmp_path):
    steps = [entry(s) for s in range(STEPS)]
    for worker in (0, 1):
        write(tmp_path, worker, [*steps, agreed_in(1, f"1{worker}")])
    assert any("the value that was agreed on: 11 and 10" in f for f in audit(tmp_path).findings)


AGREES = """
import os, signal, time, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
for step in job.steps(job.batches(dataset, batch_size=2), until=4):
    for x, y in step:
        step.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    job.agree(time.time())
    if step.index == 2 and os.environ["HOLDFAST_INCARNATION"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_job_that_agrees_on_the_time_is_proved_after_all_its_workers_were_lost(tmp_path):
    script = tmp_path / "agrees.py"
    script.write_text(AGREES)
    with LocalRun(tmp_path / "run", ["--nproc", "1", "--virtual", "2"], [str(script)]) as run:
        finish(run)
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings
    assert len(report.replayed) >= 5
    assert report.job_steps == report.steps == 8
