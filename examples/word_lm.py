"""Train a word language model on text, with a hidden state that continues from batch to batch.

    python examples/word_lm.py                      alone
    holdfast run --nproc 4 examples/word_lm.py      on four workers; kill any: the same result

The text is cut into columns. Each virtual rank reads columns of its own, a window of words a step.
The hidden state belongs to the virtual rank, too: whichever worker computes a batch continues where
the last window ended. The last line printed is the SHA-256 of the model and the hidden states, so
that runs can be compared.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

Hidden = tuple[torch.Tensor, torch.Tensor]  # each [layers, columns, width]


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.shape = (layers, width)
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def start(self, columns: int) -> Hidden:
        layers, width = self.shape
        return torch.zeros(layers, columns, width), torch.zeros(layers, columns, width)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        """Return scores [length, columns, words of the vocabulary] and the next hidden state."""
        outputs, hidden = self.lstm(self.drop(self.embedding(words)), hidden)
        return self.head(self.drop(outputs)), hidden


def read_words(vocabulary_max: int, words_max: int) -> tuple[torch.Tensor, int]:
    """Return the words of the standard library's sources as numbers, and how many differ."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text("utf-8", "replace") for path in paths)
    words = re.findall(r"\w+|[^\w\s]|\n", text)[:words_max]
    common = collections.Counter(words).most_common(vocabulary_max - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words]), len(numbers) + 1


def digest(state: object) -> str:
    """Compute SHA-256 over every name, number and tensor in nested lists and dictionaries."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        state = list(state.items())
    text = str([digest(s) for s in state]) if isinstance(state, list | tuple) else repr(state)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--columns", type=int, default=8, help="columns per virtual rank")
    parser.add_argument("--window", type=int, default=24, help="words that a step reads")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--words", type=int, default=60_000, help="number of words to train on")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    words, vocabulary = read_words(2000, options.words)
    held_out, words = words[: len(words) // 20], words[len(words) // 20 :]
    columns = options.columns * job.virtual_ranks
    text = words[: len(words) // columns * columns].view(columns, -1).t()
    windows = held_out.unfold(0, options.window + 1, options.window)
    model = LanguageModel(vocabulary, options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    job.protect(model=model, optimizer=optimizer)
    hidden = job.rank_state("hidden", lambda vrank: model.start(options.columns))

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over windows of the held-out text, each read by itself."""
        read = batch[0].t()
        scores, _ = model(read[:-1], model.start(read.shape[1]))
        return F.cross_entropy(scores.flatten(0, 1), read[1:].flatten())

    steps = (len(text) - 1) // options.window
    for epoch in job.epochs(until=options.epochs, steps_per_epoch=steps):
        for step in epoch:
            first = step.step_in_epoch * options.window
            for _ in step:
                mine = slice(step.virtual_rank * options.columns, None)
                read = text[first : first + options.window + 1, mine][:, : options.columns]
                before = hidden.value if step.step_in_epoch else model.start(options.columns)
                scores, hidden.value = model(read[:-1], before)
                step.backward(F.cross_entropy(scores.flatten(0, 1), read[1:].flatten()))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        loss = job.evaluate(loss_of, TensorDataset(windows), batch_size=16)
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {step.loss:.3f}, held out {loss:.3f}", flush=True)
    if job.is_leader:
        states = [hidden[vrank] for vrank in range(job.virtual_ranks)]
        print(digest([model.state_dict(), states]), flush=True)


if __name__ == "__main__":
    main()
