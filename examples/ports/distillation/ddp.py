"""Train a teacher, and then a student that learns from it, with DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import accuracy, clusters, digest, network, parse_options, soft_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = clusters(options.samples, seed=2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    test_set = clusters(256, seed=3)
    criterion = nn.CrossEntropyLoss()
    teacher = DistributedDataParallel(network(128))
    student = DistributedDataParallel(network(8))
    optimizer = Adam(teacher.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        teacher.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(teacher(inputs), labels)
            loss.backward()
            optimizer.step()
        score = accuracy(teacher.module, test_set)
        if dist.get_rank() == 0:
            print(f"teacher, epoch {epoch}: {score:.3f}")
    optimizer = Adam(student.parameters(), lr=1e-2)
    teacher.eval()
    for epoch in range(options.epochs):
        sampler.set_epoch(options.epochs + epoch)
        student.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher.module(inputs)
            found = student(inputs)
            soft = soft_loss(found, wanted, options.temperature)
            hard = criterion(found, labels)
            loss = options.soft_weight * soft + (1 - options.soft_weight) * hard
            loss.backward()
            optimizer.step()
        score = accuracy(student.module, test_set)
        if dist.get_rank() == 0:
            print(f"student, epoch {epoch}: {score:.3f}")
    if dist.get_rank() == 0:
        print(digest(teacher.module, student.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
