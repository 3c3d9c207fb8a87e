"""All files of a report: tables, figures and HTML pages. Equal records give equal bytes."""

import html
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report import (
    diagnostics,
    drawing,
    effects,
    fairness,
    figures,
    formats,
    segmentation,
    stats,
)
from lit_attn.report.columns import make_scale
from lit_attn.report.comparison import ALPHA, Comparisons, compare_variants
from lit_attn.report.diagnostics import Diagnostics
from lit_attn.report.formats import ASSETS, Cell, Table, named_table, read_asset, templates, to_csv
from lit_attn.report.read import LOG, StudyRecord, read_studies
from lit_attn.report.results import LATEX_COLUMNS, make_metrics_table, make_results_table
from lit_attn.report.summary import make_seed_frame, make_settings_frame, make_variant_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: dict[str, dict[str, str]] = read_asset("figures.yaml")
"""Caption, section and CSV file of every figure, in the order of the page."""

OPTIONAL_TABLES = {"settings.csv", "effects.csv", "classes.csv", "diagnostics.csv", "ranks.csv"}
"""Tables that only some studies have."""


@dataclass(frozen=True)
class Section:
    """Part of a page: figures of FIGURES by name, then tables."""

    heading: str = ""
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or in `studies`) and reports/index.html.

    The index lists every study in `reports`. A study that cannot be read is skipped with a warning.
    Returns the folders that were written. Raises ConfigError if there is nothing to report on.
    """
    return write_studies(read_studies(runs, studies), reports)


def write_studies(studies: Iterable[StudyRecord], reports: Path) -> list[Path]:
    """Write the report of each study, and reports/index.html. Returns the reports' folders."""
    folders = [_write_study(study, reports) for study in studies]
    write_atomic(reports / "index.html", make_index_page(reports))
    return folders


