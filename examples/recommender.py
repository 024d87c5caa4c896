"""Train a recommender on clicks: a DLRM (Naumov et al. 2019) with tables that the job updates.

    python examples/recommender.py                      alone
    holdfast run --nproc 4 examples/recommender.py      on four workers; kill any: the same result

The data have the shape of Criteo's: 13 numbers and 26 ids for each sample, some ids far more common
than other ids (Zipf's law), and clicks that a hidden teacher decides. The first line printed is the
AUC on samples that were not trained on. The last one is the SHA-256 of the model and its tables.
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast import tables as servers

DENSE, SPARSE = 13, 26  # numbers and ids of a sample
FEATURES = [f"c{i}" for i in range(SPARSE)]


class Recommender(nn.Module):
    """Predicts the logit of a click from the numbers, the rows, and how they fit each other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            *(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU()),
        )
        pairs = (SPARSE + 1) * SPARSE // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.triu_indices(SPARSE + 1, SPARSE + 1, offset=1))

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`dense`: [batch, DENSE]; `rows`: [batch, SPARSE, dim]; returns [batch]."""
        low = self.bottom(dense)
        every = torch.cat([low[:, None], rows], dim=1)
        fits = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([low, fits], dim=1)).squeeze(1)


def make_tables(rows: int, dim: int) -> servers.EmbeddingBagCollection:
    configs = [
        servers.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim)
        for name in FEATURES
    ]
    return servers.EmbeddingBagCollection(configs, optimizer=servers.RowWiseAdagrad(lr=0.05))


def look_up(tables: servers.EmbeddingBagCollection, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of ids [batch, SPARSE]: [batch, SPARSE, dim]."""
    starts = torch.arange(len(ids))
    found = tables({name: (ids[:, i], starts) for i, name in enumerate(FEATURES)})
    return torch.stack([found[name] for name in FEATURES], dim=1)


def clicks(count: int, rows: int, seed: int) -> TensorDataset:
    """Return numbers, ids, and clicks that a teacher with hidden weights has decided."""
    teacher = torch.Generator().manual_seed(11)
    tastes = torch.randn(SPARSE, rows, generator=teacher)
    weights = torch.randn(DENSE, generator=teacher) / 2
    dice = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, DENSE, generator=dice)
    shares = 1 / torch.arange(1, rows + 1).double() ** 1.1
    ids = torch.multinomial(shares, count * SPARSE, replacement=True, generator=dice)
    ids = ids.view(count, SPARSE)
    liked = tastes.gather(1, ids.T).sum(0) / math.sqrt(SPARSE)
    chance = torch.sigmoid(1.5 * (liked + dense @ weights))
    return TensorDataset(dense, ids, torch.bernoulli(chance, generator=dice))


def auc(logits: torch.Tensor, clicked: torch.Tensor) -> float:
    """Return the share of pairs in which a sample with a click has the higher logit."""
    order = logits.argsort()
    places = torch.empty(len(order), dtype=torch.float64)
    places[order] = torch.arange(1, len(order) + 1, dtype=torch.float64)
    hits = int(clicked.sum())
    above = places[clicked == 1].sum().item() - hits * (hits + 1) / 2
    return above / (hits * (len(order) - hits))


def digest(model: nn.Module, tables: servers.EmbeddingBagCollection) -> str:
    rows = {name: tables.read_rows(name) for name in FEATURES}
    found = hashlib.sha256()
    for name, value in (model.state_dict() | rows).items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a virtual rank")
    parser.add_argument("--rows", type=int, default=1000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=16, help="numbers of each row")
    parser.add_argument("--samples", type=int, default=100_000)
    options = parser.parse_args()

    job = holdfast.join(seed=3)
    tables = make_tables(options.rows, options.dim)
    model = Recommender(options.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    job.protect(model=model, optimizer=optimizer, tables=tables)

    data = job.batches(clicks(options.samples, options.rows, seed=1), options.batch_size)
    for step in job.steps(data, until=options.steps):
        for dense, ids, clicked in step:
            logits = model(dense, look_up(tables, ids))
            step.backward(F.binary_cross_entropy_with_logits(logits, clicked))
        optimizer.step()
        optimizer.zero_grad()

    if job.is_leader:
        dense, ids, clicked = clicks(20_000, options.rows, seed=2).tensors
        with torch.no_grad():
            print(f"AUC {auc(model(dense, look_up(tables, ids)), clicked):.4f}")
        print(digest(model, tables))


if __name__ == "__main__":
    main()
