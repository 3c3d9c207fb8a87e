"""Key `budget` of a study: the design that is chosen for trainings or hours, and its record."""

import json
import re
from pathlib import Path

import pytest
from helpers import designs, studies
from helpers.commands import run_python

from lit_attn.__main__ import main
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.study_budget import store_times
from lit_attn.cells.budget import read_chosen
from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Timing
from lit_attn.config.study import read_studies
from lit_attn.report.records.read import read_studies as read_records
from lit_attn.report.statistics import designs as report_designs
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError

TEN = ("base", *(f"v{number}" for number in range(10)))


def write(folder: Path, budget: str, names: tuple[str, ...] = TEN, more: str = "") -> Path:
    """Write a study with `budget` alone."""
    path = designs.write(folder, names=names, more=more)
    path.write_text(path.read_text().replace(f"design: {designs.DESIGN}", f"budget: {budget}"))
    return path


def measure(folder: Path, seconds: float, names: tuple[str, ...] = TEN) -> None:
    """Record trainings of `seconds`, 2 `seconds`, and so on."""
    source = read_studies(folder / "ablations.yaml")["tiny"]
    matrix = expand(source, folder / "runs", is_estimate=True)
    timings = {}
    for place, variant in enumerate(matrix.written):
        timings[variant.cell("tiny", 0).kind] = Timing(
            startup=0.0,
            step_time=seconds * (place + 1),
            steps=1,
            evaluation_time=0.0,
            evaluations=0,
        )
    assert store_times(matrix.folder, "tiny", matrix.written, timings)
    assert len(matrix.written) == len(names)


def read_numbers(matrix: Matrix) -> tuple[int, int, int]:
    """Return the numbers of the screening."""
    assert matrix.screening is not None
    return matrix.screening.screen, matrix.screening.keep, matrix.screening.confirm


def test_many_variants_are_screened_and_confirmed_within_the_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "66")
    matrix = designs.read(tmp_path)
    chosen = report_designs.choose_screening(10, 66)
    assert chosen is not None
    assert read_numbers(matrix) == chosen
    assert matrix.screening is not None
    assert matrix.screening.count_trainings() == chosen.trainings(10) <= 66
    assert matrix.seal(matrix.list_seeds()).design["budget"] == 66
    matrix.write_plan()
    # Another version of the program could choose another design.
    other = report_designs.Screening(1, 2, 10)
    monkeypatch.setattr(report_designs, "choose_screening", lambda *_: other)
    assert designs.read(tmp_path).screening == matrix.screening
    # A changed study is planned anew.
    write(tmp_path, "67")
    assert read_numbers(designs.read(tmp_path)) == other


@pytest.mark.parametrize(
    ("budget", "names", "seeds"),
    [("40", ("base", "a", "b"), 13), ("12", ("base", "a"), 6), ("200", designs.NAMES, 40)],
)
def test_few_variants_have_as_many_seeds_as_the_trainings_allow(
    tmp_path: Path, budget: str, names: tuple[str, ...], seeds: int
) -> None:
    write(tmp_path, budget, names)
    matrix = designs.read(tmp_path)
    # A screening of four variants gains nothing over 40 seeds of each.
    assert matrix.screening is None
    assert matrix.list_seeds() == list(range(seeds))
    matrix.write_plan()
    seals = Seals.read(matrix.folder / "seals.json")
    assert seals is not None
    assert seals.entries[0].seeds == list(range(seeds))


def test_a_product_estimates_its_effects_from_all_cells(tmp_path: Path) -> None:
    product = (
        "baseline: 'lr=0.1,weight_decay=0'\nbudget: 60\n"
        "axes: {optimizer.lr: [0.1, 0.2, 0.3], optimizer.weight_decay: [0, 1]}"
    )
    path = studies.write(tmp_path, product)
    path.write_text(path.read_text().replace("    seeds: 2\n", ""))
    matrix = designs.read(tmp_path)
    assert matrix.screening is None
    assert len(matrix.jobs) == 60
    assert matrix.list_seeds() == list(range(10))


def test_hours_become_trainings_with_the_measured_seconds(tmp_path: Path) -> None:
    path = write(tmp_path, "40h")
    with pytest.raises(ConfigError) as caught:
        designs.read(tmp_path)
    message = str(caught.value)
    assert re.match(rf"{path}:\d+: tiny\.budget: 40 hours are as many trainings as thei", message)
    assert f"{path} --study tiny --dry-run --estimate`, or write a number" in message
    assert "\n" not in message
    # Eleven variants of 400 to 4,400 seconds: 2,400 in the mean.
    measure(tmp_path, 400)
    matrix = designs.read(tmp_path)
    assert matrix.chosen is not None
    assert (matrix.chosen.trainings, matrix.chosen.training_seconds) == (60, 2400)
    assert read_numbers(matrix) == report_designs.choose_screening(10, 60)
    matrix.write_plan()
    record = read_chosen(matrix.folder)
    # Other seconds change nothing, also if the first seed is still to run.
    measure(tmp_path, 100)
    again = designs.read(tmp_path)
    assert again.chosen == record == matrix.chosen
    assert again.seal(again.list_seeds()).hash == matrix.seal(matrix.list_seeds()).hash
    # Another budget is another decision.
    write(tmp_path, "20h")
    assert designs.read(tmp_path).chosen is not None
    assert designs.read(tmp_path).chosen.trainings == 120


