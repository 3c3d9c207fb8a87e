"""Room of a baseline: its distance from the best possible value, which its caption names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import fake_study
from helpers.paths import ROOT

from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.tables.results import find_room, make_results_table
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.tasks.metrics import DEFAULT_METRIC, percent


def read(root: Path, values: list[float], best: float | None = 100.0) -> StudyRecord:
    """Return a study whose baseline has these accuracies in percent."""
    metric = DEFAULT_METRIC.model_copy(update={"best": best})
    study = fake_study.read(root, seeds=len(values), metric=metric)
    cells: list[CellRecord] = []
    for cell in study.cells:
        is_baseline = cell.variant == study.plan.baseline
        cells.append(replace(cell, value=values[cell.seed] if is_baseline else cell.value))
    return replace(study, cells=cells)


def write_notes(study: StudyRecord) -> str:
    comparisons = compare_variants(study, with_power=False)
    table = make_results_table(study, make_variant_frame(study, comparisons), comparisons)
    return " ".join(table.notes)


def test_the_room_is_the_distance_from_the_best_value_in_deviations(tmp_path: Path) -> None:
    values = [70.0, 74.0, 72.0, 77.0]
    study = read(tmp_path, values)
    room = (100 - np.mean(values)) / np.std(values, ddof=1)
    assert find_room(study) == pytest.approx(room)
    sentence = f"is {room:.1f} of its standard deviations from the best possible value, 100."
    assert sentence in write_notes(study)


def test_a_ceiling_that_leaves_no_room_is_named(tmp_path: Path) -> None:
    """A baseline at 99.9 % with a deviation of .07 had no room for the gain that was claimed."""
    notes = write_notes(read(tmp_path / "near", [99.9, 99.96, 100.0, 99.86]))
    assert "can hardly show an improvement" in notes
    full = read(tmp_path / "full", [100.0] * 4)
    assert find_room(full) == 0
    assert "is 0.0 of its standard deviations" in write_notes(full)


def test_no_room_is_known_without_a_best_value_or_a_spread(tmp_path: Path) -> None:
    study = read(tmp_path / "no-best", [70.0, 74.0], best=None)
    assert find_room(study) is None
    assert "standard deviations from the best" not in write_notes(study)
    assert find_room(read(tmp_path / "equal", [70.0, 70.0])) is None
    assert find_room(read(tmp_path / "one", [70.0])) is None


def test_metrics_declare_their_best_value_in_printed_units() -> None:
    assert percent("accuracy", "accuracy").best == 1
    assert percent("error", "error", "min").best == 0
    assert percent("share", "share", None).best is None
    studies = read_studies(ROOT / "ablations.yaml")
    expected = {"claim-positions": 100, "claim-gates": 0, "xsa-or-mask": 0, "text": None}
    for name, best in expected.items():
        assert expand(studies[name], Path("runs")).plan().metric.best == best, name
    # Another direction than that of the metric has another best value, which nobody declares.
    matrix = expand(studies["claim-gates"], Path("runs"))
    turned = studies["claim-gates"].study.metric.model_copy(update={"goal": "max"})
    assert turned.resolve(matrix.baseline.experiment).best is None
