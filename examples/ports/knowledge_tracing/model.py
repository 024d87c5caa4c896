"""A recurrent network that follows what students know (Piech et al. 2015), on made-up students.

The loop has what scripts for it usually have: sequences of unequal lengths, an AUC on held-out
students, a rate that falls when it stops getting better, and the best weights put back at the end.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SKILLS = 6
PADDING = -1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--students", type=int, default=192)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better AUC")
    return parser.parse_args()


class Students(Dataset):
    """Gives the skills [n] that a student was asked for, and whether the answers were right."""

    def __init__(self, count: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(count):
            length = int(torch.randint(8, 24, (1,), generator=dice))
            skills = torch.randint(SKILLS, (length,), generator=dice)
            known = torch.randn(SKILLS, generator=dice)
            earlier = torch.stack([(skills[:i] == s).sum() for i, s in enumerate(skills)])
            chance = torch.sigmoid(2 * known[skills] + 0.3 * earlier)
            self.items.append((skills, (torch.rand(len(skills), generator=dice) < chance).long()))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.items[index]


def pad(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    skills, answers = zip(*batch, strict=True)
    return pad_sequence(skills, True, 0), pad_sequence(answers, True, PADDING)


class Tracer(nn.Module):
    """Predicts each answer [n, length - 1] but the first from those before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.seen = nn.Embedding(2 * SKILLS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, SKILLS)

    def forward(self, skills: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        seen = self.seen(skills + SKILLS * answers.clamp(min=0))
        states, _ = self.lstm(seen[:, :-1])
        return self.head(self.dropout(states)).gather(2, skills[:, 1:, None]).squeeze(2)


def summed_loss(found: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of all answers that are no padding, and their number."""
    asked = answers[:, 1:] != PADDING
    wanted = answers[:, 1:][asked].float()
    return F.binary_cross_entropy_with_logits(found[asked], wanted, reduction="sum"), len(wanted)


@torch.no_grad()
def auc(model: nn.Module, students: Students) -> float:
    """Return the share of pairs in which a right answer is expected more than a wrong one."""
    model.eval()
    skills, answers = pad(students.items)
    asked = answers[:, 1:] != PADDING
    found, wanted = model(skills, answers)[asked], answers[:, 1:][asked]
    model.train()
    order = found.argsort()
    ranks = torch.empty(len(found), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(found) + 1, dtype=torch.float64)
    right = wanted.sum().item()
    wrong = len(wanted) - right
    return (ranks[wanted == 1].sum().item() - right * (right + 1) / 2) / (right * wrong)


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
