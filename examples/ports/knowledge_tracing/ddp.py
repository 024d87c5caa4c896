"""Train a knowledge tracer with DistributedDataParallel, until its AUC gets no better."""

import copy

import torch
import torch.distributed as dist
from model import Students, Tracer, auc, digest, pad, parse_options, summed_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    students = Students(options.students, seed=1)
    sampler = DistributedSampler(students)
    loader = DataLoader(students, options.batch_size, sampler=sampler, collate_fn=pad)
    held_out = Students(options.students // 3, seed=2)
    model = DistributedDataParallel(Tracer())
    optimizer = Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=1)
    best, waited = 0.0, 0
    best_weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for skills, answers in loader:
            optimizer.zero_grad()
            loss, count = summed_loss(model(skills, answers), answers)
            counts = torch.tensor(float(count))
            dist.all_reduce(counts)
            loss = loss * dist.get_world_size() / counts
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score = auc(model.module, held_out)
        scheduler.step(score)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, AUC {score:.3f}")
        if score > best:
            best, waited = score, 0
            best_weights = copy.deepcopy(model.state_dict())
        else:
            waited += 1
            if waited == options.patience:
                break
    model.load_state_dict(best_weights)
    if dist.get_rank() == 0:
        print(f"best AUC {best:.3f}")
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
