"""Train a siamese network in one process."""

import torch
from model import Pairs, Siamese, contrastive, digest, parse_options
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(Pairs(options.images, seed=2), options.batch_size, shuffle=True)
    test_loader = DataLoader(Pairs(options.images // 4, seed=3), options.batch_size)
    model = Siamese()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(options.epochs):
        model.train()
        for one, other, same in loader:
            loss = contrastive(model(one, other), same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for one, other, same in test_loader:
                right += ((model(one, other) < 0.5) == same.bool()).sum().item()
        accuracy = right / len(test_loader.dataset)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    print(digest(model))


if __name__ == "__main__":
    main()
