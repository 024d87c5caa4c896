"""Train in mixed precision with scaled losses and accumulation, with DistributedDataParallel."""

import contextlib

import torch
import torch.distributed as dist
from model import Classifier, digest, parse_options, sentences, warm_cosine
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = sentences(options.samples)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    model = DistributedDataParallel(Classifier())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    options.accumulate //= dist.get_world_size()
    updates = options.epochs * len(loader) // options.accumulate
    scheduler = LambdaLR(optimizer, warm_cosine(options.warmup, updates))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=16)
    torch.manual_seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for i, (words, labels) in enumerate(loader):
            updates_now = (i + 1) % options.accumulate == 0
            with contextlib.nullcontext() if updates_now else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(words), labels) / options.accumulate
                scaler.scale(loss).backward()
            if updates_now:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss * options.accumulate:.4f}, {scaler.get_scale():.0f}")
    if dist.get_rank() == 0:
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
