"""Train a diffusion model in one process."""

import torch
from model import EMA, Denoiser, Diffusion, digest, parse_options, spiral
from torch.optim import AdamW
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(spiral(2048), options.batch_size, shuffle=True, drop_last=True)
    model, diffusion = Denoiser(), Diffusion()
    ema = EMA(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < options.steps:
        for (points,) in loader:
            loss = diffusion.loss(model, points)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model, step)
            if (step + 1) % options.print_every == 0:
                radius = diffusion.sample(ema.ma.eval(), 256).norm(dim=1).mean()
                print(f"step {step}: loss {loss:.4f}, mean radius {radius:.3f}")
            step += 1
            if step == options.steps:
                break
    print(digest(model, ema.ma))


if __name__ == "__main__":
    main()
