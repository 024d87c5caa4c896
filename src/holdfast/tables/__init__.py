"""Offers embedding tables whose rows the job itself updates, with the names of TorchRec.

    tables = holdfast.tables.EmbeddingBagCollection(
        tables=[
            holdfast.tables.EmbeddingBagConfig(
                name="items", num_embeddings=1_000_000, embedding_dim=64, feature_names=["item"]
            )
        ],
        optimizer=holdfast.tables.RowWiseAdagrad(lr=0.05),
    )
    job.protect(model=model, optimizer=optimizer, tables=tables)

Only the rows that a step has used travel between workers. They are updated once, when the script
calls the optimizer of its other parameters. Names are imported when they are first used, since they
need torch. Must not know views, steps or processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.engine.plugins import Plugin

if TYPE_CHECKING:
    from holdfast.tables.collections import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from holdfast.tables.embeddings import Embedding, EmbeddingBag
    from holdfast.tables.row_optimizers import SGD, Adagrad, LazyAdam, RowOptimizer, RowWiseAdagrad
    from holdfast.tables.table_shape import KeyRules

__all__ = [
    "SGD",
    "Adagrad",
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

PLUGIN = Plugin(services={"tables": "holdfast.tables.service"})
# Names that were here once.
RECIPES = {"Downpour": "examples/recipes/downpour.py", "LBFGS": "examples/recipes/lbfgs.py"}
_MODULES = {
    "collections": (
        "EmbeddingBagCollection",
        "EmbeddingBagConfig",
        "EmbeddingCollection",
        "EmbeddingConfig",
    ),
    "embeddings": ("Embedding", "EmbeddingBag"),
    "row_optimizers": ("SGD", "Adagrad", "LazyAdam", "RowOptimizer", "RowWiseAdagrad"),
    "table_shape": ("KeyRules",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    if name in RECIPES:
        raise AttributeError(f"{__name__}.{name} is a recipe now: copy {RECIPES[name]} of Holdfast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
