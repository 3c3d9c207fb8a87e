"""Tests of the documentation site: it builds without a warning and needs no network."""

import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.once import make_once
from helpers.paths import ROOT
from site_pages import DIAGRAM, picture_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "site", build_site)


def build_site(folder: Path) -> None:
    subprocess.run(
        # With --quiet, --strict would ignore warnings.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        capture_output=True,
    )


@pytest.mark.process
def test_every_diagram_has_its_picture() -> None:
    """The command that draws them is in docs/generators/write_diagrams.py."""
    pages = (ROOT / "docs").glob("*.md")
    blocks = [text for page in pages for text in DIAGRAM.findall(page.read_text())]
    assert len(blocks) == 2
    assert {picture_of(text) for text in blocks} == {*picture_of("").parent.iterdir()}
    for text in blocks:
        # A browser shows no image with a tag that is not closed.
        assert ElementTree.parse(picture_of(text)).getroot().get("width") == "100%"


@pytest.mark.slow
def test_diagrams_are_pictures(site: Path) -> None:
    page = (site / "design.html").read_text()
    assert page.count('src="assets/diagrams/') == 2
    assert "flowchart TD" not in page


@pytest.mark.slow
def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "mechanisms.html").read_text()
    assert page.count("<math") > 40
    assert "arithmatex" not in page


@pytest.mark.slow
def test_numbers_and_short_names_of_a_table_are_not_broken(site: Path) -> None:
    assert '<td class="short">1e-08</td>' in (site / "parity.html").read_text()
    page = (site / "mechanisms.html").read_text()
    assert '<td class="short"><a href="#dcmha-rank-1">dcmha-rank-1</a></td>' in page
    assert "<td>Dynamically Composable Multi-Head Attention (DCMHA)</td>" in page


@pytest.mark.slow
def test_every_linked_file_of_the_repository_has_a_page(site: Path) -> None:
    broken: list[str] = []
    for page in site.glob("*.html"):
        if page.name == "404.html":  # Its links begin at the root of a web server.
            continue
        targets = re.findall(r'(?:href|src)="([^"#?:]+)[#"?]', page.read_text())
        broken += [f"{page.name}: {name}" for name in targets if not (page.parent / name).exists()]
    assert not broken


@pytest.mark.slow
def test_pages_load_nothing_from_a_network(site: Path) -> None:
    loaded = [
        (page.name, address)
        for page in site.rglob("*.html")
        for address in re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)"',
            page.read_text(),
        )
    ]
    assert not loaded


WIDE = """() => {
    const width = document.documentElement.clientWidth;
    const isWide = part => {
        if (part.getBoundingClientRect().right <= width + 1) return false;
        for (let box = part.parentElement; box.tagName !== 'ARTICLE'; box = box.parentElement)
            if (getComputedStyle(box).overflowX === 'auto') return false;
        return true;
    };
    const parts = [...document.querySelectorAll('article :is(table, math, img, pre, p, li)')];
    const wide = parts.filter(isWide).map(part => part.tagName + ': ' + part.textContent);
    return document.scrollingElement.scrollWidth > width ? ['the page', ...wide] : wide;
}"""
"""Parts of a page that are wider than the window and do not scroll in a box of their own."""


@pytest.mark.slow
def test_pages_fit_a_telephone(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium")
    wide: dict[str, list[str]] = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.set_default_timeout(200_000)
        for path in sorted(site.glob("*.html")):
            page.goto(path.as_uri())
            parts = page.evaluate(WIDE)
            if parts:
                wide[path.name] = parts
        browser.close()
    assert not wide


@pytest.mark.slow
def test_the_equations_of_a_formula_can_stand_below_each_other(site: Path) -> None:
    page = (site / "mechanisms.html").read_text()
    formulas = re.findall(r'<div class="formula">(.*?)</div>', page, re.DOTALL)
    # Those of the standard layer: logits, weights and output.
    assert formulas[0].count("<math") == 3


@pytest.mark.slow
@pytest.mark.parametrize("source", ["server", "file"])
@pytest.mark.parametrize("name", ["index.html", "project/LOG.html"])
def test_the_search_finds_a_page(site: Path, source: str, name: str) -> None:
    """A page that is opened as a file finds the same as one from a web server."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium")
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_api.sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = f"http://127.0.0.1:{server.server_port}" if source == "server" else site.as_uri()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(200_000)
        errors: list[object] = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(f"{folder}/{name}")
        page.locator(".md-search__input").click()
        page.keyboard.type("CAFormer")
        result = page.locator(".md-search-result__link[href*='own-models.html']").first
        result.wait_for(state="attached")
        address = result.evaluate("link => link.href")
        assert address.startswith(f"{folder}/own-models.html"), address
        assert not errors
        browser.close()
        server.shutdown()
