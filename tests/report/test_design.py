"""Reports and verdicts of studies with `design`: claims come from fresh seeds alone."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers import designs
from numpy.typing import NDArray

from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.screening import Design, keep_best
from lit_attn.cells.records import Plan, PlannedVariant
from lit_attn.cells.screening import ScreenedVariant, rank_variants
from lit_attn.judging.stream_verdicts import judge_sealed_stream
from lit_attn.report import write_reports
from lit_attn.report.answers.judged import JudgedStudy
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.tables.judgement import draw_judgement
from lit_attn.report.tables.terminal import Screen
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.report.verdicts.next_action import make_study_command
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.metrics import DEFAULT_METRIC

pytestmark = pytest.mark.usefixtures("no_rendering")

VALUES = {"base": 0.5, "a": 0.4, "b": 0.6, "c": 0.45, "d": 0.7}


def confirm(matrix: Matrix, values: Mapping[str, float]) -> None:
    """Write a result of every cell of the confirmation, with a little noise."""
    for job in matrix.jobs:
        noise = random.Random(job.name).gauss(0, 0.01)
        designs.finish(job, 0.5, test=values[job.variant] + noise)


def read_report(folder: Path) -> dict[str, str]:
    """Write the report of the study, and return its texts by file."""
    write_reports(folder / "runs", folder / "reports")
    return {
        path.name: path.read_text("utf-8")
        for path in (folder / "reports/tiny").iterdir()
        if path.suffix in (".md", ".txt", ".html", ".csv")
    }


def judge(folder: Path) -> JudgedStudy:
    (study,) = read_studies(folder / "runs")
    command = make_study_command(folder / "runs/tiny", folder / "ablations.yaml", study.plan)
    return judge_study(study, command)


def test_the_table_shows_screened_out_variants_and_the_design(tmp_path: Path) -> None:
    designs.write(
        tmp_path, "{screen: 2, keep: 2, confirm: 8}", more="labels: {a: Model A, d: Model D}"
    )
    confirm(designs.finish_screening(tmp_path, VALUES), VALUES)
    texts = read_report(tmp_path)
    rows = [line for line in texts["table.full.md"].splitlines() if line.startswith("| ")]
    names = [row.split("|")[1].strip() for row in rows]
    assert names == ["variant", "base", "b", "Model D", "c", "Model A"]
    cells = [cell.strip() for cell in rows[4].strip("| ").split("|")]
    # The two seeds of c have 46 and 44.
    assert cells[:2] == ["c", "screened out, 45.00 ± 1.41"]
    assert set(cells[2:]) == {"—"}
    assert "seeds 1000 to 1007" in texts["table.full.md"]
    assert (
        "All 4 variants and the baseline were screened with 2 seeds by validation accuracy (%). The"
        " baseline and the best 2 of them were then trained with 8 seeds that the screening did not"
        " use" in texts["table.full.md"]
    )
    assert "4 variants were screened with 2 seeds, and the best 2" in texts["table.md"]
    assert "Screened out with 2 seeds by" in texts["table.txt"]
    assert texts["table.html"].count('<tr class="screened-out">') == 2
    assert "Screening." in texts["table.html"]
    # No row of a CSV file mixes values of the screening with fresh ones.
    assert "Model A" not in texts["table.csv"]
    seeds = {line.split(",")[2] for line in texts["per_seed.csv"].splitlines()[1:]}
    assert seeds == {str(seed) for seed in range(1000, 1008)}


def test_a_diverged_variant_is_screened_out_without_a_value(tmp_path: Path) -> None:
    designs.write(tmp_path)
    for job in designs.read(tmp_path).screening_jobs:
        if job.variant == "a":
            designs.fail(job, "diverged")
        else:
            designs.finish(job, VALUES[job.variant])
    matrix = designs.read(tmp_path)
    matrix.write_plan()
    confirm(matrix, VALUES)
    assert "| a | screened out, diverged | — |" in read_report(tmp_path)["table.md"]


def test_judge_decides_the_kept_variants_and_names_the_others(tmp_path: Path) -> None:
    designs.write(tmp_path, "{screen: 2, keep: 2, confirm: 8}")
    confirm(designs.finish_screening(tmp_path, VALUES), VALUES)
    judged = judge(tmp_path)
    assert [(v.variant, v.verdict, v.is_final) for v in judged.variants] == [
        ("b", "better", True),
        ("d", "better", True),
    ]
    assert judged.variants[0].seeds.planned == 8
    assert judged.design is not None
    assert judged.design.kept == ["b", "d"]
    kept = {entry.variant: entry.is_kept for entry in judged.design.variants}
    assert kept == {"base": None, "a": False, "b": True, "c": False, "d": True}
    assert judged.next.kind == "none"
    text = draw_judgement(judged, Screen(100, 0))
    assert "Screened out with 2 seeds by val/accuracy, nothing claimed: a and c." in text


def test_a_screening_is_not_judged_as_a_stream_of_ideas(tmp_path: Path) -> None:
    designs.write(tmp_path)
    designs.finish_screening(tmp_path, VALUES)
    (study,) = read_studies(tmp_path / "runs")
    with pytest.raises(ConfigError, match="tiny: --stream: its `design` has screened the ideas"):
        judge_sealed_stream(study)


def test_no_verdict_is_final_before_the_screening_has_ended(tmp_path: Path) -> None:
    designs.write(tmp_path)
    designs.read(tmp_path).write_plan()
    judged = judge(tmp_path)
    assert judged.is_interim
    assert {(v.verdict, v.is_final) for v in judged.variants} == {("undecided", False)}
    assert judged.next.kind == "run"
    assert judged.next.text.endswith("The screening has not ended.")
    text = draw_judgement(judged, Screen(100, 0))
    assert "The screening (2 seeds by val/accuracy) has not ended." in text
    assert (
        "The screening (2 seeds by validation accuracy (%)) has not ended"
        in (read_report(tmp_path)["table.full.md"])
    )


def test_more_seeds_are_asked_for_in_the_design(tmp_path: Path) -> None:
    designs.write(tmp_path, "{screen: 2, keep: 2, confirm: 6}")
    matrix = designs.finish_screening(tmp_path, VALUES)
    for job in matrix.jobs:
        # A difference of one standard deviation, which needs more pairs.
        noise = random.Random(job.name).gauss(0, 0.01)
        shift = 0.0 if job.variant == "base" else 0.01
        designs.finish(job, 0.5, test=0.5 + shift + noise)
    action = judge(tmp_path).next
    assert action.kind == "add-seeds"
    assert "to every kept variant (`confirm: " in action.text
    assert action.command is not None
    assert "--seeds" not in action.command


def test_a_damaged_record_of_the_screening_is_a_warning(tmp_path: Path) -> None:
    designs.write(tmp_path)
    confirm(designs.finish_screening(tmp_path, VALUES), VALUES)
    (tmp_path / "runs/tiny/screening.json").write_text("{")
    assert (
        "screening.json cannot be read, so the table does not show"
        in (read_report(tmp_path)["table.full.md"])
    )


class NullStudy(NamedTuple):
    """Verdicts of a study without effects, and the variant with the best screening."""

    judged: JudgedStudy
    winner: str


def judge_null_study(
    generator: np.random.Generator, design: Design, variants: int, *, is_fresh: bool
) -> NullStudy:
    """Screen and confirm variants that equal the baseline.

    Half of the variance is that of the seed, which all variants share. Without fresh seeds the
    values of the screening are judged.
    """
    names = ["base", *(f"v{number}" for number in range(variants))]
    screened = draw_values(generator, names, design.screen)
    entries = []
    for name in names[1:]:
        mean = float(screened[name].mean())
        entries.append(ScreenedVariant(variant=name, identity=name, mean=mean))
    kept = ["base", *keep_best(entries, design)]
    seeds = design.fresh_seeds if is_fresh else design.screening_seeds
    values = draw_values(generator, kept, design.confirm) if is_fresh else screened
    cells = []
    for name in kept:
        for seed, value in zip(seeds, values[name], strict=True):
            cells.append(CellRecord(name, seed, "done", float(value)))
    plan = Plan(
        study="null",
        title="null",
        baseline="base",
        metric=DEFAULT_METRIC,
        variants=[PlannedVariant(name=name) for name in kept],
        seeds=list(seeds),
        cells=[],
    )
    winner = rank_variants(entries, design.metric)[0].variant
    return NullStudy(judge_study(StudyRecord(plan, cells)), winner)


def draw_values(
    generator: np.random.Generator, names: list[str], seeds: int
) -> dict[str, NDArray[np.float64]]:
    """Return values of each variant with seeds of equal levels."""
    levels = 70 + generator.normal(size=seeds)
    return {name: levels + generator.normal(size=seeds) for name in names}


def count_stars(design: Design, studies: int, *, is_fresh: bool) -> tuple[float, float]:
    """Return the shares of studies with a star of the winner, and with any star."""
    generator = np.random.default_rng(0)
    winners = 0
    studies_with_stars = 0
    for _ in range(studies):
        study = judge_null_study(generator, design, 20, is_fresh=is_fresh)
        stars = {entry.variant for entry in study.judged.variants if entry.is_significant}
        winners += study.winner in stars
        studies_with_stars += bool(stars)
    return winners / studies, studies_with_stars / studies


@pytest.mark.slow
def test_the_winner_of_a_screening_of_null_variants_has_few_stars() -> None:
    design = Design(screen=8, keep=3, confirm=8, metric=DEFAULT_METRIC)
    winner, any_star = count_stars(design, 300, is_fresh=True)
    assert winner <= 0.05
    # Two standard errors of a share of .05 are .025.
    assert any_star <= 0.075
    # Judged with the seeds that have chosen it, a winner alone would often have a star.
    alone = replace(design, keep=1)
    winner, _ = count_stars(alone, 50, is_fresh=False)
    assert winner > 0.1
