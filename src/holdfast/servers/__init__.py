"""Offers embedding tables whose rows the job itself updates, with the names of TorchRec.

    tables = holdfast.servers.EmbeddingBagCollection(
        tables=[
            holdfast.servers.EmbeddingBagConfig(
                name="items", num_embeddings=1_000_000, embedding_dim=64, feature_names=["item"]
            )
        ],
        optimizer=holdfast.servers.RowWiseAdagrad(lr=0.05),
    )
    job.protect(model=model, optimizer=optimizer, tables=tables)

Only the rows that a step has used travel between workers. They are updated once, when the script
calls the optimizer of its other parameters. Must not know views, steps or processes.
"""

from __future__ import annotations

from holdfast.servers.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from holdfast.servers.downpour import Downpour
from holdfast.servers.embeddings import Embedding, EmbeddingBag
from holdfast.servers.lbfgs import LBFGS
from holdfast.servers.row_optimizers import SGD, Adagrad, LazyAdam, RowOptimizer, RowWiseAdagrad
from holdfast.servers.table_shape import KeyRules

__all__ = [
    "LBFGS",
    "SGD",
    "Adagrad",
    "Downpour",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "KeyRules",
    "LazyAdam",
    "RowOptimizer",
    "RowWiseAdagrad",
]
