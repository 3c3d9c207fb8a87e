"""All files of a report: tables, figures and HTML pages. Equal records give equal bytes."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from lit_attn.cells.records import Origin
from lit_attn.files import write_atomic
from lit_attn.report.figures import diagnostics, drawing
from lit_attn.report.figures import study as figures
from lit_attn.report.figures.events import draw_events
from lit_attn.report.figures.pictures import draw_pictures
from lit_attn.report.figures.scaling import make_scaling_files
from lit_attn.report.figures.tuning import draw_tuning, make_tuning_table
from lit_attn.report.numbers import fill
from lit_attn.report.pages.index_page import make_index_page
from lit_attn.report.pages.page import (
    FIGURES,
    Section,
    describe_figures,
    render_page,
)
from lit_attn.report.records.skipped import LOG, Outcome, describe_failure
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables import effects, formats, results
from lit_attn.report.tables.columns import make_scale
from lit_attn.report.tables.formats import Cell, Table, named_table, rows_to_csv, to_csv
from lit_attn.report.tables.judgement import Extras, describe_answer, draw_judgement
from lit_attn.report.tables.labels import label_study
from lit_attn.report.tables.screening import make_screening_table
from lit_attn.report.tables.summary import (
    list_cells,
    list_unknown_settings,
    make_settings_frame,
    make_variant_frame,
)
from lit_attn.report.tables.terminal import FILE_SCREEN
from lit_attn.report.verdicts.comparison import Comparisons, compare_variants
from lit_attn.report.verdicts.floors import find_best_floor
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError, escape_control

Files = dict[str, str | bytes]  # Contents by file name.
Images = dict[str, dict[str, bytes]]  # SVG and PNG by name of a figure.

FOREST_PLOT = "seeds"
"""Figure that comes first on a page."""

EFFECTS_PLOT = "effects"
"""Figure that comes first on the page of a product of factors."""

OPTIONAL_FILES = ("settings.csv", "effects.csv", "classes.csv", "diagnostics.csv", "ranks.csv")
"""Tables of a study that are written if they have rows."""


class Analysis(NamedTuple):
    """Everything that is computed from the records of a study, before it is laid out.

    Variants of `study` have their labels as names.
    """

    study: StudyRecord
    comparisons: Comparisons
    estimates: list[effects.Effect]
    summary: pd.DataFrame
    recorded: diagnostics.Diagnostics


def write_reports(studies: Iterable[StudyRecord], reports: Path) -> Outcome:
    """Write reports of studies, of the scaling of families, and the index of all reports.

    A study whose records lead to an error, whatever it is, is skipped with a warning; the others
    are written. Raises ConfigError if no study could be written.
    """
    folders: list[Path] = []
    skipped: list[str] = []
    families: dict[str, list[StudyRecord]] = {}
    for study in studies:
        name = study.plan.study
        try:
            files = make_study_files(study, reports / name)
        except Exception as error:
            LOG.warning("%s: %s. This study is skipped.", name, describe_failure(error))
            skipped.append(name)
            continue
        _write_study_files(reports / name, files)
        record_origin(reports / name, study.folder)
        folders.append(reports / name)
        # A smoke run has no values that a law could be fitted to.
        if study.plan.family and not study.plan.is_smoke:
            families.setdefault(study.plan.family, []).append(label_study(study))
    if skipped and not folders:
        raise ConfigError(f"{reports}: no study could be written; the warnings have the reasons")
    for family, levels in families.items():
        try:
            files = make_scaling_files(levels)
        except Exception as error:
            LOG.warning("%s: %s. Its scaling is skipped.", family, describe_failure(error))
            skipped.append(family)
            continue
        for name, content in files.items():
            write_atomic(reports / family / name, content)
    write_atomic(reports / "index.html", make_index_page(reports))
    return Outcome(folders, skipped)


def make_study_files(written: StudyRecord, folder: Path) -> Files:
    """Return the files of a study's report; `folder` is the one from which its page has links."""
    study = label_study(written)
    comparisons = compare_variants(study)
    analysis = Analysis(
        study,
        comparisons,
        # Names state the levels of the axes.
        effects.find_effects(written),
        make_variant_frame(study, comparisons),
        diagnostics.read_study_diagnostics(study),
    )
    images = _render_figures(analysis)
    results_table = _make_linked_table(analysis, folder)
    settings = make_settings_frame(study)
    unknown = list_unknown_settings(settings)
    if unknown:
        warning = fill(results.SENTENCES["config.yaml"], variants=", ".join(unknown))
        results_table.warnings.append(warning)
    classes = results.make_class_frame(study)
    files = _make_tables(analysis, results_table, settings, classes)
    further = _make_further_tables(analysis, settings, classes)
    files["table.html"] = _make_page(analysis, results_table, further, images, list(files))
    for name, kinds in images.items():
        for kind, image in kinds.items():
            files[f"{name}.{kind}"] = image
    return files


