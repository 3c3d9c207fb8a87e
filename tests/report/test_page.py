"""The HTML page in a real browser: sorting, filtering, variants, theme, phone width."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_study import write_study

from lit_attn.report import write_reports
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.tables.formats import Cell, Table, named_table

sync_api = pytest.importorskip("playwright.sync_api")
# Debian calls it chromium; the machines of GitHub Actions have Chrome.
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
VARIANTS = {"standard": 0.0, "a": 0.03, "b": 0.01, "c": 0.02, "d": -0.01, "e": -0.02, "f": 0.04}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator["sync_api.Page"]:
    root = tmp_path_factory.mktemp("page")
    write_study(root / "runs", variants=VARIANTS, seeds=3)
    (folder,) = write_reports(root / "runs", root / "reports")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.route("http*://**", lambda route: route.abort())
        page.goto((folder / "table.html").as_uri())
        yield page
        assert errors == []
        browser.close()


def open_section(page: "sync_api.Page", folder: Path, section: Section, name: str = "") -> None:
    path = folder / "index.html"
    path.write_text(render_page("Title", [section], [], name=name))
    page.goto(path.as_uri())


def expect_names(page: "sync_api.Page", names: list[str]) -> None:
    """Wait until the table of results shows these rows: DataTables sorts them in a timer."""
    rows = page.locator("table.results tbody tr:visible th")
    sync_api.expect(rows).to_have_text(names, use_inner_text=True)


@pytest.mark.process
def test_a_click_on_a_heading_sorts_by_numbers(page: "sync_api.Page") -> None:
    heading = page.locator("table.results thead th", has_text="difference")
    heading.click()
    # A typographic minus is a minus, and the baseline without a difference comes last.
    expect_names(page, ["e", "d", "b", "c", "a", "f", "standard"])
    heading.click()
    expect_names(page, ["f", "a", "c", "b", "d", "e", "standard"])
    assert heading.get_attribute("aria-sort") == "descending"


def test_rows_can_be_filtered_and_switched_off(page: "sync_api.Page") -> None:
    box = page.locator("input[type=search]").first
    box.fill("stand")
    expect_names(page, ["standard"])
    box.fill("")
    page.locator("#variants summary").click()
    page.get_by_label("c", exact=True).uncheck()
    rows = sync_api.expect(page.locator("table.results tbody tr:visible th"))
    rows.to_have_count(len(VARIANTS) - 1)
    rows.not_to_contain_text(["c"], use_inner_text=True)
    page.get_by_label("c", exact=True).check()
    rows.to_have_count(len(VARIANTS))


def test_the_theme_changes_colours_of_page_and_figures(page: "sync_api.Page") -> None:
    colours = []
    for _ in range(2):
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator("#theme").click()
    assert len(set(colours)) == 2
    page.emulate_media(color_scheme="dark")
    page.evaluate("delete document.documentElement.dataset.theme")
    text, grid = (
        page.locator(f"figure.seeds svg [style*='{style}']").first
        for style in ("stroke: #000000", "stroke: #e6e6e6")
    )
    stroke = "e => getComputedStyle(e).stroke"
    assert text.evaluate(stroke) == "rgb(230, 237, 243)"
    dark = grid.evaluate(stroke)
    page.emulate_media(color_scheme="light")
    assert text.evaluate(stroke) == "rgb(27, 31, 36)"
    assert grid.evaluate(stroke) != dark


def test_a_figure_shows_values_on_hover_and_hides_variants(page: "sync_api.Page") -> None:
    dots = page.locator("""figure.seeds g[id^='["b"']""").first
    dots.scroll_into_view_if_needed()
    place = dots.locator("use").first.bounding_box()
    assert place is not None
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    # Values are percentages with four digits.
    assert re.fullmatch(r"b: \d\d\.\d\d", page.locator("#tip").inner_text())
    box = page.get_by_label("b", exact=True)
    if not box.is_visible():
        page.locator("#variants summary").click()
    box.uncheck()
    assert not dots.is_visible()
    box.check()
    assert dots.is_visible()


def test_a_click_enlarges_a_figure_and_another_click_restores_it(page: "sync_api.Page") -> None:
    drawing = page.locator("figure.seeds .drawing")

    def width() -> float:
        return float(drawing.locator("svg").evaluate("svg => svg.getBoundingClientRect().width"))

    before = width()
    drawing.click()
    assert width() > 1.2 * before
    # The figure scrolls inside its frame, and the page does not.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drawing.click()
    assert width() == before


def test_a_variant_is_switched_off_in_all_figures(page: "sync_api.Page") -> None:
    """Means, intervals and error bars disappear with the points."""
    # Two panels of dots, two means and an interval.
    assert page.locator("""figure.seeds g[id^='["b"']""").count() == 5
    parts = page.locator("""figure.cost g[id^='["b"']""")
    # Only the error bars of the legend have no name.
    assert page.locator("figure.cost g[id^='LineCollection']").count() == len(VARIANTS)
    page.locator("#variants").evaluate("details => { details.open = true; }")
    box = page.get_by_label("b", exact=True)
    box.uncheck()
    assert not any(part.is_visible() for part in parts.all())
    box.check()


def test_print_is_light_and_repeats_the_heading_of_a_table(page: "sync_api.Page") -> None:
    page.locator("html").evaluate("element => { element.dataset.theme = 'dark'; }")
    colour = "getComputedStyle(document.body).color"
    assert page.evaluate(colour) == "rgb(230, 237, 243)"
    page.emulate_media(media="print")
    assert page.evaluate(colour) == "rgb(27, 31, 36)"
    heading = "getComputedStyle(document.querySelector('thead')).breakInside"
    assert page.evaluate(heading) == "avoid"
    # A tall figure fits on one page.
    height = "getComputedStyle(document.querySelector('.drawing svg')).maxHeight"
    assert float(page.evaluate(height).removesuffix("px")) < 700
    page.emulate_media(media="screen")
    page.evaluate("delete document.documentElement.dataset.theme")


def test_a_phone_shows_the_page_without_sideways_scrolling(page: "sync_api.Page") -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    headings = page.locator("table.results thead th:visible")
    sync_api.expect(headings).to_have_text(
        ["variant", "accuracy (%)", "n", "difference [95 %]", "p", "verdict"]
    )
    wide = page.locator(".wide").first
    assert wide.evaluate("element => element.scrollWidth <= element.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_button_opens_the_other_columns(page: "sync_api.Page") -> None:
    headings = page.locator("table.results thead th:visible")
    sync_api.expect(headings).to_have_count(7)
    assert "verdict" in headings.all_inner_texts()
    button = page.locator("button.columns").first
    button.click()
    assert headings.count() > 7
    assert button.inner_text() == "show fewer columns"
    button.click()
    sync_api.expect(headings).to_have_count(7)


def test_claims_fit_and_their_filter_is_below_the_heading(
    page: "sync_api.Page", tmp_path: Path
) -> None:
    texts = ["A claim about the mixtures of keys of a paper " * 2, "1", "The title of a study " * 3]
    row = [Cell(text) for text in (*texts, "+0.22", "+0.0144 [-0.2228, +0.2516]", "5", "undecided")]
    table = named_table("claims", [row] * 6, totals="6 undecided")
    open_section(page, tmp_path, Section("Claims", tables=[table]), "paper")
    heading, box = (page.locator(name).bounding_box() for name in ("h2", "input[type=search]"))
    assert heading["y"] + heading["height"] <= box["y"]
    wide = page.locator(".wide")
    assert wide.evaluate("element => element.scrollWidth <= element.clientWidth")


def test_a_table_of_a_paper_stays_in_the_order_of_the_paper(
    page: "sync_api.Page", tmp_path: Path
) -> None:
    """The rows of an entry, and groups and merged cells, have no other order."""
    values = {"A / x": ("3", "1"), "A / y": ("1", "9"), "B / x": ("2", "<"), "B / z": ("4", "")}
    values |= {"B / u": ("0", "7"), "B / v": ("8", "6")}
    rows = [
        [Cell(name), Cell(text), Cell("<" if text == "<" else "0")]
        for key, texts in values.items()
        for name, text in zip((key, "ours"), texts, strict=True)
    ]
    table = Table(["", "all / value", "all / other"], rows, kind="paper", entry=2)
    open_section(page, tmp_path, Section(tables=[table]), "paper")
    assert page.locator("tbody").first.inner_text().strip() == "A"
    assert page.locator("table.dataTable").count() == 0
    assert page.locator("input[type=search]").count() == 0


def test_marks_and_long_names_stay_inside_the_page(page: "sync_api.Page", tmp_path: Path) -> None:
    name = "attention=mgk+keys=2+shared=false,residual=perpendicular+scope=head," + "x" * 40
    cells = [Cell(f"{number}.25 ± 0.25", mark="*") for number in range(12)]
    rows = [[Cell(text), *cells] for text in (name, "standard", "c", "d", "e", "f")]
    headings = ["variant", *(f"value {number}" for number in range(12))]
    table = Table(headings, rows, kind="results")
    open_section(page, tmp_path, Section(tables=[table]), "names")
    page.locator("button.columns").click()
    assert page.locator("tbody th").first.bounding_box()["width"] < 400
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator("#variants summary").click()
    # A mark is absolute, so a table that scrolls does not clip it by itself.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 800})


def test_cells_are_sorted_by_their_number_and_text_comes_after_numbers(
    page: "sync_api.Page", tmp_path: Path
) -> None:
    values = ["1,024", "< 0.001", "\N{MINUS SIGN}2.5 [\N{MINUS SIGN}6, +1]", "busy machine"]
    values += ["\N{EM DASH}", "\N{PLUS-MINUS SIGN}0.5", "7e-3"]
    rows = [
        [Cell(text), Cell(text, is_bold=True, mark="*" if "0" in text else "")] for text in values
    ]
    open_section(page, tmp_path, Section(tables=[Table(["a", "b"], rows)]))
    heading = page.locator("thead th").last
    heading.click()
    order = [values[place] for place in (2, 1, 6, 5, 0, 3, 4)]
    cells = sync_api.expect(page.locator("tbody th"))
    cells.to_have_text(order, use_inner_text=True)
    heading.click()
    cells.to_have_text([*order[-2::-1], order[-1]], use_inner_text=True)


@pytest.mark.process
def test_a_variant_outside_the_axes_shows_its_values_and_can_be_switched_off(
    page: "sync_api.Page", tmp_path: Path
) -> None:
    """The interval has no path in the drawing, and triangles stand for the values."""
    write_study(tmp_path / "runs", variants=VARIANTS | {"far": -0.6}, seeds=3)
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    page.goto((folder / "table.html").as_uri())
    parts = page.locator("""figure g[id^='["far"']""")
    texts = {
        "seeds": r"far: [\d.]{4,5} to [\d.]{4,5}, mean [\d.]{2,5}",
        "cost": r"far: 1[\d.]{3,4} at [\de.+]+",
    }
    for figure, text in texts.items():
        mark = page.locator(f"""figure.{figure} g[id^='["far"'] use""").first
        mark.scroll_into_view_if_needed()
        place = mark.bounding_box()
        page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        assert re.fullmatch(text, page.locator("#tip").inner_text())
    page.locator("#variants summary").click()
    page.get_by_label("far", exact=True).uncheck()
    assert len(parts.all()) > 5
    assert not any(part.is_visible() for part in parts.all())


def test_the_names_of_a_wide_table_stay_visible(page: "sync_api.Page", tmp_path: Path) -> None:
    headings = ["variant", *(f"heading {number}" for number in range(30))]
    table = Table(headings, [[Cell("belief"), *[Cell("1.25 ± 0.25", mark="*")] * 30]])
    open_section(page, tmp_path, Section(tables=[table]))
    page.locator(".wide").evaluate("element => { element.scrollLeft = 500; }")
    name = page.locator("tbody th")
    place = name.bounding_box()
    assert place["x"] == page.locator(".wide").bounding_box()["x"]
    # The marks of the cells that have moved below the name do not cover it.
    middle = [place["x"] + place["width"] / 2, place["y"] + place["height"] / 2]
    tag = page.evaluate("place => document.elementFromPoint(...place).tagName", middle)
    assert tag == "TH"
