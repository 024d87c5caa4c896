"""The site of the documents, in a real browser: a search finds the page, without other servers."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from labs.chromium import Chromium, find_chromium
from places import ROOT

LIMIT_S = 120.0
#: What people type, and the page that must be among the first results.
SEARCHES = {
    "resume training after crash PyTorch": "after-a-resume.html",
    "elastic training": "clusters.html",
    "spot instances": "clusters.html",
    "straggler": "stragglers.html",
    "silent data corruption": "silent-errors.html",
    "async checkpoint": "checkpoints.html",
    "EmbeddingBagCollection": "api.html",
}
FIRST = 3
TYPE = """(() => {{
  const query = document.querySelector('[data-md-component=search-query]');
  query.focus();
  query.value = {words};
  query.dispatchEvent(new Event('keyup', {{bubbles: true}}));
}})()"""
FOUND = """[...document.querySelectorAll('.md-search-result__item')].map(
  each => each.querySelector('a').href.split('?')[0].split('#')[0])"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not find_chromium(), reason="no browser is installed (package chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None,
        reason="MkDocs is not installed; `make docs` brings it",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, as `make docs` does."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine."""
    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with server:
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
    thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base
        pass


def test_a_search_finds_the_page(address: str, tmp_path: Path) -> None:
    with Chromium(tmp_path / "profile") as browser:
        browser.open(f"{address}index.html")
        browser.until("document.readyState === 'complete'", LIMIT_S)
        found = {}
        for words in SEARCHES:
            browser.run(TYPE.format(words=json.dumps("")))
            browser.until(f"{FOUND}.length === 0", LIMIT_S)
            browser.run(TYPE.format(words=json.dumps(words)))
            results = browser.until(f"{FOUND}.length > 0 && {FOUND}", LIMIT_S)
            found[words] = [each.removeprefix(address) for each in results]
        loaded = browser.run("performance.getEntriesByType('resource').map(each => each.name)")
        complaints = browser.complaints
    first = {words: pages[:FIRST] for words, pages in found.items()}
    assert {
        words: first[words] for words, page in SEARCHES.items() if page not in first[words]
    } == {}
    assert [each for each in loaded if not each.startswith(address)] == []
    assert any("search_index" in each for each in loaded)
    assert complaints == []


def test_no_page_asks_another_server_for_anything(site: Path) -> None:
    """A page's links may lead elsewhere; what a browser loads by itself may not."""
    loads = re.compile(r"<(?:script|img|iframe|link|source)\b[^>]*=[\"']?(?:https?:)?//[^>]*>")
    assert loads.search("<script src=https://elsewhere.org/a.js>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert {p.name: found for p in pages if (found := loads.findall(p.read_text()))} == {}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"@import[^;]*;|url\([\"']?(?:https?:)?//[^)]*\)", styles) == []
