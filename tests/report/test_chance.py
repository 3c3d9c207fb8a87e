"""Results at chance level: cells record the level, and tables warn once."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.fake_study import accuracy_of, report, write_study
from helpers.training_cells import digits_cell, folder_of

from lit_attn.data.image_sets import Digits
from lit_attn.data.labels import measure_largest_class
from lit_attn.report.records.read import read_studies
from lit_attn.report.tables.provenance import find_chance_results
from lit_attn.tasks.language import LanguageModelling
from lit_attn.train import run_cell

pytestmark = pytest.mark.usefixtures("no_rendering")


def record_levels(folder: Path, levels: dict[str, float]) -> None:
    """Write a chance level of the accuracy, or none, to the results of each variant."""
    for path in folder.glob("*/*/result.json"):
        result = json.loads(path.read_text())
        if result["variant"] in levels:
            result["chance"] = {"test/accuracy": levels[result["variant"]], "val/accuracy": 1.0}
            path.write_text(json.dumps(result))


def warnings(folder: Path) -> list[str]:
    text = (folder / "table.full.md").read_text()
    return [line for line in text.splitlines() if "is at chance level" in line]


@pytest.mark.slow
def test_variants_at_chance_level_are_named_once(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", variants={"standard": 0.0, "a": 0.0, "b": 0.01})
    record_levels(folder, {"standard": 0.99, "a": 0.99, "b": 0.1})
    lines = warnings(report(tmp_path))
    assert len(lines) == 1
    assert "test/accuracy of standard, a is at chance level" in lines[0]


def test_results_above_chance_and_of_earlier_versions_are_no_warning(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", variants={"standard": 0.0, "a": 0.0})
    record_levels(folder, {"a": 0.1})
    assert warnings(report(tmp_path)) == []


@pytest.mark.parametrize(("goal", "level"), [("max", 1.0), ("min", 0.0)])
def test_the_mean_over_seeds_decides(goal: str, level: float, tmp_path: Path) -> None:
    folder = write_study(tmp_path, variants={"standard": 0.0})
    mean = np.mean([accuracy_of(0.0, seed, "standard") for seed in range(5)])
    plan = json.loads((folder / "plan.json").read_text())
    plan["metric"]["goal"] = goal
    (folder / "plan.json").write_text(json.dumps(plan))
    step = 1e-6 if goal == "max" else -1e-6
    record_levels(folder, {"standard": mean + step})
    assert find_chance_results(next(read_studies(tmp_path))) == ["standard"]
    record_levels(folder, {"standard": mean - step})
    assert find_chance_results(next(read_studies(tmp_path))) == []


@pytest.mark.slow
def test_a_cell_records_the_share_of_the_largest_class(tmp_path: Path) -> None:
    cell = digits_cell()
    folder = folder_of(cell, tmp_path)
    run_cell(folder, smoke=True)
    chance = json.loads((folder / "result.json").read_text())["chance"]
    splits = Digits().read_splits()
    expected = {}
    for split in ("val", "test"):
        counts = np.bincount(splits[split].labels)
        share = counts.max() / counts.sum()
        spread = math.sqrt(share * (1 - share) / counts.sum())
        expected[f"{split}/accuracy"] = pytest.approx(share + 2 * spread)
    plain = {name: level for name, level in chance.items() if "averaged" not in name}
    assert plain == expected


def test_a_language_model_is_compared_with_equal_probabilities() -> None:
    task = SimpleNamespace(data=SimpleNamespace(signature=SimpleNamespace(vocabulary=256)))
    levels = LanguageModelling.chance_levels(task, "val")  # type: ignore[arg-type]
    assert levels == {"loss": pytest.approx(math.log(256))}


def test_the_largest_class_of_every_split() -> None:
    labels = {"train": np.array([1, 1, 0]), "val": np.array([2, 2, 2, 2]), "test": np.array([])}
    assert measure_largest_class(labels) == {"train": (pytest.approx(2 / 3), 3), "val": (1.0, 4)}