def _write_study_files(folder: Path, files: Files) -> None:
    """Write the files, and remove what an earlier report of other records left in the folder."""
    figure_names = {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for name in (figure_names | set(OPTIONAL_FILES)) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)


def record_origin(report: Path, records: Path | None) -> None:
    """Record which folder of records a report shows, and warn if it replaces that of another.

    A table of another program has no folder of records.
    """
    path = report / "origin.json"
    if records is None:
        path.unlink(missing_ok=True)
        return
    recorded = Origin.read_valid(path)
    before = None if recorded is None else Path(os.path.normpath(report.resolve() / recorded.file))
    folder = records.resolve()
    if before is not None and before != folder and (before / "plan.json").exists():
        LOG.warning(
            "%s: replaces the tables of %s by those of %s; choose another --reports to keep both",
            report,
            before,
            records,
        )
    origin = Origin(file=os.path.relpath(folder, report.resolve()))
    if origin != recorded:
        origin.write(path)


def _render_figures(analysis: Analysis) -> Images:
    """Draw the figures that have records, by name."""
    images: Images = {}
    with drawing.appearance():
        for name, figure in _draw_figures(analysis):
            if figure:
                images[name] = drawing.render(figure)
                # A figure and its axes refer to each other, so nothing else would free them soon.
                figure.clear()
    return images


def _draw_figures(analysis: Analysis) -> Iterator[tuple[str, Figure | None]]:
    """Yield the study's figures one by one, because each of them takes much memory."""
    study, comparisons, estimates, summary, recorded = analysis
    baseline = study.plan.baseline
    if study.finished_cells():
        yield "seeds", figures.draw_seeds(study, comparisons)
        yield "events", draw_events(study, comparisons)
        yield "progress", figures.draw_progress(study, comparisons)
        yield "cost", figures.draw_cost(study, summary)
        metric = study.plan.metric
        yield "effects", figures.draw_effects(estimates, metric, comparisons.look_level)
        yield "pictures", draw_pictures(study)
        for name, draw in diagnostics.DRAWERS.items():
            yield name, draw(recorded, baseline)
    if study.tuning:
        yield "tuning", draw_tuning(study.tuning, baseline, drawing.assign_styles(study.plan))


def _make_linked_table(analysis: Analysis, folder: Path) -> Table:
    """Return the table of results, in which the name of a variant leads to its config.yaml."""
    study = analysis.study
    table = results.make_results_table(study, analysis.summary, analysis.comparisons)
    names = {variant.name for variant in study.plan.variants}
    for row in table.rows:
        # The row of a floor is none of a variant.
        name = row[0].text
        path = next(study.config_paths(name), None) if name in names else None
        if path:
            row[0] = row[0]._replace(link=os.path.relpath(path, folder))
    return table


def _make_tables(
    analysis: Analysis, results_table: Table, settings: pd.DataFrame, classes: pd.DataFrame
) -> Files:
    """Return the CSV, Markdown and LaTeX files of a study."""
    study, comparisons, estimates, summary, recorded = analysis
    latex_table = results.make_results_table(study, summary, comparisons, study.plan.latex or ())
    judged = judge_study(study, comparisons=comparisons)
    remedy = f"table.full.md has them, and `lit-attn judge {study.plan.study} --all`"
    extras = Extras(estimates, find_best_floor(study), remedy)
    files: Files = {
        "table.csv": to_csv(summary, study.names),
        "per_seed.csv": rows_to_csv(list_cells(study)),
        **formats.make_markdown_files(results_table, "table"),
        "table.txt": draw_judgement(judged, FILE_SCREEN, extras) + "\n",
        "table.tex": formats.to_latex(latex_table, study.plan.study, "table.full.md"),
    }
    effect_frame = pd.DataFrame(estimates, columns=effects.Effect._fields)
    optional = (
        settings,
        effect_frame.drop(columns=["label", "by_seed"]),
        classes,
        diagnostics.make_values_table(recorded),
        diagnostics.make_ranks_table(recorded),
    )
    for name, frame in zip(OPTIONAL_FILES, optional, strict=True):
        if len(frame):
            files[name] = to_csv(frame, study.names)
    return files


