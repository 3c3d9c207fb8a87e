"""Tests of labels of variants: every table and figure has them, and CSV files the name too."""

from pathlib import Path

import pandas as pd
import pytest
from helpers import studies
from helpers.fake_study import read, report, write_study

from lit_attn.ablate.plan import expand
from lit_attn.cells.records import Plan, StepTimes, TimedVariant
from lit_attn.report.records.read import read_studies
from lit_attn.report.tables.labels import label_study
from lit_attn.report.tables.study_ranks import write_across
from lit_attn.schema.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_rendering")

LABELS = {"standard": "Standard layer", "belief": None, "belief2": "BELIEF & co_1"}
BODY = "baseline: a\ncells: {a: {}, b: {attention: belief2}, c: {attention: belief}}\n"


def write_labelled(root: Path, name: str = "fake") -> Path:
    """Write a study whose plan has LABELS."""
    folder = write_study(root, name=name)
    plan = Plan.load(folder / "plan.json")
    variants = [v.model_copy(update={"label": LABELS[v.name]}) for v in plan.variants]
    plan.model_copy(update={"variants": variants}).write(folder / "plan.json")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labels")
    write_labelled(root / "runs")
    return report(root)


def test_tables_have_labels(folder: Path) -> None:
    markdown = (folder / "table.md").read_text()
    assert "| Standard layer |" in markdown
    assert r"BELIEF \& co\_1" in markdown
    assert "| belief |" in markdown
    assert "| standard |" not in markdown
    latex = (folder / "table.tex").read_text()
    assert r"{BELIEF \& co\_1}" in latex
    assert "{belief}" in latex
    page = (folder / "table.html").read_text()
    assert "BELIEF &amp; co_1" in page
    assert "Standard layer" in (folder / "seeds.svg").read_text()
    index = (folder.parent / "index.html").read_text()
    assert "BELIEF &amp; co_1" in index


def test_csv_files_have_name_and_label(folder: Path) -> None:
    for name in ("table.csv", "per_seed.csv"):
        frame = pd.read_csv(folder / name)
        assert list(frame.columns[:2]) == ["variant", "label"]
        pairs = dict(zip(frame["variant"], frame["label"], strict=True))
        assert pairs == {
            "standard": "Standard layer",
            "belief": "belief",
            "belief2": "BELIEF & co_1",
        }


def test_numbers_do_not_depend_on_labels(folder: Path, tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    plain = pd.read_csv(report(tmp_path) / "table.csv")
    labelled = pd.read_csv(folder / "table.csv").drop(columns="label")
    pd.testing.assert_frame_equal(plain, labelled)


def test_a_study_without_labels_stays_as_it_is(tmp_path: Path) -> None:
    study = read(tmp_path)
    assert label_study(study) is study


def test_other_records_of_variants_have_labels(tmp_path: Path) -> None:
    root = write_labelled(tmp_path)
    timed = TimedVariant(
        variant="belief2", kind="k", baseline_kind="b", seconds=2.0, ratio=2.0, spread=0.1
    )
    StepTimes(device="CPU", variants=[timed]).write(root / "step_times.json")
    study = label_study(next(read_studies(tmp_path)))
    assert study.step_time("BELIEF & co_1") == pytest.approx(2.0)
    assert study.names["BELIEF & co_1"] == "belief2"


def test_the_table_across_studies_has_labels(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_labelled(tmp_path / "runs", name)
    outcome = write_across(list(read_studies(tmp_path / "runs")), tmp_path / "reports")
    (page,) = outcome.written
    assert "Standard layer" in page.with_suffix(".md").read_text()


def test_a_plan_has_the_labels_of_every_criterion(tmp_path: Path) -> None:
    body = BODY + "match: [parameters, flops]\nlabels: {b: B two}"
    matrix = expand(studies.study(tmp_path, body), tmp_path / "runs")
    labels = {variant.name: variant.label for variant in matrix.plan().variants}
    assert labels == {"a": None, "b": "B two", "c": None, "b@flops": "B two@flops", "c@flops": None}
    same = expand(studies.study(tmp_path, BODY + "match: [parameters, flops]"), tmp_path / "runs")
    assert [job.identity for job in matrix.jobs] == [job.identity for job in same.jobs]
    assert matrix.seal([0]).hash == same.seal([0]).hash


def test_a_plan_has_the_labels_of_values_of_axes(tmp_path: Path) -> None:
    body = (
        "axes: {zz: [without, with], ffn: {f: {}, dry: {model.dropout: 0.1}}}\n"
        "baseline: zz=without,f\n"
        'labels: {zz=with: second inner product, dry: dropout, "zz=with,dry": both}'
    )
    plan = expand(studies.study(tmp_path, body), tmp_path / "runs").plan()
    assert plan.levels == {"zz=with": "second inner product", "dry": "dropout"}
    assert [variant.label for variant in plan.variants] == [None, None, None, "both"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("{d: D}", r"labels\.d: no variant 'd'"),
        ("{b: X, c: X}", r"labels\.c: 'X' stands for two variants, b and c"),
        ("{b: c}", r"labels\.b: 'c' stands for two variants, b and c"),
        ("{c: a}", r"labels\.c: 'a' stands for two variants, a and c"),
        ('{b: ""}', r"labels\.b: needs a text of one line"),
        ('{b: "x\\ny"}', r"labels\.b: needs a text of one line"),
    ],
)
def test_labels_that_cannot_be_told_apart_are_refused(
    labels: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(studies.study(tmp_path, f"{BODY}labels: {labels}"), tmp_path / "runs")


def test_swapped_labels_are_possible(tmp_path: Path) -> None:
    source = studies.study(tmp_path, BODY + "labels: {b: c, c: b}")
    plan: Plan = expand(source, tmp_path / "runs").plan()
    assert [variant.label for variant in plan.variants] == [None, "c", "b"]
