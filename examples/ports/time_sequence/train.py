"""Fit sine waves with LBFGS and Holdfast: each call of the closure is a round of the step."""

import torch
from model import Sequence, digest, parse_options, waves
from torch import nn
from torch.optim import LBFGS

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    share = -(-options.waves // job.virtual_ranks)
    data = job.batches(waves(options.waves, options.length, seed=1), share, shuffle=False)
    test_inputs, test_targets = waves(4, options.length, seed=2).tensors
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = LBFGS(model.parameters(), lr=0.8)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(data, until=options.steps):

        def closure(step: holdfast.Step = step) -> float:
            optimizer.zero_grad()
            for inputs, targets in step:
                loss = criterion(model(inputs), targets)
                step.backward(loss)
            return step.loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            test_loss = criterion(model(test_inputs), test_targets)
        if job.is_leader:
            print(f"step {step.index}: loss {loss:.6f}, test loss {test_loss:.6f}")
    if job.is_leader:
        print(digest(model))


if __name__ == "__main__":
    main()
