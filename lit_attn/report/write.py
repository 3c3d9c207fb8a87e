"""All files of a report: tables, figures and HTML pages. Equal records give equal bytes."""

import html
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from lit_attn.files import write_atomic
from lit_attn.report import diagnostics, drawing, effects, figures, formats, results, stats
from lit_attn.report.columns import make_scale
from lit_attn.report.comparison import ALPHA, Comparisons, compare_variants
from lit_attn.report.formats import Cell, named_table, read_csv, to_csv
from lit_attn.report.page import FIGURES, Section, render_page
from lit_attn.report.read import LOG, StudyRecord
from lit_attn.report.scaling import write_scaling
from lit_attn.report.summary import list_cells, make_settings_frame, make_variant_frame
from lit_attn.report.tuning import draw_tuning, make_tuning_table


def write_reports(studies: Iterable[StudyRecord], reports: Path) -> list[Path]:
    """Write reports of studies and of the scaling of families, and return the studies' folders."""
    folders, families = [], defaultdict(list)
    for study in studies:
        folders.append(_write_study(study, reports))
        if study.plan.family:
            families[study.plan.family].append(study)
    for levels in families.values():
        write_scaling(levels, reports)
    write_atomic(reports / "index.html", make_index_page(reports))
    return folders


def _write_study(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    recorded = diagnostics.read_study_diagnostics(study)
    comparisons = compare_variants(study)
    estimates = effects.find_effects(study)
    summary = make_variant_frame(study, comparisons)
    images: dict[str, dict[str, bytes]] = {}
    with drawing.appearance():
        for name, figure in _draw_figures(study, comparisons, estimates, summary, recorded):
            if figure:
                images[name] = drawing.render(figure)
                # A figure and its axes refer to each other, so nothing else would free them soon.
                figure.clear()
    keys = study.plan.latex or results.LATEX_COLUMNS
    table = results.make_results_table(study, summary, comparisons, keys)
    latex = formats.to_latex(table, study.plan.study)
    table = results.make_results_table(study, summary, comparisons)
    for row, variant in zip(table.rows, study.plan.variants, strict=True):
        if path := study.config_path(variant.name):
            row[0] = row[0]._replace(link=os.path.relpath(path, folder))
    settings, classes = make_settings_frame(study), results.make_class_frame(study)
    effect_frame = pd.DataFrame(estimates, columns=effects.Effect._fields)
    optional = {
        "settings.csv": settings,
        "effects.csv": effect_frame.drop(columns="by_seed"),
        "classes.csv": classes,
        "diagnostics.csv": diagnostics.make_values_table(recorded),
        "ranks.csv": diagnostics.make_ranks_table(recorded),
    }
    files: dict[str, str | bytes] = {
        "table.csv": to_csv(summary),
        "per_seed.csv": formats.rows_to_csv(list_cells(study)),
        "table.md": formats.to_markdown(table),
        "table.tex": latex,
        **{name: to_csv(frame) for name, frame in optional.items() if len(frame)},
    }
    digits = make_scale(summary).digits
    differing = [[Cell(text) for text in row] for row in settings.itertuples(index=False)]
    further = [
        results.make_metrics_table(study),
        effects.make_criteria_table(study, summary, digits),
        *([make_tuning_table(study.tuning, study.plan.baseline)] if study.tuning else []),
        *([effects.make_contrast_table(study, study.contrast, digits)] if study.contrast else []),
        effects.make_effects_table(estimates, study.plan, digits, comparisons.level),
        results.make_class_table(classes),
        named_table("settings", differing, baseline=study.plan.baseline),
    ]
    setup = results.describe_setup(study.plan)
    for other in further:
        other.notes.extend(setup)
    drawn = [name for name in FIGURES if name in images]
    attention = [name for name in drawn if "section" in FIGURES[name]]
    plain = [name for name in drawn if name not in attention]
    sections = [Section(tables=[table]), Section(figures=plain, tables=further)]
    sections.append(Section("Attention layers", attention))
    title = table.title.rstrip(".")
    values = {"name": study.plan.study, "links": list(files), "warnings": table.warnings}
    files["table.html"] = render_page(title, sections, setup, images=images, **values)
    for name, kinds in images.items():
        files |= {f"{name}.{kind}": image for kind, image in kinds.items()}
    # Remove what an earlier report of other records left here.
    figure_names = {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for name in (figure_names | optional.keys()) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder


def _draw_figures(
    study: StudyRecord,
    comparisons: Comparisons,
    estimates: list[effects.Effect],
    summary: pd.DataFrame,
    recorded: diagnostics.Diagnostics,
) -> Iterator[tuple[str, Figure | None]]:
    """Yield the study's figures one by one, because each of them takes much memory."""
    baseline, label = study.plan.baseline, study.plan.metric.label
    if study.finished_cells():
        yield "seeds", figures.draw_seeds(study, comparisons)
        yield "progress", figures.draw_progress(study, comparisons)
        yield "cost", figures.draw_cost(study, summary)
        yield "effects", figures.draw_effects(estimates, label, comparisons.level)
        for name, draw in diagnostics.DRAWERS.items():
            yield name, draw(recorded, baseline)
    if study.tuning:
        yield "tuning", draw_tuning(study.tuning, baseline)


def make_index_page(reports: Path) -> str:
    """Return a page that lists all studies in `reports` by name, read from their own files.

    A variant differs from its baseline if it has a star in its study and its p is still at most
    ALPHA after the correction over all studies.
    """
    tables = {}
    for page in sorted(reports.glob("*/table.html")):
        try:
            frame = read_csv(page.with_name("table.csv"))
            # Several looks at the results of a study leave a smaller level.
            frame["p_adjusted"] *= ALPHA / frame.get("level", ALPHA)
            tables[page] = frame[["variant", "n", "planned", "best", "significant", "p_adjusted"]]
        except (OSError, ValueError, KeyError) as error:
            LOG.warning("%s: is not a report and is left out of the index: %s", page.parent, error)
    p_values = [variants["p_adjusted"].dropna().tolist() for variants in tables.values()]
    rows = []
    corrected = stats.holm_over_studies(p_values)
    for (page, variants), adjusted in zip(tables.items(), corrected, strict=True):
        variants.loc[variants["p_adjusted"].notna(), "p_index"] = adjusted
        is_different = variants["significant"] & (variants["p_index"] <= ALPHA)
        title = re.search("<title>(.*)</title>", page.read_text(encoding="utf-8"))
        fewest, most = int(variants["n"].min()), int(variants["n"].max())
        texts = [
            html.unescape(title[1]) if title else "",
            f"{variants['n'].sum()} / {variants['planned'].sum()}",
            str(most) if fewest == most else f"{fewest} to {most}",
            ", ".join(variants.loc[variants["best"], "variant"]) or "none",
            ", ".join(variants.loc[is_different, "variant"]) or "none",
        ]
        study = page.parent.name
        rows.append([Cell(study, link=f"{study}/table.html"), *map(Cell, texts)])
    for page in sorted(reports.glob("*/scaling.html")):
        link = f"{page.parent.name}/scaling.html"
        rows.append([Cell(page.parent.name, link=link), Cell("Scaling"), *[Cell("")] * 4])
    table = named_table("index", rows, count=len(tables), alpha=ALPHA)
    return render_page("Studies", [Section(tables=[table])], [])
