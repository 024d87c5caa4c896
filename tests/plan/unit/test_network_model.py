"""The model of the network counts what real plans send, and is near published figures."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import pytest

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.sum_plan import SumPlan, plan_sum
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.exchange import gpu_transport
from holdfast.engine.train.exchange.layout import Layout
from holdfast.plan import network as model
from holdfast.plan.network import (
    AS_WRITTEN,
    CALL_FOR_EACH_LEVEL,
    H100,
    POSTED_BY_LIBRARY,
    Carriage,
    GpuNetwork,
    LinkSpeed,
    Span,
)
from places import ROOT

GB = 1e9
MB = 1e6


def plans_of(workers: int, vranks: int, whose: Iterable[int]) -> dict[int, SumPlan]:
    """Plan the sums of workers that host one block of virtual ranks each."""
    blocks: list[list[int]] = [[] for _ in range(workers)]
    for vrank in range(vranks):
        blocks[vrank * workers // vranks].append(vrank)
    nodes = [tree.maximal_nodes(block, vranks) for block in blocks]
    return {worker: plan_sum(nodes, vranks, worker) for worker in whose}


def network(gpus: int, nics: int, machines: int) -> GpuNetwork:
    return dataclasses.replace(
        H100, gpus_per_machine=gpus, nics_per_machine=nics, machines_per_rack=machines
    )


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("shape", [(8, 8, 4), (8, 1, 4), (8, 2, 1), (4, 4, 2), (1, 1, 8)])
@pytest.mark.parametrize(("workers", "vranks"), [(2, 2), (8, 16), (32, 32), (64, 64)])
def test_the_closed_form_counts_the_bytes_of_real_plans(
    shape: tuple[int, int, int], workers: int, vranks: int
) -> None:
    plans = plans_of(workers, vranks, range(workers))
    at = network(*shape)
    assert model.count_traffic(at, plans) == model.predict_traffic(at, workers)


@pytest.mark.parametrize(
    ("workers", "machines", "rack"), [(512, 4, 15), (1024, 4, 31), (1024, 1, 0), (4096, 1, 300)]
)
def test_the_closed_form_counts_the_bytes_of_a_rack_among_many(
    workers: int, machines: int, rack: int
) -> None:
    at = network(8, 8, machines)
    whose = range(rack * at.gpus_per_rack, (rack + 1) * at.gpus_per_rack)
    plans = plans_of(workers, workers, whose)
    assert model.count_traffic(at, plans) == model.predict_traffic(at, workers)


def test_all_nics_of_all_machines_carry_the_same_bytes() -> None:
    """Each GPU owns a piece of its machine's sum and sends it itself, so that no NIC idles."""
    workers = 64
    carried: Counter[tuple[str, tuple[int, int]]] = Counter()
    for worker, plan in plans_of(workers, workers, range(workers)).items():
        for level in (*plan.up, *plan.down):
            for way, messages in (("out", level.sends), ("in", level.receives)):
                for each in messages:
                    nic = H100.find_nic(worker)
                    if nic[0] != H100.find_nic(each.peer)[0]:
                        carried[way, nic] += each.part[1] - each.part[0]
    assert len(carried) == 2 * workers
    assert set(carried.values()) == {2 * Fraction(1, 8) * (1 - Fraction(8, workers))}


def test_a_machine_sends_one_sum_each_way_and_the_flat_exchange_eight() -> None:
    up, _ = model.predict_traffic(H100, 4096)
    per_nic = sum(level.nic for level in up)
    assert 8 * per_nic == 1 - Fraction(8, 4096)
    flat = model.time_flat(H100, POSTED_BY_LIBRARY, 4096, GB, GB)
    tree_s = model.time_tree(H100, POSTED_BY_LIBRARY, 4096, GB, GB)
    assert flat.busy_s["NICs"] / tree_s.busy_s["NICs"] == pytest.approx(8, rel=0.01)


def test_a_real_plan_is_counted_where_no_closed_form_exists() -> None:
    """Three machines: the third one's sum is joined last, and its pieces go to two owners."""
    up, down = model.count_traffic(H100, plans_of(24, 24, range(24)))
    assert [level.span for level in up] == [Span.MACHINE] * 3 + [Span.RACK] * 2
    assert up[-1].messages == down[0].messages == 2
    sums = model.time_levels(H100, POSTED_BY_LIBRARY, (*up, *down), GB, 25 * MB)
    wider = model.time_tree(H100, POSTED_BY_LIBRARY, 32, GB, 25 * MB)
    assert 0.9 < sums.total_s / wider.total_s < 1.5
    with pytest.raises(UserError, match="24 workers: not a power of two"):
        model.predict_traffic(H100, 24)


