"""Train a diffusion model with DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import EMA, Denoiser, Diffusion, digest, parse_options, spiral
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = spiral(2048)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, drop_last=True)
    model, diffusion = Denoiser(), Diffusion()
    ema = EMA(model)
    shared = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    step = 0
    while step < options.steps:
        sampler.set_epoch(step)
        for (points,) in loader:
            loss = diffusion.loss(shared, points)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model, step)
            if (step + 1) % options.print_every == 0:
                mean = loss.detach() / dist.get_world_size()
                dist.all_reduce(mean)
                radius = diffusion.sample(ema.ma.eval(), 256).norm(dim=1).mean()
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {mean:.4f}, mean radius {radius:.3f}")
            step += 1
            if step == options.steps:
                break
    if dist.get_rank() == 0:
        print(digest(model, ema.ma))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
