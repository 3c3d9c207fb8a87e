"""Reports on a table of results that another program wrote."""

import csv
import io
from pathlib import Path

import pandas as pd
import pytest

from lit_attn.report.__main__ import main
from lit_attn.report.columns import format_seeds
from lit_attn.report.table_input import read_table
from lit_attn.schema.errors import ConfigError


def write(folder: Path, columns: str = "variant,seed,accuracy,loss,parameters") -> Path:
    """Write six seeds of three variants; `good` is ahead, and `bad` has a failed seed."""
    rows = [columns.split(",")]
    for place, variant in enumerate(("base", "good", "bad")):
        for seed in range(6):
            accuracy = 70 + seed + 3.1 * (variant == "good") + 0.1 * (seed * place % 4)
            value = "" if (variant, seed) == ("bad", 2) else str(accuracy)
            rows.append([variant, str(seed), value, str(100 - accuracy), str(1000 + place)])
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    path = folder / "results.csv"
    path.write_text(stream.getvalue())
    return path


def report(folder: Path, *arguments: str) -> int:
    table = ["--csv", str(folder / "results.csv"), "--reports", str(folder / "reports")]
    return main([*table, *arguments])


def test_every_metric_column_becomes_a_report(tmp_path: Path) -> None:
    write(tmp_path)
    assert report(tmp_path) == 0
    folders = {path.name for path in (tmp_path / "reports").iterdir() if path.is_dir()}
    assert folders == {"results-accuracy", "results-loss"}
    folder = tmp_path / "reports" / "results-accuracy"
    table = pd.read_csv(folder / "table.csv").set_index("variant")
    assert table["best"].to_dict() == {"base": False, "good": True, "bad": False}
    assert table.loc["good", "difference"] == pytest.approx(3.1 + 0.1 * (0 + 1 + 2 + 3 + 0 + 1) / 6)
    assert table.loc["bad", ["n", "failed", "parameters"]].tolist() == [5, 1, 1002]
    text = (folder / "table.full.md").read_text()
    assert "accuracy is the column 'accuracy' of the table of results: mean" in text
    assert "n counts the seeds with a result, of 6 planned (seeds 0 to 5)." in text
    assert (folder / "seeds.svg").exists()
    index = (tmp_path / "reports" / "index.html").read_text()
    assert "results-loss/table.html" in index


def test_a_column_named_loss_is_minimised(tmp_path: Path) -> None:
    accuracy, loss = read_table(write(tmp_path))
    assert (accuracy.plan.metric.goal, loss.plan.metric.goal) == ("max", "min")
    (study,) = read_table(tmp_path / "results.csv", metrics=["loss:max"])
    assert study.plan.metric.goal == "max"
    assert study.plan.study == "results"


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        *[(name, "min") for name in ("ppl", "val/WER", "test_bpb", "FID-50k", "cross_entropy")],
        *[(name, "max") for name in ("accuracy", "F1", "power", "bleu", "answered", "sampled")],
    ],
)
def test_the_goal_follows_from_whole_words(name: str, goal: str, tmp_path: Path) -> None:
    (study,) = read_table(write(tmp_path, f"variant,seed,{name},loss,parameters"), metrics=[name])
    assert study.plan.metric.goal == goal


def test_a_table_with_missing_rows_is_an_interim_look(tmp_path: Path) -> None:
    path = write(tmp_path)
    report(tmp_path, "--metric", "accuracy")
    assert "interim look" not in (tmp_path / "reports/results/table.full.md").read_text()
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    report(tmp_path, "--metric", "accuracy")
    assert "interim look" in (tmp_path / "reports/results/table.full.md").read_text()


