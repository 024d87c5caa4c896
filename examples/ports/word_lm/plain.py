"""Train a word language model in one process."""

import torch
from model import LanguageModel, digest, parse_options, read_words
from torch import nn
from torch.nn import functional as F


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    words, vocabulary = read_words(2000, options.words)
    held_out, words = words[: len(words) // 20], words[len(words) // 20 :]
    columns = options.columns
    text = words[: len(words) // columns * columns].view(columns, -1).t()
    windows = held_out.unfold(0, options.window + 1, options.window)
    model = LanguageModel(vocabulary, options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = (len(text) - 1) // options.window
    for epoch in range(options.epochs):
        model.train()
        hidden = model.start(options.columns)
        for step in range(steps):
            first = step * options.window
            read = text[first : first + options.window + 1]
            hidden = tuple(each.detach() for each in hidden)
            scores, hidden = model(read[:-1], hidden)
            loss = F.cross_entropy(scores.flatten(0, 1), read[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            read = windows.t()
            scores, _ = model(read[:-1], model.start(read.shape[1]))
            held = F.cross_entropy(scores.flatten(0, 1), read[1:].flatten())
        print(f"epoch {epoch}: loss {loss:.3f}, held out {held:.3f}")
    print(digest([model.state_dict(), hidden]))


if __name__ == "__main__":
    main()
