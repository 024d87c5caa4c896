"""The training script of `make bench-peers` for Holdfast: the loop of the README."""

from __future__ import annotations

import peers_task

import holdfast


def main() -> None:
    job = holdfast.join()
    model, optimizer = peers_task.make_model()
    job.protect(model=model, optimizer=optimizer)
    steps = peers_task.step_count()
    data = job.batches(peers_task.make_data(steps), batch_size=peers_task.BATCH)
    records = peers_task.Records(job.worker)
    for step in job.steps(data, until=steps):
        for samples, values in step:
            records.begin(step.index, samples)
            step.backward(peers_task.paced_loss(model, values))
        optimizer.step()
        optimizer.zero_grad()
        records.commit(step.index)
    records.end(steps, model)


if __name__ == "__main__":
    main()
