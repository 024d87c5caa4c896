"""The sheet of papers shows what its script computes, and its figures agree with the papers."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from places import ROOT


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("papers", None)
    return importlib.import_module("papers")


def test_the_tables_of_the_sheet_are_those_of_the_script(papers):
    page = papers.PAGE.read_text(encoding="utf-8")
    for rows in (papers.list_rates(), papers.list_intervals(), papers.list_petascale()):
        assert papers.draw_rows(rows) in page


def test_the_petascale_projection_is_that_of_the_paper(papers):
    ours = {row.quantity: row.ours for row in papers.list_petascale()}
    assert ours["utilisation in 2012, saves of 818 s"].startswith("Young 0.149")
    assert ours["utilisation in 2013, saves of 818 s"] == "Young 0.000, Daly 0.163"


def test_restarts_lose_most_and_more_on_larger_clusters(papers):
    shares = []
    for gpus in papers.SIZES:
        ettr = papers.compare_systems(papers.make_headline_scenario(gpus, "llama3"))
        assert ettr["restart"] < ettr["FT-HSDP"] < ettr["Holdfast"] + 0.001
        assert ettr["Holdfast"] > ettr["torchft"] - 0.002
        shares.append(ettr["Holdfast"])
    assert shares == sorted(shares, reverse=True)
    assert shares[1] > 0.99


def test_a_goal_allows_three_per_cent_of_the_mean_between_failures(papers):
    scenario = papers.make_headline_scenario(100_000, "ft-hsdp")
    middle = scenario.model.rate.middle
    allowed_s = papers.needed_recovery_s(scenario, 0.97) * middle / scenario.model.rate.high
    assert allowed_s == pytest.approx(0.03 * 18 * 60, rel=0.02)


def test_a_page_without_a_place_for_a_table_is_named(papers):
    with pytest.raises(SystemExit, match="no place for rates"):
        papers.replace_drawn("nothing", {"rates": "x"})
