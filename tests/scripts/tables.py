"""Trains two kinds of tables; prints a digest of every row and of the rest."""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast import tables as servers

ROWS, DIM, BAG = 200, 4, 3

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--task-s", type=float, default=0.0)
parser.add_argument("--rows", type=int, default=ROWS, help="more than the ids that are used")
parser.add_argument("--keyed", action="store_true", help="items have any keys, and too little room")
parser.add_argument(
    "--stale", nargs=2, type=int, action="append", default=[], help="STEP STALENESS"
)
parser.add_argument("--half", action="store_true", help="steps read rows as float16")
parser.add_argument("--written", action="store_true", help="rows are pretrained, and clipped")
options = parser.parse_args()

job = holdfast.join()
precision = {"forward_precision": "fp16"} if options.half else {}
rules = {"num_embeddings": None, "max_capacity": 96, "admit_after": 2}
sizes = {"items": rules if options.keyed else {"num_embeddings": ROWS}}
sizes["users"] = {"num_embeddings": options.rows}
bags = servers.EmbeddingBagCollection(
    [
        servers.EmbeddingBagConfig(name=name, embedding_dim=DIM, **size)
        for name, size in sizes.items()
    ],
    optimizer=servers.RowWiseAdagrad(lr=0.1),
    **precision,
)
rule = servers.LazyAdam(lr=0.01)
words = servers.Embedding(ROWS, DIM, 0, name="words", optimizer=rule, **precision)
top = nn.Linear(3 * DIM, 2)
optimizer = torch.optim.AdamW(top.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(words.row_optimizer, gamma=0.99)
job.protect(bags=bags, words=words, top=top, optimizer=optimizer, scheduler=scheduler)

if options.written:
    bags.write_rows("users", torch.linspace(-1, 1, options.rows * DIM).view(-1, DIM))
    words.load_state_dict({"weight": torch.linspace(1, -1, ROWS * DIM).view(-1, DIM)})

dice = torch.Generator().manual_seed(5)
ids = (ROWS * torch.rand(500, 3, BAG, generator=dice) ** 3).long()
data = job.batches(TensorDataset(ids, ids.sum(2)[:, :2].float().sin()), 5)
staleness = dict(options.stale)
for step in job.steps(data, until=options.steps):
    for given, targets in step:
        offsets = torch.arange(0, len(given) * BAG, BAG)
        items = given[:, 0] * (0x5DEECE66D1357 if options.keyed else 1)
        inputs = {"items": items, "users": given[:, 1]}
        found = bags({name: (each.reshape(-1), offsets) for name, each in inputs.items()})
        rows = words(given[:, 2]).mean(1)
        logits = top(torch.cat([found["items"], found["users"], rows], dim=1))
        step.backward(nn.functional.mse_loss(logits, targets))
        time.sleep(options.task_s)
    if options.written:
        parameters = [*bags.parameters(), *words.parameters(), *top.parameters()]
        nn.utils.clip_grad_norm_(parameters, 0.2)
    optimizer.step()
    optimizer.zero_grad()
    if options.written and step.index % 7 == 6:
        words.write_rows(words.read_rows().clamp(-0.5, 0.5))
    scheduler.step()
    if step.index + 1 in staleness:
        for tables in bags, words:
            tables.row_optimizer.set_staleness(staleness[step.index + 1])

if job.is_leader:
    parts = [bags.read_rows("items"), bags.read_rows("users"), words.read_rows(), top.weight]
    if options.keyed:
        parts.append(bags.read_keys("items"))
        assert 10 < len(parts[-1]) <= rules["max_capacity"]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().numpy().tobytes())
    print(digest.hexdigest())
