"""A user's trace of failures becomes a model, or one sentence."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from holdfast.engine.core.errors import UserError
from holdfast.plan.distributions import Weibull
from holdfast.plan.failure_tables import DAY_S, LANL_REPAIR, Effect
from holdfast.plan.traces import find_incidents, fit_trace, read_trace

HEAD = "# nodes: 100\n# days: 10\ntime,node,effect,repair_s\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_gives_rate_shares_and_repairs(tmp_path):
    rows = [f"{hour * 3600},n{hour},node,{600 * (hour + 1)}" for hour in range(6)]
    rows += ["2026-03-01T04:12:09,n1,process,", "900000,n2,hang,"]
    trace = read_trace(write(tmp_path, HEAD + "\n".join(rows) + "\n"))
    model = fit_trace(trace, "mine", 4)
    assert model.rate.low < 8 < model.rate.high
    assert model.share(Effect.NODE) == 6 / 8
    assert model.repair.median_s == 2100.0
    assert model.gpus_per_node == 4
    assert model.shape == 1.0


def test_nodes_that_are_lost_within_a_minute_are_one_loss_of_their_domain(tmp_path):
    text = HEAD + "100,a,node,60\n130,b,node,90\n500,c,node,60\n520,c,node,60\n"
    found = find_incidents(read_trace(write(tmp_path, text)))
    assert [(row.effect, row.repair_s) for row in found] == [
        (Effect.DOMAIN, 90.0),
        (Effect.NODE, 60.0),
    ]
    assert fit_trace(read_trace(write(tmp_path, text)), "mine", 8).repair == LANL_REPAIR


def test_the_shape_of_nodes_is_found_in_a_long_trace(tmp_path):
    times, rng = Weibull(mean_s=5 * DAY_S, shape=0.7), Random(1)
    rows = []
    for node in range(40):
        at = times.draw(rng)
        while at < 300 * DAY_S:
            rows.append(f"{at},n{node},process,")
            at += times.draw(rng)
    rng.shuffle(rows)
    text = "# nodes: 40\n# days: 300\ntime,node,effect,repair_s\n" + "\n".join(rows)
    model = fit_trace(read_trace(write(tmp_path, text)), "mine", 8)
    assert model.shape == pytest.approx(0.7, abs=0.05)
    assert model.rate.low < 200 * 1.2 < model.rate.high * 1.2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("time,node,effect,repair_s\n1,a,node,\n", "without a line `# nodes: NUMBER`"),
        ("# nodes: 0\n# days: 1\n", "without a line `# nodes: NUMBER`"),
        ("# nodes: 5\ntime,node,effect,repair_s\n", "without a line `# days: NUMBER`"),
        ("# nodes: 5\n# days: 1\ntime,node\n", ":3: the columns are time,node"),
        (HEAD, "has no failure"),
        (HEAD + "1,a,node\n", ":4: has 3 fields instead of 4"),
        (HEAD + "1,a,node,\n\nsoon,a,node,\n", ":6: the time 'soon' is neither"),
        (HEAD + "nan,a,node,\n", "is not finite"),
        (HEAD + "1,a,burnt,\n", "the effect 'burnt' must be one of process, node"),
        (HEAD + "1,a,node,-5\n", "the repair_s '-5' is no number"),
        (HEAD + "1,,node,5\n", ":4: has no node"),
        ("", "without a line"),
    ],
)
def test_a_trace_that_cannot_be_used_gets_one_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError) as error:
        read_trace(write(tmp_path, text))
    assert sentence in str(error.value)
    assert "trace.csv" in str(error.value)
    assert "\n" not in str(error.value)
