"""Samples of their own for what chooses values, variants, the epoch or the end of a training."""

import json
from pathlib import Path

import pytest

from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.study import read_studies
from lit_attn.training.first_step import Mistake, find_mistake

EXPERIMENT = """
task: sequence-classification
data: {{kind: table-labels, {files}, name: mine, context: 8, batch_size: 4, tokenizer: bytes}}
model: {{kind: sequence-classifier, dim: 8, depth: 1, heads: 2, ffn: {{width: 16}}}}
optimizer: {{kind: adamw, lr: 1e-3}}
training: {{epochs: 1{training}}}
"""
STUDY = """
studies:
  s:
    title: Three layers
    experiment: experiment.yaml
    baseline: a
    cells: {{a: {{}}, b: {{attention: xsa}}, c: {{attention: belief}}}}
    {keys}
"""
TUNE = "seeds: 1\n    tune: {optimizer.lr: [1e-3, 1e-2], select: val/accuracy, seeds: [100]}"
DESIGN = "design: {screen: 2, keep: 1, confirm: 6}"
SELECTION_REFUSAL = (
    "data: this study selects by 'val/accuracy', and this data has no split val; test results "
    "choose nothing. Add samples for it, or remove `tune` and `design`"
)


def plan(
    folder: Path, keys: str, training: str = "", splits: tuple[str, ...] = ("test",)
) -> Matrix:
    """Return the plan of a study on a table of texts with some evaluated splits."""
    rows = [{"text": f"t{number}", "label": number % 2} for number in range(8)]
    for split in ("train", *splits):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = ", ".join(f"{split}: {split}.jsonl" for split in ("train", *splits))
    text = EXPERIMENT.format(files=files, training=training)
    (folder / "experiment.yaml").write_text(text)
    path = folder / "ablations.yaml"
    path.write_text(STUDY.format(keys=keys))
    return expand(read_studies(path)["s"], folder / "runs")


def check(matrix: Matrix) -> Mistake | None:
    """Return what the check before the first cell says about the first cell."""
    job = [*matrix.early_jobs, *matrix.jobs][0]
    return find_mistake([job.config], selects={0: matrix.selects})


@pytest.mark.parametrize("keys", [TUNE, DESIGN])
def test_a_search_and_a_screening_without_validation_samples_are_refused(
    tmp_path: Path, keys: str
) -> None:
    """A single evaluated table is the test, whose results choose nothing."""
    assert check(plan(tmp_path, keys)) == Mistake(0, SELECTION_REFUSAL)


@pytest.mark.parametrize("keys", [TUNE, DESIGN])
def test_they_are_accepted_with_validation_samples(tmp_path: Path, keys: str) -> None:
    assert check(plan(tmp_path, keys, splits=("val", "test"))) is None


@pytest.mark.parametrize(
    ("keys", "training", "message"),
    [
        (
            "seeds: 1\n    metric: {selection: best-validation}",
            "",
            "metric: best-validation needs 'val/accuracy', but this data has no split val",
        ),
        ("seeds: 1", ", stop: {patience: 1}", "training.stop: this data has no split val"),
    ],
)
def test_the_epoch_and_the_end_of_a_training_need_them_too(
    tmp_path: Path, keys: str, training: str, message: str
) -> None:
    matrix = plan(tmp_path, keys, training)
    assert check(matrix) == Mistake(0, message)


def test_a_study_that_selects_nothing_needs_none(tmp_path: Path) -> None:
    matrix = plan(tmp_path, "seeds: 1")
    assert matrix.selects == []
    assert check(matrix) is None
