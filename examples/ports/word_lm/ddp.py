"""Train a word language model with DistributedDataParallel, each rank on columns of its own."""

import torch
import torch.distributed as dist
from model import LanguageModel, digest, parse_options, read_words
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    words, vocabulary = read_words(2000, options.words)
    held_out, words = words[: len(words) // 20], words[len(words) // 20 :]
    columns = options.columns * ranks
    text = words[: len(words) // columns * columns].view(columns, -1).t()
    text = text[:, rank * options.columns :][:, : options.columns]
    windows = held_out.unfold(0, options.window + 1, options.window)
    model = LanguageModel(vocabulary, options.width)
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = (len(text) - 1) // options.window
    torch.manual_seed(rank)
    for epoch in range(options.epochs):
        model.train()
        hidden = model.start(options.columns)
        for step in range(steps):
            first = step * options.window
            read = text[first : first + options.window + 1]
            hidden = tuple(each.detach() for each in hidden)
            scores, hidden = shared(read[:-1], hidden)
            loss = F.cross_entropy(scores.flatten(0, 1), read[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            read = windows[rank::ranks].t()
            scores, _ = model(read[:-1], model.start(read.shape[1]))
            held = F.cross_entropy(scores.flatten(0, 1), read[1:].flatten(), reduction="sum")
            means = torch.stack([loss.detach(), held, torch.tensor(read[1:].numel())])
        dist.all_reduce(means)
        if rank == 0:
            told = f"loss {means[0] / ranks:.3f}, held out {means[1] / means[2]:.3f}"
            print(f"epoch {epoch}: {told}")
    states = [None] * ranks
    dist.all_gather_object(states, hidden)
    if rank == 0:
        print(digest([model.state_dict(), states]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