def _make_further_tables(
    analysis: Analysis, settings: pd.DataFrame, classes: pd.DataFrame
) -> list[Table]:
    """Return the tables below the table of results; a table without rows is not shown."""
    study = analysis.study
    baseline = study.plan.baseline
    tables = [results.make_metrics_table(study)]
    if study.screening is not None:
        tables.append(make_screening_table(study.screening))
    if study.tuning:
        tables.append(make_tuning_table(study.tuning, baseline))
    tables.append(results.make_class_table(classes))
    rows = [[Cell(text) for text in row] for row in settings.itertuples(index=False)]
    tables.append(named_table("settings", rows, baseline=baseline))
    setup = results.describe_setup(study.plan)
    for table in tables:
        table.notes.extend(setup)
    return tables


def _make_page(
    analysis: Analysis,
    results_table: Table,
    further: list[Table],
    images: Images,
    links: list[str],
) -> str:
    """Return the HTML page of a study.

    The forest plot comes first, then the results, further figures and tables, attention layers. In
    a product of factors the effects come first, and the variants are folded.
    """
    study = analysis.study
    judged = judge_study(study, comparisons=analysis.comparisons)
    drawn = [name for name in FIGURES if name in images]
    attention = [name for name in drawn if "section" in FIGURES[name]]
    plain = [name for name in drawn if name not in (FOREST_PLOT, EFFECTS_PLOT, *attention)]
    # The warnings stand at the top of the page, so the caption does not repeat them.
    without_warnings = replace(results_table, warnings=[])
    sections = [
        Section(figures=[name for name in drawn if name == FOREST_PLOT], tables=[without_warnings]),
        Section(figures=plain, tables=further),
        Section("Attention layers", attention),
        _make_samples_section(study),
    ]
    setup = results.describe_setup(study.plan)
    verdict = describe_answer(judged, analysis.estimates)
    # The answer about a smoke run is its warning.
    warnings = [warning for warning in results_table.warnings if warning not in verdict]
    if analysis.estimates:
        digits = make_scale(analysis.summary).digits
        level = analysis.comparisons.look_level
        table = effects.make_effects_table(analysis.estimates, study, digits, level)
        table.notes.extend(setup)
        first = Section(figures=[name for name in drawn if name == EFFECTS_PLOT], tables=[table])
        heading = f"All {len(study.plan.variants)} variants"
        sections[0] = replace(sections[0], heading=heading, is_folded=True)
        sections.insert(0, first)
    return render_page(
        results_table.title.rstrip("."),
        sections,
        setup,
        captions=describe_figures(study.test.pairs, setup),
        name=study.plan.study,
        links=links,
        warnings=warnings,
        images=images,
        verdict=verdict,
    )


def _make_samples_section(study: StudyRecord) -> Section:
    """Return the generated texts of the present cells, folded, with their variants' labels."""
    if study.samples is None:
        return Section()
    present = {cell.identity for cell in study.cells if cell.status == "done"}
    labels = {name: label for label, name in study.names.items()}
    shown = []
    for sample in study.samples.samples:
        if sample.identity in present:
            label = labels.get(sample.variant, sample.variant)
            # Models of bytes can write control characters.
            text = escape_control(sample.text)
            shown.append(sample.model_copy(update={"variant": label, "text": text}))
    among = ""
    if study.samples.top_k is not None:
        among = f", among the {study.samples.top_k} most likely tokens,"
    caption = fill(
        results.SENTENCES["samples"],
        temperature=f"{study.samples.temperature:g}",
        among=among,
        seed=study.samples.seed,
    )
    return Section("Generated text", samples=shown, caption=caption, is_folded=True)
