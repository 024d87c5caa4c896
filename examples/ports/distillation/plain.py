"""Train a teacher, and then a student that learns from it, in one process."""

import torch
from model import accuracy, clusters, digest, network, parse_options, soft_loss
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(clusters(options.samples, seed=2), options.batch_size, shuffle=True)
    test_set = clusters(256, seed=3)
    criterion = nn.CrossEntropyLoss()
    teacher, student = network(128), network(8)
    optimizer = Adam(teacher.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        teacher.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(teacher(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"teacher, epoch {epoch}: {accuracy(teacher, test_set):.3f}")
    optimizer = Adam(student.parameters(), lr=1e-2)
    teacher.eval()
    for epoch in range(options.epochs):
        student.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(inputs)
            found = student(inputs)
            soft = soft_loss(found, wanted, options.temperature)
            hard = criterion(found, labels)
            loss = options.soft_weight * soft + (1 - options.soft_weight) * hard
            loss.backward()
            optimizer.step()
        print(f"student, epoch {epoch}: {accuracy(student, test_set):.3f}")
    print(digest(teacher, student))


if __name__ == "__main__":
    main()
