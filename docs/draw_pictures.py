"""Draw the pictures of `holdfast demo`, all from one run of it: `make pictures`.

The run is a real one, with real kills. From it come docs/demo.png (the losses of both runs),
docs/report.png (the page of `holdfast report` on the run with faults), docs/kill.svg (its terminal,
as an animation that needs no script) and the lines below that picture in README.md. The run's files
stay in build/pictures. Needs Chromium for the page, and matplotlib (the extra `demo`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
WORK = ROOT / "build" / "pictures"
RUN = "demo"  # in WORK; the page shows this path, so it is a relative one
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
DRAWN = re.compile(
    r"(?<=<!-- drawn by docs/draw_pictures.py -->\n)(.*?)(?=<!-- end -->\n)", re.DOTALL
)

STAMP = re.compile(r" *([0-9.]+) s  (.*)")
TITLE = re.compile(r"\d\. ")
STRIKE = re.compile(r"step \d+: (killed|froze) workers? ")
RECOVERED = re.compile(r"step \d+ is committed, .* after the fault was seen$")
STORY = re.compile(r"worker \d+ was lost|view \d+( is stopped)?: ")
ROWS = ("faulty  ", "workers lost", "SHA-256", "losses", "samples lost", "samples repeated")
GAP = "..."

PAGE_WIDTH, PAGE_HEIGHT_MAX, MARGIN = 1000, 4000, 24
COLOURS_MAX = 256  # a byte for each pixel
FONT_PX, LINE_PX, CHAR_PX, EDGE_PX = 13, 19, 7.83, 16
BAR_PX = 26  # above the lines, as a window has one
COLOURS = (
    ("command", re.compile(r"\$ ")),
    ("title", TITLE),
    ("strike", re.compile(rf".* s  {STRIKE.pattern}")),
    ("lost", re.compile(r".* was lost: ")),
    ("good", re.compile(r".* s  view \d+: |.* after the fault was seen$|.* equal *$")),
    ("proof", re.compile(r".* bit for bit\.$")),
    ("gap", re.compile(re.escape(GAP))),
)
STYLE = f"""\
text{{font:{FONT_PX}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;\
fill:#c9d1d9;white-space:pre}}
.command,.title{{fill:#fff;font-weight:bold}}.strike{{fill:#e3b341;font-weight:bold}}
.lost{{fill:#ff7b72}}.good{{fill:#7ee787}}.proof{{fill:#56d364;font-weight:bold}}.gap{{fill:#6e7681}}
.line{{animation:show .15s both}}@keyframes show{{from{{opacity:0}}}}
@media (prefers-reduced-motion:reduce){{.line{{animation:none}}}}
"""
# Seconds until a line is shown after the one before it. The stamps in the lines are the real times.
COMMAND_S, FAULT_S, LINE_S = 1.0, 1.6, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--again", action="store_true", help="draw the run of the last time, without a new one"
    )
    options = parser.parse_args()
    browser = find_browser()
    record, circumstances = WORK / "terminal.txt", WORK / "machine.txt"
    if not options.again:
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        circumstances.write_text(describe_machine())
        record.write_text(run_demo())
    printed = record.read_text().splitlines()
    (DOCS / "kill.svg").write_text(draw_terminal(choose_lines(printed, faults=4)))
    below = circumstances.read_text()
    README.write_text(replace_lines(README.read_text(), choose_transcript(printed), below))
    shrink(WORK / RUN / "losses.png", DOCS / "demo.png")
    page = WORK / "report.html"
    page.write_text(strip_folder((WORK / RUN / "faulty" / "report.html").read_text()))
    photograph(browser, page, WORK / "report.png")
    shrink(WORK / "report.png", DOCS / "report.png")


def find_browser() -> str:
    """Return the path of a Chromium: $CHROMIUM, or one on the path."""
    for name in (os.environ.get("CHROMIUM", ""), *BROWSERS):
        if name and (found := shutil.which(name)):
            return found
    sys.exit(
        "no Chromium, which takes the picture of the report: put it on the path, or name it in "
        "CHROMIUM (on Debian: apt-get install chromium)"
    )


def describe_machine() -> str:
    """Return a sentence on the machine, because pauses depend on what else it does."""
    when, load = time.strftime("%Y-%m-%d"), os.getloadavg()[0]
    return (
        f"Recorded on {when}, on {os.cpu_count()} cores with a load of {load:.0f} before the run.\n"
    )


def run_demo() -> str:
    """Run the demo, and return its output."""
    command = [sys.executable, "-m", "holdfast.cli.main", "demo", "--out", RUN]
    plain = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    found = subprocess.run(
        command, cwd=WORK, stdout=subprocess.PIPE, text=True, check=False, env=plain
    )
    sys.stdout.write(found.stdout)
    if found.returncode:
        sys.exit(f"the demo ended with status {found.returncode}: no picture was drawn")
    return found.stdout


# ---------------------------------------------------------------- the terminal


def choose_lines(printed: Sequence[str], faults: int) -> list[str]:
    """Choose the lines that show a run: its first `faults` faults, and rows of the proof.

    They are as the demo has printed them. `GAP` stands for other lines before a fault, or before
    the second run.
    """
    titles = [number for number, line in enumerate(printed) if TITLE.match(line)]
    calm, proof = titles[1], titles[-1]
    chosen = {0, *_choose_faults(printed[:calm], faults), calm}
    rows = [n for n in range(proof + 1, len(printed)) if printed[n].strip().startswith(ROWS)]
    chosen |= {*rows, len(printed) - 1}
    lines = ["$ holdfast demo"]
    before = -1
    for number in sorted(chosen):
        text = _text_of(printed[number])
        if number > before + 1 and (STRIKE.match(text) or number == calm):
            lines.append(GAP)
        if number in (rows[0], len(printed) - 1):
            lines.append("")
        lines.append(printed[number].rstrip())
        before = number
    return lines


def choose_transcript(printed: Sequence[str]) -> list[str]:
    """Choose the lines for the README: one fault, and the rows of the proof."""
    lines = choose_lines(printed, faults=1)
    story = [line for line in lines if STAMP.fullmatch(line)]
    return [*story, "", *(line for line in lines if line.strip().startswith(ROWS))]


def _choose_faults(printed: Sequence[str], faults: int) -> Iterator[int]:
    """Yield the numbers of a fault's line and of the next step after it; of the first one, all."""
    struck, is_open = 0, False
    for number, line in enumerate(printed):
        text = _text_of(line)
        if STRIKE.match(text) and struck < faults:
            struck, is_open = struck + 1, True
            yield number
        elif is_open and RECOVERED.match(text):
            is_open = False
            yield number
        elif is_open and struck == 1 and STORY.match(text):
            yield number


def _text_of(line: str) -> str:
    """Return a line without the time before it."""
    stamped = STAMP.fullmatch(line)
    return stamped[2] if stamped else line


def draw_terminal(lines: Sequence[str]) -> str:
    """Draw lines as SVG. They appear one after the other, and all stay."""
    width = round(max(map(len, lines)) * CHAR_PX) + 2 * EDGE_PX
    height = BAR_PX + len(lines) * LINE_PX + EDGE_PX
    dots = "".join(
        f'<circle cx="{EDGE_PX + 16 * n}" cy="14" r="5" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    rows, at = [], 0.0
    for number, line in enumerate(lines):
        kind = next((name for name, pattern in COLOURS if pattern.match(line)), "plain")
        at += {"command": 0.0, "title": COMMAND_S, "strike": FAULT_S}.get(kind, LINE_S)
        y = BAR_PX + LINE_PX * (number + 0.8)
        rows.append(
            f'<text class="line {kind}" style="animation-delay:{at:.1f}s" xml:space="preserve" '
            f'x="{EDGE_PX}" y="{y:.0f}">{escape(line, quote=False)}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            "<title>The terminal of a run of `holdfast demo`, cut</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>{dots}',
            *rows,
            "</svg>",
            "",
        ]
    )


def replace_lines(page: str, lines: Sequence[str], below: str) -> str:
    """Return the page with these lines between its marks, as a block of code, and a text below."""
    shown = "".join(f"    {line}".rstrip() + "\n" for line in lines)
    return DRAWN.sub(lambda _: f"\n{shown}\n{below}", page)


# ---------------------------------------------------------------- the other pictures


def strip_folder(page: str) -> str:
    """Return the report without the folder of the demo's script, which depends on the machine."""
    spec = importlib.util.find_spec("holdfast.lab.demo")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        page = page.replace(f"{folder}/", "")
    return page


def photograph(browser: str, page: Path, picture: Path) -> None:
    """Take a picture of a whole HTML page."""
    command = [
        browser,
        *("--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={picture}"),
        *(f"--window-size={PAGE_WIDTH},{PAGE_HEIGHT_MAX}", page.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True)


def shrink(source: Path, target: Path) -> None:
    """Copy a picture of flat colours without the empty part at its lower end, with few colours."""
    from PIL import Image, ImageChops

    with Image.open(source) as opened:
        picture = opened.convert("RGB")
    paper = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    box = ImageChops.difference(picture, paper).getbbox()
    assert box is not None, f"{source} is empty"
    height = min(picture.height, box[3] + MARGIN)
    few = picture.crop((0, 0, picture.width, height)).quantize(
        COLOURS_MAX, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    few.save(target, optimize=True)


if __name__ == "__main__":
    main()
