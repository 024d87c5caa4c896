"""Train a teacher, and then a student that learns from it, with Holdfast."""

import torch
from model import accuracy, clusters, digest, network, parse_options, soft_loss
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    loader = DataLoader(clusters(options.samples, seed=2), options.batch_size, shuffle=True)
    test_set = clusters(256, seed=3)
    criterion = nn.CrossEntropyLoss()
    teacher, student = network(128), network(8)
    optimizer = Adam(teacher.parameters(), lr=1e-3)
    for_student = Adam(student.parameters(), lr=1e-2)
    job.protect(teacher=teacher, student=student, optimizer=optimizer, for_student=for_student)
    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        teacher.train()
        for step in epoch:
            optimizer.zero_grad()
            for inputs, labels in step.round("teacher"):
                loss = criterion(teacher(inputs), labels)
                step.backward(loss)
            optimizer.step()
        score = accuracy(teacher, test_set)
        if job.is_leader:
            print(f"teacher, epoch {epoch.index}: {score:.3f}")
    optimizer = for_student
    teacher.eval()
    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        student.train()
        for step in epoch:
            optimizer.zero_grad()
            for inputs, labels in step.round("student"):
                with torch.no_grad():
                    wanted = teacher(inputs)
                found = student(inputs)
                soft = soft_loss(found, wanted, options.temperature)
                hard = criterion(found, labels)
                loss = options.soft_weight * soft + (1 - options.soft_weight) * hard
                step.backward(loss)
            optimizer.step()
        score = accuracy(student, test_set)
        if job.is_leader:
            print(f"student, epoch {epoch.index}: {score:.3f}")
    if job.is_leader:
        print(digest(teacher, student))


if __name__ == "__main__":
    main()
