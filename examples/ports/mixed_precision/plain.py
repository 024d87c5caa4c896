"""Train in mixed precision with scaled losses and gradient accumulation, in one process."""

import torch
from model import Classifier, digest, parse_options, sentences, warm_cosine
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(sentences(options.samples), options.batch_size, shuffle=True)
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    updates = options.epochs * len(loader) // options.accumulate
    scheduler = LambdaLR(optimizer, warm_cosine(options.warmup, updates))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=16)
    for epoch in range(options.epochs):
        for i, (words, labels) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(words), labels) / options.accumulate
            scaler.scale(loss).backward()
            if (i + 1) % options.accumulate == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        print(f"epoch {epoch}: loss {loss * options.accumulate:.4f}, {scaler.get_scale():.0f}")
    print(digest(model))


if __name__ == "__main__":
    main()
