"""Train a siamese network with Holdfast."""

import torch
from model import Pairs, Siamese, contrastive, digest, parse_options
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    loader = DataLoader(Pairs(options.images, seed=2), options.batch_size, shuffle=True)
    test_loader = DataLoader(Pairs(options.images // 4, seed=3), options.batch_size)
    model = Siamese()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    def is_right(batch: list[torch.Tensor]) -> torch.Tensor:
        one, other, same = batch
        return ((model(one, other) < 0.5) == same.bool()).float().mean()

    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        for step in epoch:
            for one, other, same in step:
                loss = contrastive(model(one, other), same)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        accuracy = job.evaluate(is_right, test_loader)
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {step.loss:.4f}, accuracy {accuracy:.3f}")
    if job.is_leader:
        print(digest(model))


if __name__ == "__main__":
    main()