def test_a_value_that_is_not_finite_is_a_failed_seed(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("variant,seed,score\na,0,1\na,1,inf\nb,0,\nb,1,2\n")
    (study,) = read_table(path)
    assert [cell.status for cell in study.cells] == ["done", "error", "error", "done"]


def test_the_baseline_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path)
    assert report(tmp_path, "--baseline", "good", "--metric", "accuracy") == 0
    table = pd.read_csv(tmp_path / "reports" / "results" / "table.csv").set_index("variant")
    assert table["difference"].isna().to_dict() == {"base": False, "good": True, "bad": False}


def test_a_variant_can_have_the_name_of_a_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("variant,seed,score\nNone,0,1\nnull,0,nan\n")
    (study,) = read_table(path)
    assert [(cell.variant, cell.status) for cell in study.cells] == [
        ("None", "done"),
        ("null", "error"),
    ]


def test_an_index_without_a_heading_is_no_metric(tmp_path: Path) -> None:
    """pandas writes such a column, and some programs write spaces behind commas."""
    path = tmp_path / "results.csv"
    path.write_text(",variant, seed, score\n0,a, 0, 1\n1,b, 0, 2\n")
    (study,) = read_table(path)
    assert study.plan.metric.name == "score"
    assert [(cell.variant, cell.value) for cell in study.cells] == [("a", 1), ("b", 2)]


def test_the_list_of_one_seed_cannot_be_read_as_a_number_of_seeds(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("variant,seed,score\na,0,1\nb,0,2\n")
    assert report(tmp_path) == 0
    text = (tmp_path / "reports" / "results" / "table.full.md").read_text()
    assert "n counts the seeds with a result, of 1 planned (seed 0)." in text
    assert format_seeds([3, 4, 5]) == "seeds 3 to 5"
    assert format_seeds([0, 50]) == "seeds 0, 50"


def test_a_seed_without_a_row_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("variant,seed,score\na,0,1\na,1,2\nb,0,1.5\n")
    (study,) = read_table(path)
    assert [cell.status for cell in study.variant_cells("b")] == ["done", "missing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,seed,score\na,0,1\n", "has no column 'variant'"),
        ("variant,seed,score\na,x,1\n", "needs a variant and a seed, which is an integer"),
        ("variant,seed,score\n,0,1\n", "needs a variant and a seed, which is an integer"),
        ("variant,seed,score\na,0,1\na,0,2\n", "variant 'a' has seed 0 twice"),
        ("variant,seed,note\na,0,x\n", "no numeric column that could be a metric"),
        (
            "variant,seed,score,loss\na,0,1,0.5\na,1,2,x\n",
            "results.csv: row 2, column 'loss': 'x' is not a number; correct it",
        ),
        ("variant,seed,score,step_time\na,0,1,x\na,1,2,3\n", "row 1, column 'step_time': 'x'"),
        (
            "variant,seed,score,flops\na,0,1,\na,1,2,1.5\n",
            "results.csv: row 2, column 'flops': 1.5 is not a whole number",
        ),
        ("", "cannot be read as CSV"),
    ],
)
def test_another_table_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(path)


def test_a_text_cell_in_a_column_that_is_not_chosen_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("variant,seed,score,note,device\na,0,1,3 runs,CPU\na,1,2,4,CPU\n")
    (study,) = read_table(path, metrics=["score:min"])
    assert study.plan.metric.goal == "min"
    with pytest.raises(ConfigError, match="column 'note'"):
        read_table(path)


def test_unknown_names_are_refused_with_the_nearest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert report(tmp_path, "--metric", "acuracy") == 2
    assert "has no numeric column 'acuracy'; did you mean 'accuracy'?" in capsys.readouterr().err
    assert report(tmp_path, "--baseline", "bas") == 2
    assert "has no variant 'bas'; did you mean 'base'?" in capsys.readouterr().err


def test_a_folder_and_a_table_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert main([str(tmp_path), "--csv", str(tmp_path / "results.csv")]) == 2
    assert capsys.readouterr().err == (
        "lit-attn report: give a folder of runs, --csv FILE or --paper NAME\n"
    )
