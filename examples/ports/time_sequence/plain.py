"""Fit sine waves with LBFGS in one process."""

import torch
from model import Sequence, digest, parse_options, waves
from torch import nn
from torch.optim import LBFGS


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    inputs, targets = waves(options.waves, options.length, seed=1).tensors
    test_inputs, test_targets = waves(4, options.length, seed=2).tensors
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = LBFGS(model.parameters(), lr=0.8)
    for step in range(options.steps):

        def closure() -> float:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            return loss.item()

        loss = optimizer.step(closure)
        with torch.no_grad():
            test_loss = criterion(model(test_inputs), test_targets)
        print(f"step {step}: loss {loss:.6f}, test loss {test_loss:.6f}")
    print(digest(model))


if __name__ == "__main__":
    main()