def test_equal_time_has_the_seconds_of_the_baseline(tmp_path: Path) -> None:
    write(tmp_path, "1h", ("base", "a"), more="match: time")
    measure(tmp_path, 100, ("base", "a"))
    matrix = designs.read(tmp_path)
    assert matrix.chosen is not None
    assert matrix.chosen.trainings == 36
    assert matrix.list_seeds() == list(range(18))


def test_a_changed_variant_is_measured_again(tmp_path: Path) -> None:
    path = write(tmp_path, "40h")
    measure(tmp_path, 400)
    path.write_text(path.read_text().replace("v3: {optimizer.lr: 5e-3}", "v3: {model.dim: 32}"))
    with pytest.raises(ConfigError, match="which are not measured"):
        designs.read(tmp_path)


MISTAKES = [
    ("budget: 0", "budget: 0 is no budget: write a time (90min, 2h, 1.5d or 8:00:00) or a number"),
    ("budget: 40 hours", "budget: 40 hours is no budget: write a time"),
    ("budget: true", "budget: true is no budget"),
    ("budget: [1, 2]", "budget: 1+2 is no budget"),
    ("budgte: 40", "unknown key 'budgte'; did you mean 'budget'?"),
    ("budget: 12", "budget: 12 trainings are too few for a star of one of 10 variants; write at"),
    ("budget: 90\nseeds: 3", "budget: cannot stand beside `seeds`, because it decides the seeds"),
    ("budget: 90\nmatch: [parameters, flops]", "budget: needs one criterion of `match`"),
    ("budget: 90\ndesign: {select: test/loss}", "design.select: needs a validation metric"),
]


@pytest.mark.parametrize(("written", "message"), MISTAKES)
def test_mistakes_are_one_error_line(tmp_path: Path, written: str, message: str) -> None:
    path = designs.write(tmp_path, names=TEN)
    indented = written.replace("\n", "\n    ")
    path.write_text(path.read_text().replace(f"design: {designs.DESIGN}", indented))
    with pytest.raises(ConfigError) as caught:
        designs.read(tmp_path)
    text = str(caught.value)
    assert message in text
    assert re.match(r"\S+ablations\.yaml:\d+: ", text)
    assert "\n" not in text


def test_seeds_of_the_command_line_are_for_a_study_without_a_screening(tmp_path: Path) -> None:
    write(tmp_path, "90")
    source = read_studies(tmp_path / "ablations.yaml")["tiny"]
    with pytest.raises(ConfigError, match="budget: decides the seeds, so leave out --seeds"):
        expand(source, tmp_path / "runs", seeds=(0, 1))
    write(tmp_path, "12", ("base", "a"))
    source = read_studies(tmp_path / "ablations.yaml")["tiny"]
    matrix = expand(source, tmp_path / "runs", seeds=(6, 7))
    # The plan has the chosen seeds and the further ones.
    assert matrix.list_seeds() == list(range(8))


def test_the_fewest_trainings_of_the_message_are_enough(tmp_path: Path) -> None:
    for names in (("base", "a", "b"), designs.NAMES, TEN):
        write(tmp_path, "1", names)
        with pytest.raises(ConfigError) as caught:
            designs.read(tmp_path)
        fewest = int(str(caught.value).rpartition(" ")[2])
        write(tmp_path, str(fewest), names)
        assert designs.read(tmp_path).chosen is not None
        write(tmp_path, str(fewest - 1), names)
        with pytest.raises(ConfigError, match="too few"):
            designs.read(tmp_path)


def test_one_record_has_the_budget_and_every_answer_reads_it(tmp_path: Path) -> None:
    write(tmp_path, "66")
    matrix = designs.read(tmp_path)
    matrix.write_plan()
    assert "budget" not in (matrix.folder / "screening.json").read_text()
    (study,) = read_records(tmp_path / "runs")
    judged = judge_study(study)
    assert judged.design is not None
    assert judged.design.budget == 66
    (matrix.folder / "budget.json").write_text("{")
    (damaged,) = read_records(tmp_path / "runs")
    warnings = judge_study(damaged).warnings
    assert any("budget.json cannot be read" in warning for warning in warnings)
    # Another design, after results are known, would be a choice by them.
    with pytest.raises(ConfigError, match=r"budget\.json: cannot be read; move it away"):
        designs.read(tmp_path)


def test_a_dry_run_prints_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "40h")
    measure(tmp_path, 400)
    assert main(["run", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert (
        "  budget of 40 hours: 60 trainings of 2,400 s, one after another; chosen: a screening\n"
        in output
    )
    assert "  power 0." in output
    assert main(["run", "--dry-run", "--json"]) == 0
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    assert study["budget"] == {
        "trainings": 60,
        "seconds": 144_000,
        "training_seconds": 2400,
        "seeds": None,
    }


@pytest.mark.process
def test_an_estimate_measures_what_a_budget_of_time_needs(tmp_path: Path) -> None:
    write(tmp_path, "1h", ("base", "a"))
    words = ("-m", "lit_attn.ablate", "ablations.yaml", "--dry-run")
    refused = run_python(tmp_path, *words)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    done = run_python(tmp_path, *words, "--estimate")
    assert done.returncode == 0, done.stderr
    printed_budget = re.search(
        r"budget of 1 hour: ([\d,]+) trainings of \S+ s, one after", done.stdout
    )
    assert printed_budget is not None
    printed = run_python(tmp_path, *words)
    seeds = int(printed_budget[1].replace(",", "")) // 2
    assert f"chosen: {seeds:,} seeds of all variants" in printed.stdout