# ---------------------------------------------------------------- time

PAIR = GpuNetwork(
    gpus_per_machine=1,
    nics_per_machine=1,
    machines_per_rack=2,
    gpu_link=LinkSpeed(latency_s=1e-6, bytes_per_s=1e12, line_bytes_per_s=1e12),
    nic=LinkSpeed(latency_s=10e-6, bytes_per_s=1e9, line_bytes_per_s=2e9),
    fabric_latency_s=20e-6,
    memory_bytes_per_s=3e9,
)


def test_a_bucket_alone_takes_the_sum_of_its_stages() -> None:
    """Two machines: 1 us for the message, 10 us of latency, half a MB, and up half a MB added."""
    found = model.time_tree(PAIR, Carriage(message_s=1e-6), 2, MB, MB)
    assert found.passage_s == pytest.approx(2 * (1e-6 + 10e-6 + 0.5e-3) + 0.5e-3)
    assert found.total_s == found.passage_s
    assert next(iter(found.busy_s)) == "NICs"


def test_each_further_bucket_takes_the_busiest_resource_once_more() -> None:
    alone = model.time_tree(PAIR, Carriage(message_s=1e-6), 2, MB, MB)
    found = model.time_tree(PAIR, Carriage(message_s=1e-6), 2, 10 * MB, MB)
    assert found.total_s == pytest.approx(alone.passage_s + 9 * 1e-3)
    slow = model.time_tree(PAIR, Carriage(message_s=2e-3), 2, 10 * MB, MB)
    assert slow.total_s == pytest.approx(slow.passage_s + 9 * 4e-3)
    one = model.time_tree(PAIR, Carriage(message_s=1e-6, buckets_at_once=1), 2, 10 * MB, MB)
    assert one.total_s == pytest.approx(10 * alone.passage_s)


def test_pauses_between_looks_grow_up_to_a_limit() -> None:
    looks = Carriage(message_s=0.0, first_poll_s=1.0, poll_growth=2.0, poll_s=3.0)
    ends = [looks.see_end(lasted) for lasted in (0.5, 1.0, 1.1, 3.5, 6.5)]
    assert ends == [1.0, 1.0, 3.0, 6.0, 9.0]
    late = dataclasses.replace(looks, poll_extra_s=0.5)
    assert [late.see_end(lasted) for lasted in (1.0, 1.6, 7.5)] == [1.5, 4.0, 7.5]


def test_a_stage_whose_end_is_polled_lasts_whole_polls() -> None:
    found = model.time_tree(PAIR, Carriage(message_s=1e-6, first_poll_s=1e-3), 2, MB, MB)
    assert found.passage_s == pytest.approx(2e-3 + 1e-3)


def test_links_that_leave_a_rack_can_be_the_bottleneck() -> None:
    """A rack of 4 machines sends 4 sums by its NICs and 1 beyond them: 4:1 costs little."""
    times = [
        model.time_tree(
            dataclasses.replace(H100, oversubscription=by), POSTED_BY_LIBRARY, 4096, GB, 25 * MB
        )
        for by in (1, 4, 16)
    ]
    assert times[1].total_s == pytest.approx(times[0].total_s, rel=0.05)
    assert next(iter(times[2].busy_s)) == "rack links"
    assert times[2].total_s > 3 * times[0].total_s


def test_the_limit_is_the_one_of_the_nics_or_of_a_gpus_links() -> None:
    assert model.find_limit(H100, 8, GB) == pytest.approx(2 * GB * 7 / 8 / 450e9)
    assert model.find_limit(H100, 16384, GB) == pytest.approx(2 * GB * (1 - 1 / 2048) / 400e9)


@pytest.mark.parametrize("workers", [8, 64, 1024, 16384, 65536])
@pytest.mark.parametrize("bucket", [25 * MB, GB])
def test_nothing_is_faster_than_the_limit(workers: int, bucket: float) -> None:
    limit = model.find_limit(H100, workers, GB)
    for carriage in (POSTED_BY_LIBRARY, CALL_FOR_EACH_LEVEL, AS_WRITTEN):
        assert model.time_tree(H100, carriage, workers, GB, bucket).total_s > limit
        assert model.time_flat(H100, carriage, workers, GB, bucket).total_s > limit
    assert model.time_ring(H100, workers, GB, bucket) > limit
    assert model.time_double_tree(H100, workers, GB, bucket) > limit


