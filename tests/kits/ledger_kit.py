"""Writes ledgers of made-up runs, for tests of proofs."""

from holdfast.engine.records.ledger import (
    HeaderLine,
    LedgerEntry,
    LedgerWriter,
    Place,
    ledger_path,
)
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.train.data.sampling import SamplePlan

PLAN = SamplePlan(length=50, batch_size=3, virtual_ranks=4, seed=11)  # 5 steps an epoch, one uneven
STEPS = 12
OWNERS = (0, 0, 1, 1)


def header(worker=0, incarnation=1, plan=PLAN, backup=0):
    return HeaderLine(
        seed=plan.seed,
        virtual_ranks=plan.virtual_ranks,
        plan=plan.to_dict(),
        worker=worker,
        incarnation=incarnation,
        backup=backup,
    )


def entry(step, incarnation=1, view=1, plan=PLAN):
    tasks = plan.step_tasks(step)
    return LedgerEntry(
        place=Place(step, step),
        view=view,
        hosts=tuple((owner, incarnation) for owner in OWNERS),
        counts=tuple(map(len, tasks)),
        digests=tuple(map(plan.digest_of, tasks)),
        loss=1.0 / (step + 3),
    )


def write(run, worker, entries, incarnation=1, plan=PLAN, backup=0):
    writer = LedgerWriter(ledger_path(run, worker, incarnation))
    writer.begin(header(worker, incarnation, plan, backup))
    for one in entries:
        writer.append(one)
    writer.close()
    return writer.path


def write_run(run, workers=(0, 1)):
    return [write(run, w, [entry(s) for s in range(STEPS)]) for w in workers]


def audit(run):
    return verify(run, SamplePlan.from_dict)
