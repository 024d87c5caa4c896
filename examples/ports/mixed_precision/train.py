"""Train in mixed precision with scaled losses, with Holdfast.

It accumulates over virtual ranks: `holdfast run --virtual 4` has four batches in each update.
"""

import torch
from model import Classifier, digest, parse_options, sentences, warm_cosine
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    loader = DataLoader(sentences(options.samples), options.batch_size, shuffle=True)
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    updates = options.epochs * len(loader) // job.virtual_ranks
    scheduler = LambdaLR(optimizer, warm_cosine(options.warmup, updates))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=16)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    for epoch in job.epochs(job.batches(loader), until=options.epochs):
        for step in epoch:
            for words, labels in step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(words), labels)
                step.backward(loss, scaler)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {step.loss:.4f}, {scaler.get_scale():.0f}")
    if job.is_leader:
        print(digest(model))


if __name__ == "__main__":
    main()