def _write_study(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    recorded = diagnostics.read_study_diagnostics(study)
    comparisons = compare_variants(study)
    images = draw_figures(study, comparisons, recorded)
    files: dict[str, str | bytes] = {**make_tables(study, comparisons, set(images), recorded)}
    for name, kinds in images.items():
        files |= {f"{name}.{kind}": image for kind, image in kinds.items()}
    # Remove what an earlier report of other records left here.
    figure_names = {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for name in (figure_names | OPTIONAL_TABLES) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder


def draw_figures(
    study: StudyRecord, comparisons: Comparisons, recorded: Diagnostics
) -> dict[str, dict[str, bytes]]:
    """Return SVG and PNG of every figure that the records can fill, by name and kind."""
    if not study.finished_cells():
        return {}
    label = study.plan.metric.label
    drawers: dict[str, Callable[[], Figure | None]] = {
        "seeds": lambda: figures.draw_seeds(study, comparisons),
        "curves": lambda: figures.draw_curves(study),
        "progress": lambda: figures.draw_progress(study, comparisons),
        "cost": lambda: figures.draw_cost(study),
        "effects": lambda: figures.draw_effects(effects.find_effects(study), label),
        "pictures": lambda: segmentation.draw_pictures(study),
        **diagnostics.make_drawers(recorded, study.plan.baseline),
    }
    with drawing.appearance():
        drawn = {name: draw() for name, draw in drawers.items()}
        return {name: drawing.render(figure) for name, figure in drawn.items() if figure}


def make_tables(
    study: StudyRecord,
    comparisons: Comparisons,
    shown: set[str],
    recorded: Diagnostics,
) -> dict[str, str]:
    """Return every file but the figures: content by file name. The page has the figures `shown`."""
    summary = make_variant_frame(study, comparisons)
    table = make_results_table(study, summary, comparisons)
    estimates = effects.find_effects(study)
    classes = segmentation.make_class_frame(study)
    settings = make_settings_frame(study)
    optional = {
        "settings.csv": settings,
        "effects.csv": pd.DataFrame(estimates, columns=effects.Effect._fields).drop(
            columns="by_seed"
        ),
        "classes.csv": classes,
        "diagnostics.csv": diagnostics.make_values_table(recorded),
        "ranks.csv": diagnostics.make_ranks_table(recorded),
    }
    latex_table = make_results_table(study, summary, comparisons, study.plan.latex or LATEX_COLUMNS)
    seeds = make_seed_frame(study)
    files = {
        "table.csv": to_csv(summary),
        "per_seed.csv": to_csv(seeds),
        "table.md": formats.to_markdown(table),
        "table.tex": formats.to_latex(latex_table, study.plan.study),
        **{name: to_csv(frame) for name, frame in optional.items() if len(frame)},
    }
    places: dict[str, list[str]] = {"": [], "attention": []}
    for name, entry in FIGURES.items():
        if name in shown:
            places[entry.get("section", "")].append(name)
    mixture = diagnostics.make_mixture_table(recorded)
    digits = make_scale(summary).digits
    further = [
        make_metrics_table(study, seeds),
        fairness.make_criteria_table(study, summary, digits),
        fairness.make_tuning_table(study),
        *([effects.make_contrast_table(study, study.contrast, digits)] if study.contrast else []),
        effects.make_effects_table(estimates, study, digits),
        segmentation.make_class_table(classes),
        named_table(
            "settings",
            [[Cell(text) for text in row] for row in settings.itertuples(index=False)],
            baseline=study.plan.baseline,
        ),
    ]
    sections = [
        Section(tables=[table]),
        Section(figures=places[""], tables=further),
        Section("Attention layers", places["attention"], [mixture]),
    ]
    title = table.title.rstrip(".")
    files["table.html"] = render_page(
        title, sections, name=study.plan.study, links=list(files), warnings=table.warnings
    )
    return files


def render_page(title: str, sections: list[Section], **values: Any) -> str:
    """Return an HTML page of the sections that have any content.

    `values` are further variables of the template: `name`, `links`, `warnings`, and for figures
    other than FIGURES `captions` and `figures`.
    """
    limits = {"rows": drawing.MOST_ROWS, "panels": drawing.MOST_PANELS}
    captions = {name: entry["caption"].format(**limits) for name, entry in FIGURES.items()}
    shown = [
        Section(part.heading, part.figures, tables)
        for part in sections
        if (tables := [table for table in part.tables if table.rows]) or part.figures
    ]
    page = templates().get_template("page.html")
    texts = {n: (ASSETS / f"report.{n}").read_text(encoding="utf-8") for n in ("css", "js")}
    entries = {"captions": captions, "figures": FIGURES, "links": [], "warnings": [], **texts}
    return page.render(entries | {"title": title, "sections": shown} | values)


def make_index_page(reports: Path) -> str:
    """Return a page that lists all studies in `reports` by name, read from their own files.

    A variant differs from its baseline if it has a star in its study and its p is still at most
    ALPHA after the correction over all studies.
    """
    pages = sorted(reports.glob("*/table.html"))
    tables = [report for page in pages if (report := _read_report(page.parent))]
    p_values = [variants["p_adjusted"].dropna().tolist() for _, variants, _ in tables]
    rows = []
    for (folder, variants, cells), adjusted in zip(
        tables, stats.holm_over_studies(p_values), strict=True
    ):
        variants.loc[variants["p_adjusted"].notna(), "p_index"] = adjusted
        rows.append(_index_row(folder, variants, cells))
    table = named_table("index", rows, count=len(tables), alpha=ALPHA)
    return render_page("Studies", [Section(tables=[table])])


def _read_report(folder: Path) -> tuple[Path, pd.DataFrame, pd.DataFrame] | None:
    """Return table.csv and per_seed.csv of a report, or None (and a warning) for other folders."""
    try:
        variants = pd.read_csv(folder / "table.csv", dtype={"variant": str})
        wanted = {"status", "finished", "device"}
        cells = pd.read_csv(folder / "per_seed.csv", usecols=lambda name: name in wanted, dtype=str)
    except (OSError, ValueError) as error:
        LOG.warning("%s: is not a report and is left out of the index: %s", folder, error)
        return None
    if not {"variant", "n", "best", "significant", "p_adjusted"} <= set(variants):
        LOG.warning("%s: is not a report of this version and is left out of the index", folder)
        return None
    # A study without any result has no date and no device.
    return folder, variants, cells.reindex(columns=sorted(wanted))


def _index_row(folder: Path, variants: pd.DataFrame, cells: pd.DataFrame) -> list[Cell]:
    page = (folder / "table.html").read_text(encoding="utf-8")
    title = re.search("<title>(.*)</title>", page)
    done = cells[cells["status"] == "done"]
    fewest, most = int(variants["n"].min()), int(variants["n"].max())
    is_different = variants["significant"] & (variants["p_index"] <= ALPHA)
    texts = [
        html.unescape(title[1]) if title else "",
        f"{len(done)} / {len(cells)}",
        str(most) if fewest == most else f"{fewest} to {most}",
        ", ".join(variants.loc[variants["best"], "variant"]) or "none",
        ", ".join(variants.loc[is_different, "variant"]) or "none",
        max(done["finished"].dropna(), default="")[:10],
        ", ".join(sorted(set(done["device"].dropna()))),
    ]
    return [Cell(folder.name, link=f"{folder.name}/table.html"), *map(Cell, texts)]
