"""Train with sharpness-aware minimization with Holdfast: two rounds of one module in each step."""

import torch
from model import SAM, digest, hold_running_stats, network, parse_options, rings
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    loader = DataLoader(rings(options.samples, seed=1), options.batch_size, shuffle=True)
    inputs, labels = rings(256, seed=2).tensors
    model = network()
    optimizer = SAM(model.parameters(), SGD, options.rho, lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    job.protect(model=model, sam=optimizer, sgd=optimizer.base_optimizer, scheduler=scheduler)
    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        model.train()
        for step in epoch:
            hold_running_stats(model, False)
            for points, rings_of in step.round():
                loss = F.cross_entropy(model(points), rings_of, label_smoothing=0.1)
                step.backward(loss)
            loss = step.loss
            optimizer.first_step()
            hold_running_stats(model, True)
            for points, rings_of in step.round():
                step.backward(F.cross_entropy(model(points), rings_of, label_smoothing=0.1))
            optimizer.second_step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean()
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    if job.is_leader:
        print(digest(model))


if __name__ == "__main__":
    main()
