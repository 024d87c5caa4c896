"""The dashboard's page in a real browser, which follows a real run through faults."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Start
from dashboard_kit import SCRIPT, Dashboard, write_crashed_run
from holdfast.engine.runtime.local_run import LocalRun, strike
from labs.chromium import Chromium, find_chromium
from labs.local_nodes import LocalNodes

LIMIT_S = 60.0
DASH = "\N{EN DASH}"
STEP = "Number(document.querySelector('#tiles dd').textContent.replaceAll(',', ''))"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_chromium(), reason="no browser is installed (package chromium)"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path / "profile") as found:
        yield found


def text_of(browser: Chromium, name: str) -> str:
    return str(browser.run(f"document.getElementById('{name}').innerText"))


def until_text(browser: Chromium, name: str, text: str) -> None:
    browser.until(f"document.getElementById('{name}')?.innerText.includes({text!r})", LIMIT_S)


def click(browser: Chromium, selector: str) -> None:
    browser.run(f"document.querySelector({selector!r}).click()")


def drain_far(browser: Chromium) -> None:
    browser.until("document.querySelector('button[data-node=far]') !== null", LIMIT_S)
    click(browser, "button[data-node=far]")
    assert browser.run("document.activeElement.id") == "confirm-yes"
    for close in (lambda: click(browser, "#confirm-no"), lambda: browser.press("Escape")):
        close()
        assert not browser.run("document.getElementById('confirm').open")
        click(browser, "button[data-node=far]")
    browser.run("document.getElementById('confirm').close()")
    click(browser, "button[data-node=far]")
    click(browser, "#confirm-yes")
    until_text(browser, "confirm-question", "Drain node far with")
    assert text_of(browser, "confirm-yes") == "Drain far"
    click(browser, "#confirm-yes")
    until_text(browser, "orders", "drain far: done: far has left the job")


def lose_the_coordinator(browser: Chromium, run: LocalRun) -> None:
    pid = run.status()["coordinator"]["pid"]
    strike(pid, signal.SIGSTOP)
    until_text(browser, "banner", "The coordinator does not answer")
    assert browser.run("document.querySelectorAll('#tiles dd')[5].textContent") == DASH
    strike(pid)
    browser.until("document.getElementById('banner').hidden", LIMIT_S)
    assert run.status()["coordinator"]["pid"] != pid


def go_from_an_incident_to_its_mark_and_back(browser: Chromium) -> None:
    details = "document.querySelector('#incidents details')"
    tip = "document.querySelector('#loss .tip')"
    browser.run(f"{details}.open = true")
    until_text(browser, "incidents", "  | line 299")
    click(browser, "#incidents details button")
    browser.until(f"!{tip}.hidden && {tip}.textContent.includes('was lost')", LIMIT_S)
    browser.run(f"{details}.open = false")
    browser.run("document.querySelector('#loss canvas').focus()")
    browser.press("Enter")
    assert browser.run(f"{details}.open && document.activeElement.parentElement === {details}")


def look_at_the_machine(browser: Chromium) -> None:
    shown = "[...document.querySelectorAll('#machines-section canvas')].map(c => c.ariaLabel)"
    browser.until(
        f"{shown}[0].startsWith('Busy processors; last 1.25 at 17.5 s; 1 faults')", LIMIT_S
    )
    assert [text.partition(" at ")[0] for text in browser.run(shown)[1:]] == [
        "Memory in GB; last 2",
        "Received, MB per second; last 1",
        "Sent, MB per second; last 3",
    ]
    choose = "machine.value = 'worker 1'; machine.dispatchEvent(new Event('change'))"
    browser.run(f"var machine = document.getElementById('machine-line'); {choose}")
    browser.until(f"{shown}[0].startsWith('Busy processors; last 0.5 at')", LIMIT_S)
    assert browser.run(shown)[2:] == [
        "Received, MB per second; 1 faults",
        "Sent, MB per second; 1 faults",
    ]


def test_a_page_follows_a_run_through_faults(start: Start, browser: Chromium) -> None:
    words = ("--steps", "100000", "--task-s", "0.02")
    with (
        start(*words, nproc=1, options=("--virtual", "4", "--nodes-min", "2")) as run,
        LocalNodes(run) as others,
        Dashboard(run.run_dir.path) as dashboard,
    ):
        run.until(run.run_dir.coordinator.exists, LIMIT_S, "the coordinator listens")
        others.add("far")
        browser.open(f"{dashboard.origin}/?token=wrong")
        browser.until("document.body.innerText.startsWith('The token is missing')", LIMIT_S)
        browser.open(dashboard.url)
        until_text(browser, "state", "training")
        assert browser.run("[location.search, document.cookie]") == ["", ""]
        assert text_of(browser, "name") == run.run_dir.path.name
        step = browser.until(f"{STEP} > 0 ? {STEP} : 0", LIMIT_S)
        browser.until(f"{STEP} > {step + 5}", LIMIT_S)
        browser.until(
            f"document.querySelectorAll('#tiles dd')[6].textContent !== {DASH!r}", LIMIT_S
        )

        victim = max(run.members().items())
        strike(victim[1])
        until_text(browser, "incidents", f"worker {victim[0]} was lost: ended by SIGKILL")
        until_text(browser, "incidents", "until the next step")

        browser.run("document.getElementById('grid').focus()")
        browser.press("ArrowRight")
        until_text(browser, "worker", "Worker ")
        until_text(browser, "worker", "logs/worker-")
        browser.press("Escape")
        until_text(browser, "worker", "No worker is chosen.")

        run.until_members(2)
        drain_far(browser)
        lose_the_coordinator(browser, run)
        step = browser.run(STEP)
        browser.until(f"{STEP} > {step + 5}", LIMIT_S)
        refused = ("/?token=wrong", "/favicon.ico")  # the refused page asks for both
        assert [each for each in browser.complaints if not each.endswith(refused)] == []


def test_a_page_shows_a_crashed_run(browser: Chromium, tmp_path: Path) -> None:
    write_crashed_run(tmp_path / "run")
    with Dashboard(tmp_path / "run") as dashboard:
        browser.open(dashboard.url)
        until_text(browser, "incidents", f"worker 1 was lost: {SCRIPT}")
        until_text(browser, "banner", "The coordinator does not answer")
        until_text(browser, "goodput", "productive")
        assert text_of(browser, "script") == SCRIPT
        assert not browser.run("document.querySelector('img')")
        assert text_of(browser, "legend") == "not known 2"
        go_from_an_incident_to_its_mark_and_back(browser)
        look_at_the_machine(browser)
        for width, dark in ((360, False), (1280, True)):
            browser.resize(width, 800, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.complaints == []


def test_a_grid_of_thousands_of_workers_draws_only_what_is_visible(
    browser: Chromium, tmp_path: Path
) -> None:
    write_crashed_run(tmp_path / "run")
    show = """(async () => {
      const { Grid } = await import("/static/grid.js");
      const box = document.getElementById("grid").cloneNode(true);
      document.querySelector("main").prepend(box);
      window.grid = new Grid(box, (id) => { window.chosen = id; });
      const states = ["computing", "waiting", "lost", "joining", null];
      window.grid.show(Array.from({ length: 2000 }, (_, id) => (
        { id, node: `node${Math.floor(id / 8)}`, state: states[id % 97 % 5] })));
      await new Promise(requestAnimationFrame);
      box.scrollTop = 300;
      box.focus();
      return [box.clientHeight, window.grid.canvas.clientHeight, box.scrollHeight > 1000];
    })()"""
    with Dashboard(tmp_path / "run") as dashboard:
        browser.open(dashboard.url)
        until_text(browser, "incidents", "worker 1 was lost")
        height, drawn, scrolls = browser.run(show)
        assert height == drawn
        assert scrolls
        browser.press("End")
        assert browser.run("window.chosen") == 1999
        box = "window.grid.box"
        assert browser.run(f"{box}.scrollTop + {box}.clientHeight > {box}.scrollHeight - 30")
        browser.press("ArrowLeft")
        assert browser.run("window.chosen") == 1998
        browser.press("Home")
        assert browser.run("[window.chosen, window.grid.box.scrollTop < 20]") == [0, True]
        assert browser.complaints == []
