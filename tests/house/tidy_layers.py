"""The rooms of the package, their layers, and those inside train, for the rules on imports."""

from __future__ import annotations

# The engine, highest first. A module may import from its own room and from any lower row; rooms of
# one row are strangers to each other. "" stands for the engine's modules outside any room.
ENGINE = "engine"
LAYERS = (
    ("commands",),
    ("faults",),
    ("fleet",),
    ("runtime",),
    ("train",),
    ("host", "records", ""),  # below train, which writes the ledger
    ("state.store", "state.memory"),
    ("net",),
    ("wire", "state.coding"),
    ("core",),
)
# They import the engine, and not each other. The engine finds them by their plugins.
PRODUCTS = ("tables", "clusters", "trainers", "reports", "plan", "doctor", "lab")
# The public API, and the commands, which are found as well.
ROOTS = ("", "__main__", "old_paths", "cli")
# They import `holdfast`, as users do.
PUBLIC_API_USERS = ("cli", "doctor", "lab", "trainers")
# The decisions of the engine, and of tables, as functions of events alone.
CORE, TABLES_CORE = "engine.core", "tables.core"
PURE = (CORE, TABLES_CORE)
# The simulator drives the pure parts, and nothing else.
SIMULATOR = "lab.sim"
# They predict with the simulator, which is the shipped machines.
SIMULATOR_USERS = ("plan",)

# The same inside train, where "" stands for its modules outside any sub-package: the public API,
# and the place where everything is put together.
TRAIN_LAYERS = (
    ("",),
    ("script",),
    ("state", "shards"),
    ("step", "data"),
    ("checkpoint",),
    ("exchange",),
)


def find_room(name: str) -> str:
    """Return the room of a module or name of holdfast, such as engine.core or clusters."""
    parts = name.split(".")[1:]
    if parts[:1] != [ENGINE]:
        inner = ".".join(parts[:2])
        return inner if inner in (SIMULATOR, TABLES_CORE) else "".join(parts[:1])
    inside = [".".join(parts[1:3]), "".join(parts[1:2])]
    known = {room for layer in LAYERS for room in layer}
    return ".".join([ENGINE, *[room for room in inside if room in known and room][:1]])


def row(package: str, layers: tuple[tuple[str, ...], ...] = LAYERS) -> int | None:
    return next((i for i, packages in enumerate(layers) if package in packages), None)


def import_refused(importer: str, imported: str) -> str | None:
    """Why a module in one room of holdfast may not import from another, or None."""
    above, below = importer.partition(".")[0], imported.partition(".")[0]
    if importer == SIMULATOR:
        free = below == "lab" or imported in (*PURE, ENGINE)
        return None if free else f"{importer} must import {' and '.join(PURE)} only"
    if importer == TABLES_CORE:
        free = imported in (*PURE, ENGINE)
        return None if free else f"{importer} must import {CORE} only"
    if importer == imported or above in ("", "__main__"):
        return None
    for room in (above, below):
        if room not in (*PRODUCTS, *ROOTS, ENGINE):
            return f"no layer is known for {room}: add it in tests/house/tidy_layers.py"
    if above == below == ENGINE:
        return refused_by_rows(
            importer.partition(".")[2], imported.partition(".")[2], LAYERS, "the engine's root"
        )
    if below in (above, ENGINE):
        return None
    if above in SIMULATOR_USERS and imported == SIMULATOR:
        return None
    if below == "" and above in PUBLIC_API_USERS:
        return None
    return f"{above} must not know {below or 'holdfast itself'}: it finds products by their plugins"


def train_import_refused(importer: str, imported: str) -> str | None:
    """Why a module of train may not import another one, or None; names follow `engine.train`.

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
        return f"no layer is known for {missing}: add it in tests/house/tidy_layers.py"
    if above == below:
        return f"{importer} and {imported} are in one layer and must not know each other"
    return f"{imported or root} is above {importer or root}" if above > below else None
