"""Train a diffusion model with Holdfast."""

from model import EMA, Denoiser, Diffusion, digest, parse_options, spiral
from torch.optim import AdamW
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    loader = DataLoader(spiral(2048), options.batch_size, shuffle=True, drop_last=True)
    model, diffusion = Denoiser(), Diffusion()
    ema = EMA(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    job.protect(model=model, ema=ema.ma, optimizer=optimizer)
    for step in job.steps(job.batches(loader), until=options.steps):
        for (points,) in step:
            loss = diffusion.loss(model, points)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step.index)
        if (step.index + 1) % options.print_every == 0:
            radius = diffusion.sample(ema.ma.eval(), 256).norm(dim=1).mean()
            if job.is_leader:
                print(f"step {step.index}: loss {step.loss:.4f}, mean radius {radius:.3f}")
    if job.is_leader:
        print(digest(model, ema.ma))


if __name__ == "__main__":
    main()
