"""The layers of the package and those inside train, for the rules on imports."""

from __future__ import annotations

# Highest first. A module may import from its own package and from any lower row; packages of one
# row are strangers to each other. "" is holdfast/__init__.py.
LAYERS = (
    ("", "__main__", "testing", "integrations", "examples"),  # nothing below imports these
    ("cli",),
    ("dashboard", "plan"),
    ("launch",),
    ("runtime", "sim"),
    ("servers",),
    ("train",),
    ("health", "observe"),  # below train, which writes the ledger
    ("store", "memory"),
    ("net",),
    ("wire", "coding"),
    ("core",),
)
FORBIDDEN = {  # although the rows would allow it
    ("sim", "train"),
    ("testing", "cli"),
    ("testing", "examples"),
}
PUBLIC_API_USERS = ("cli",)  # they may `import holdfast`, like a user

# The same inside train, where "" stands for its modules outside any sub-package: the public API,
# and the place where everything is put together.
TRAIN_LAYERS = (
    ("",),
    ("script",),
    ("state", "shards"),
    ("feeding", "protection"),
    ("step", "data"),
    ("checkpoint",),
    ("optimizer_sharding",),
    ("exchange",),
)


def row(package: str, layers: tuple[tuple[str, ...], ...] = LAYERS) -> int | None:
    return next((i for i, packages in enumerate(layers) if package in packages), None)


def import_refused(importer: str, imported: str) -> str | None:
    """Why `importer` (a package of holdfast) may not import `imported`, or None."""
    if (importer, imported) in FORBIDDEN:
        return f"{importer} must never import {imported}"
    if importer == imported or row(importer) == 0:
        return None
    if imported == "" and importer in PUBLIC_API_USERS:
        return None
    return refused_by_rows(importer, imported, LAYERS, "holdfast itself")


def train_import_refused(importer: str, imported: str) -> str | None:
    """Why a module of train may not import another one, or None; names without holdfast.train.

    `imported` may be a name in a module; a first part that is in no layer is a module of the root.
    """
    above, below = importer.rpartition(".")[0], imported.partition(".")[0]
    below = below if row(below, TRAIN_LAYERS) is not None else ""
    if above == below:
        return None
    return refused_by_rows(above, below, TRAIN_LAYERS, "the root of train")


def refused_by_rows(
    importer: str, imported: str, layers: tuple[tuple[str, ...], ...], root: str
) -> str | None:
    above, below = row(importer, layers), row(imported, layers)
    if above is None or below is None:
        missing = importer if above is None else imported
        return f"no layer is known for {missing}: add it in tests/tidy_layers.py"
    if above == below:
        return f"{importer} and {imported} are in one layer and must not know each other"
    return f"{imported or root} is above {importer or root}" if above > below else None
