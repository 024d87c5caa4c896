"""Public modules are still imported by the paths that they had before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdfast
from holdfast.old_paths import PATHS, path_now


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("servers", "tables"),
        ("servers.collections", "tables.collections"),
        ("integrations.accelerate", "trainers.accelerate"),
        ("integrations.otel", "reports.otel"),
        ("testing.cluster_contract", "lab.contracts.cluster_contract"),
        ("testing.local_run", "engine.runtime.local_run"),
    ],
)
@pytest.mark.parametrize("form", ["import {0}.{1} as found", "from {0} import {1} as found"])
def test_an_old_path_leads_to_the_same_module(old: str, now: str, form: str) -> None:
    parent, _, name = f"holdfast.{old}".rpartition(".")
    code = f"{form.format(parent, name)}; import holdfast.{now} as now; assert found is now"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_of_tables_are_found_by_both_names() -> None:
    assert holdfast.servers.EmbeddingBag is holdfast.tables.EmbeddingBag
    with pytest.raises(AttributeError, match=r"holdfast\.tables.*Nothing"):
        _ = holdfast.servers.Nothing


def test_a_module_that_never_was_is_not_found() -> None:
    assert path_now("holdfast.engine") == ""
    with pytest.raises(ModuleNotFoundError):
        __import__("holdfast.servers.nothing")


def test_what_old_paths_lead_to_is_there() -> None:
    for old in PATHS:
        __import__(old)