def test_one_gigabyte_among_16384_gpus_takes_at_most_a_fifth_more_than_the_limit() -> None:
    """This holds for messages as cheap as NCCL's own, and for overlapping buckets, only."""
    limit = model.find_limit(H100, 16384, GB)
    assert model.time_tree(H100, POSTED_BY_LIBRARY, 16384, GB, 25 * MB).total_s < 1.2 * limit
    for carriage in (CALL_FOR_EACH_LEVEL, AS_WRITTEN):
        assert model.time_tree(H100, carriage, 16384, GB, 25 * MB).total_s > 1.2 * limit


def test_the_carriage_as_written_is_the_one_of_the_code() -> None:
    assert AS_WRITTEN.first_poll_s == gpu_transport.FIRST_POLL_S
    assert AS_WRITTEN.poll_growth == gpu_transport.POLL_GROWTH
    assert AS_WRITTEN.poll_s == gpu_transport.POLL_S
    assert (AS_WRITTEN.buckets_at_once == 1) == gpu_transport.NcclTransport.ordered


@pytest.mark.parametrize(("size", "bucket"), [(0, 1), (1, 0), (-1, 1)])
def test_sizes_must_be_positive(size: float, bucket: float) -> None:
    for predict in (model.time_ring, model.time_double_tree):
        with pytest.raises(UserError, match="give two positive numbers"):
            predict(H100, 8, size, bucket)
    with pytest.raises(UserError, match="give two positive numbers"):
        model.time_tree(H100, POSTED_BY_LIBRARY, 8, size, bucket)


# ---------------------------------------------------------------- a loss


def test_gpus_are_found_by_their_places_once_a_rank_is_missing() -> None:
    """Ranks are counted without gaps; machines and NICs keep their workers."""
    places = [place for place in range(16) if place != 3]
    hosted = [[3, place] if place == 2 else [place] for place in places]
    nodes = [tree.maximal_nodes(block, 16) for block in hosted]
    plans = {rank: plan_sum(nodes, 16, rank) for rank in range(15)}
    up, _ = model.count_traffic(H100, plans, places)
    assert [level.span for level in up] == [Span.MACHINE] * 3 + [Span.RACK]
    shifted, _ = model.count_traffic(H100, plans)
    assert Span.RACK in [level.span for level in shifted[:3]]


# ---------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("network_model")


def test_the_model_is_near_each_published_figure(script: Any) -> None:
    figures = script.figures
    off = {
        each.what: round(each.predict() / each.value, 2)
        for each in figures.PUBLISHED
        if not 1 / each.within <= each.predict() / each.value <= each.within
    }
    assert off == {}
    assert all(each.date and each.source.startswith("https://") for each in figures.PUBLISHED)
    gain = figures.predict_summit_gain() / figures.SUMMIT_GAIN
    assert 1 / figures.SUMMIT_WITHIN <= gain <= figures.SUMMIT_WITHIN


def test_the_model_is_near_our_own_figures(script: Any) -> None:
    figures = script.figures
    fixed, doubling = figures.fit_step_cpu()
    for workers, ms in figures.STEP_CPU_MS:
        assert fixed + doubling * math.log2(workers) == pytest.approx(ms, rel=0.1)
    for ranks, megabytes, ms in figures.FLAT_EXCHANGES:
        assert figures.predict_flat_exchange(ranks, megabytes) == pytest.approx(ms, rel=0.2)


def test_the_sheet_and_the_page_are_drawn_from_the_model(script: Any) -> None:
    pages = [page.read_text() for page in script.PAGES]
    for text in pages:
        assert script.draw(text) == text, "run: python benchmarks/network_model.py --write"
    for name in script.SECTIONS:
        assert any(script.BEGIN.format(name) in text for text in pages), name
    begin, old = script.BEGIN.format("price"), "A message may cost nothing."
    assert old not in script.draw(f"{begin}\n{old}\n{script.END}\n")


def test_the_example_of_the_page_predicts_something() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    ended = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=False
    )
    assert 0 < float(ended.stdout.split()[0]) < 1, ended.stderr


@pytest.mark.parametrize("workers", [4, 16, 32, 1024])
def test_a_member_connects_to_the_peers_of_its_sums_and_votes(workers: int) -> None:
    """As measured among 4, 16 and 32 workers (benchmarks/MANY_WORKERS.md): 3, 7 and 9."""
    hosted = tuple((v,) for v in range(workers))
    nodes = tuple(tree.maximal_nodes(each, workers) for each in hosted)
    owners = tuple(WorkerId(v) for v in range(workers))
    layout = Layout(workers // 3, workers, workers, hosted, nodes, owners)
    assert len(layout.peers) == 2 * (workers.bit_length() - 1) - 1
