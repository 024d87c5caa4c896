"""Train with sharpness-aware minimization in one process."""

import torch
from model import SAM, digest, hold_running_stats, network, parse_options, rings
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(rings(options.samples, seed=1), options.batch_size, shuffle=True)
    inputs, labels = rings(256, seed=2).tensors
    model = network()
    optimizer = SAM(model.parameters(), SGD, options.rho, lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(options.epochs):
        model.train()
        for points, rings_of in loader:
            hold_running_stats(model, False)
            loss = F.cross_entropy(model(points), rings_of, label_smoothing=0.1)
            loss.backward()
            optimizer.first_step()
            hold_running_stats(model, True)
            F.cross_entropy(model(points), rings_of, label_smoothing=0.1).backward()
            optimizer.second_step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean()
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    print(digest(model))


if __name__ == "__main__":
    main()
