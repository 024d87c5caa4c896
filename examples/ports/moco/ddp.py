"""Train an encoder by momentum contrast with DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import Encoder, Queue, digest, images_of, parse_options, view
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    encoder, teacher = Encoder(), Encoder().requires_grad_(False)
    teacher.load_state_dict(encoder.state_dict())
    queue = Queue(options.queue)
    shared = DistributedDataParallel(encoder)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    known, held_out = images_of(512, seed=2), images_of(512, seed=3)
    dataset = images_of(options.images, seed=1)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(rank)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, _ in loader:
            queries, keys = shared(view(images)), teacher(view(images))
            same = (queries * keys).sum(dim=1, keepdim=True)
            likeness = torch.cat([same, queries @ queue.keys.t()], dim=1) / 0.2
            loss = F.cross_entropy(likeness, torch.zeros(len(images)).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            gathered = [torch.empty_like(keys) for _ in range(ranks)]
            dist.all_gather(gathered, keys)
            queue.put(torch.cat(gathered))
            with torch.no_grad():
                for mine, learnt in zip(teacher.parameters(), encoder.parameters(), strict=True):
                    mine.lerp_(learnt, 1 - options.momentum)
        with torch.no_grad():
            images, classes = (each[rank::ranks] for each in held_out.tensors)
            nearest = (encoder(images) @ encoder(known.tensors[0]).t()).argmax(1)
            right = (known.tensors[1][nearest] == classes).float().sum()
            sums = torch.stack([loss.detach() / ranks, right / len(held_out)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0]:.3f}, accuracy {sums[1]:.3f}")
    if rank == 0:
        print(digest(encoder, teacher, queue))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
