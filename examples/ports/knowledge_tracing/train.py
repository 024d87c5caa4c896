"""Train a knowledge tracer with Holdfast, until its AUC gets no better."""

import copy

import torch
from model import Students, Tracer, auc, digest, pad, parse_options, summed_loss
from torch.optim import Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    students = Students(options.students, seed=1)
    loader = DataLoader(students, options.batch_size, shuffle=True, collate_fn=pad)
    held_out = Students(options.students // 3, seed=2)
    model = Tracer()
    optimizer = Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=1)
    job.values.update(best=0.0, waited=0)
    best_model = copy.deepcopy(model).requires_grad_(False)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler, best=best_model)
    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        for step in epoch:
            optimizer.zero_grad()
            for skills, answers in step:
                loss, count = summed_loss(model(skills, answers), answers)
                step.backward(loss, weight=count)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score = auc(model, held_out)
        scheduler.step(score)
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {step.loss:.4f}, AUC {score:.3f}")
        if score > job.values["best"]:
            job.values.update(best=score, waited=0)
            best_model.load_state_dict(model.state_dict())
        else:
            job.values["waited"] += 1
            if job.values["waited"] == options.patience:
                break
    model.load_state_dict(best_model.state_dict())
    if job.is_leader:
        print(f"best AUC {job.values['best']:.3f}")
        print(digest(model))


if __name__ == "__main__":
    main()
